"""Artifacts at their edges: changed networks, odd BatchNorms, misspelt options, claims that no model could mean."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, save
from dubito.models.artifact.artifact import examine
from dubito.models.conversion.directions import set_directions
from dubito.models.errors import ArtifactError
from dubito.models.manifest import Calibration, Card, Image, Input
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.inducing import Inducing, InducingLayer
from tests import forked
from tests.small_models import bayesian_mlp, mlp


@pytest.mark.parametrize("change", ["activation", "head"])
def test_a_network_changed_after_build_is_saved_as_it_is(tmp_path: Path, change: str) -> None:
    net = mlp(4, 16, 3)
    assert isinstance(net, nn.Sequential)
    if change == "activation":
        net[2] = nn.Tanh()
    else:
        net[3] = nn.Linear(16, 7)
    network = bayesianize(net, "ffg-w").eval()
    path = tmp_path / "m.safetensors"
    assert save(network, path).architecture.name == "custom"
    x = torch.randn(5, 4)
    again = load(path)
    found = again.predict(x, 0, keep_outputs=True).outputs
    assert found is not None
    torch.testing.assert_close(found[0], net(x).detach(), rtol=1e-5, atol=1e-6)


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def test_folding_leaves_a_batchnorm_that_does_more_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Activated(4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    net(torch.randn(20, 3, 8, 8))
    network = bayesianize(net.eval(), "ffg-w")
    path = tmp_path / "m.safetensors"
    save(network, path, batchnorm="fold", card=Card(input=Input(shape=(3, 8, 8))))
    x = torch.randn(3, 3, 8, 8)
    found = load(path).predict(x, 0, keep_outputs=True).outputs
    assert found is not None
    torch.testing.assert_close(found[0], net(x).detach(), rtol=1e-4, atol=1e-5)


def test_misspelt_options_are_mistakes(tmp_path: Path) -> None:
    network = bayesian_mlp((3, 4, 2), "ffg-w")
    with pytest.raises(ArtifactError, match="precision is 'fp16'; expected one of float32"):
        save(network, tmp_path / "m", precision="fp16")  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="batchnorm is 'folded'; expected one of keep, fold"):
        save(network, tmp_path / "m", batchnorm="folded")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_infinite_scales_and_impossible_inputs_are_refused() -> None:
    layer = {"method": "ffg-u", "M_out": 2, "M_in": 2, "lam_max": 0.1, "sigma_max": 0.1, "noise": "exact"}
    with pytest.raises(ValidationError, match="sigma"):
        InducingLayer.model_validate(layer | {"sigma": float("inf")})
    with pytest.raises(ValidationError, match="temperature"):
        Calibration(
            false_positive_rate=0.05,
            coverage=0.9,
            measure="entropy",
            thresholds={"entropy": {1: 1.0}},
            quantiles={1: 0.5},
            temperature=float("inf"),
        )
    with pytest.raises(ValidationError, match="more than"):
        Input(shape=(1, 1 << 20, 1 << 20), image=Image(mean=(0.0,), std=(1.0,)))


def test_directions_add_what_their_numbers_take_and_come_back_exactly(tmp_path: Path) -> None:
    """R = 4 on a network where way 3 is used: two bytes a number, in every precision but int8, which takes one."""
    torch.manual_seed(0)
    network = bayesianize(build("resnet8"), "ffg-u", inducing=16, start="prior")
    sizes = {}
    for R in (0, 4):
        set_directions(network, torch.randn(8, 3, 32, 32), R)
        for precision in ("float32", "float16", "int8"):
            save(network, tmp_path / precision, precision=precision)
            sizes[R, precision] = (tmp_path / precision).stat().st_size
    numbers = sum(d.numel() for d in directions_of(network).values())
    header = 3_000
    assert 0 < sizes[4, "float32"] - sizes[0, "float32"] < 2 * numbers + header
    assert 0 < sizes[4, "float16"] - sizes[0, "float16"] < 2 * numbers + header
    assert 0 < sizes[4, "int8"] - sizes[0, "int8"] < numbers + header
    ours, theirs = directions_of(network), directions_of(load(tmp_path / "float32").network)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def directions_of(network: BayesianNetwork) -> dict[str, Tensor]:
    found = {}
    for name, layer in network.layers.items():
        if isinstance(layer.posterior, Inducing) and layer.posterior.directions is not None:
            found[name] = layer.posterior.directions
    return found


def test_int8_is_smaller_than_half_precision_for_kernels_of_any_dimension(tmp_path: Path) -> None:
    for conv in (nn.Conv1d(64, 64, 3), nn.Conv2d(16, 64, 3), nn.Conv3d(8, 16, 3)):
        network = bayesianize(nn.Sequential(conv, nn.Flatten()), "deterministic")
        for precision in ("float16", "int8"):
            save(network, tmp_path / precision, precision=precision)
        assert (tmp_path / "int8").stat().st_size < (tmp_path / "float16").stat().st_size
        load(tmp_path / "int8", network=nn.Sequential(conv, nn.Flatten()))


def test_the_users_umask_is_kept(tmp_path: Path) -> None:
    network = bayesian_mlp((3, 4, 2), "ffg-w")
    before = os.umask(0o077)
    try:
        save(network, tmp_path / "m")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m").stat().st_mode) == 0o600


def test_an_artifact_of_ones_own_network_can_be_inspected_and_cannot_command_the_terminal(tmp_path: Path) -> None:
    network = bayesianize(nn.Sequential(nn.Linear(3, 2)), "ensemble-u", inducing=2, members=4)
    path = tmp_path / "m.safetensors"
    save(network, path, card=Card(input=Input(shape=(3,)), labels=("\x1b[31mred", "blue")))
    manifest, tensors = examine(path)
    assert manifest.architecture.name == "custom"
    assert tensors
    said = forked.run("inspect", path).stdout
    assert "custom(), a network of its own with 1 calls" in said
    assert "\x1b[31m" not in said
    found = json.loads(forked.run("inspect", path, "--json").stdout)
    assert found["members"] == 4
    assert found["layers"][0]["M_in"] == 2


def test_a_model_moved_elsewhere_leaves_the_first_one_where_it_is(tmp_path: Path) -> None:
    network = bayesian_mlp((3, 4, 2), "ffg-u", inducing=2)
    save(network, tmp_path / "m")
    model = load(tmp_path / "m")
    other = model.to("cpu")
    assert other.network is not model.network
    x = torch.randn(2, 3)
    one, two = (m.predict(x, 3, 0, keep_outputs=True).outputs for m in (model, other))
    assert one is not None
    assert two is not None
    assert torch.equal(one, two)
