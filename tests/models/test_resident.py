"""What a server keeps: less than a third of the plain network, and the same answers."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito.models import bayesianize, build, load
from dubito.models.conversion.directions import set_directions
from dubito.models.embedded import embedded
from dubito.models.manifest import Card, Manifest, Regression
from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.posteriors.inducing_factors import InducingFactors
from dubito.models.posteriors.protocol import Factored
from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import bytes_of, reside
from dubito.models.predictions.uncertainty import Classified
from dubito.service.engine.fusion import fuse
from tests.faulty import need
from tests.small_models import bayesian_mlp, mlp

CPU = torch.device("cpu")
METHODS: dict[str, dict[str, Any]] = {
    "ffg-u": {"inducing": 6, "noise": "factored", "lam_max": 0.5},
    "fcg-u": {"inducing": 6, "noise": "exact", "lam_max": 0.5},
    "ensemble-u": {"inducing": 6, "lam_max": 0.0},
    "ffg-w": {},
    "ensemble-w": {"members": 3},
    "mc-dropout": {},
    "whvi": {},
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def model_of(network: BayesianNetwork) -> Model:
    return Model(network.eval(), Manifest.model_construct(card=Card()))


def small(method: str, **options: Any) -> Model:
    torch.manual_seed(0)
    net = Small()
    net(4 * torch.randn(64, 3, 6, 6))  # statistics of its own
    with torch.no_grad():
        net.norm.weight.normal_()
        net.norm.bias.normal_()
    network = bayesianize(net, method, **METHODS[method], **options)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith("lam.raw"):
                p.fill_(0.0)
    set_directions(network, torch.randn(16, 3, 6, 6), 2)
    return model_of(network)


def storages(*values: object) -> int:
    """Bytes of all storages that can be reached, counted by walking whatever there is."""
    found: dict[int, int] = {}
    todo: list[Any] = list(values)
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        elif isinstance(one, dict):
            todo += [*one.values(), *one.keys()]
        elif isinstance(one, list | tuple | set):
            todo += one
        elif hasattr(one, "__dict__"):
            todo += vars(one).values()
            if hasattr(one, "keys") and hasattr(one, "values"):
                todo += one.values()
        elif hasattr(one, "items"):
            todo += [part for pair in one.items() for part in pair]
    return sum(found.values())


@pytest.fixture(scope="module")
def resnet50() -> Model:
    """With the directions that a served artifact of it would have."""
    torch.manual_seed(0)
    network = bayesianize(build("resnet50-cifar"), "ffg-u", inducing=64, start="prior")
    set_directions(network.eval(), torch.randn(8, 3, 32, 32), 4)
    return model_of(network)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resnet50_takes_less_than_a_third_of_the_plain_network(resnet50: Model, dtype: torch.dtype) -> None:
    plain = build("resnet50-cifar").to(dtype)
    one = sum(p.numel() * p.element_size() for p in plain.parameters())
    kept = reside(resnet50, CPU, dtype)
    ours = storages(kept.network, kept.factors)
    print(f"{dtype}: {ours / 1e6:.2f} MB, {ours / one:.3f} of one deterministic network")
    assert ours <= 0.30 * one
    assert ours == bytes_of([kept.network, kept.factors])
    with_units = storages(kept.network, kept.factors.gathered(), fuse(kept.network.net, CPU))  # as a GPU has it
    print(f"{with_units / one:.3f} with layers side by side and as units")
    assert with_units <= 0.30 * one


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_the_whole_model(method: str) -> None:
    model, x = small(method), torch.randn(4, 3, 6, 6)
    kept = reside(model, CPU, torch.float32)
    for samples in (0, 9):
        told, expected = (m.predict(x, samples, seed=3, keep_outputs=True).outputs for m in (kept, model))
        assert told is not None
        assert expected is not None
        # where B leaves little of an input outside, √(‖x‖² − ‖Bᵀx‖²) makes much of the rounding of a folded BatchNorm
        torch.testing.assert_close(told, expected, rtol=1e-3, atol=3e-4)
    assert not [p for layer in kept.network.layers.values() for p in layer.parameters()]
    assert next(model.network.parameters()).requires_grad  # the whole model is as it was


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_on_a_cpu_and_stays_close(method: str, dtype: torch.dtype) -> None:
    need(dtype)
    model, x = small(method), torch.randn(4, 3, 6, 6)
    kept = reside(model, CPU, dtype)
    told, expected = kept.predict(x, 16, seed=3).summary, model.predict(x, 16, seed=3).summary
    assert isinstance(told, Classified)
    assert isinstance(expected, Classified)
    assert told.probabilities.dtype == torch.float32
    assert (told.probabilities - expected.probabilities).abs().max() < 0.03


@pytest.mark.parametrize("R", [0, 2])
def test_the_projection_of_columns_is_stored_once_and_in_the_type_of_activations(R: int) -> None:
    model = small("ffg-u")
    set_directions(model.network, torch.randn(16, 3, 6, 6), R)
    for dtype, device in itertools.product((torch.float32, torch.bfloat16), (CPU, torch.device("meta"))):
        f = reside(model, CPU, dtype).factors.layers["conv"].to(device)
        assert isinstance(f, InducingFactors)
        assert f.B.dtype == f.matheron.B_r.dtype == dtype
        assert f.dtype == torch.float32  # of draws
        assert f.B.shape[1] == f.matheron.B_c.shape[1] + R
        assert f.matheron.B_c._base is f.B or f.matheron.B_c._base is f.B._base
        assert f.B.T.is_contiguous()  # filter after filter


@pytest.mark.parametrize("lam_max", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_drawn_together_are_each_drawn_alone(lam_max: float, dtype: torch.dtype) -> None:
    need(dtype)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(c, d, 3) for c, d in ((3, 8), (8, 8), (8, 12), (12, 8))))
    network = bayesianize(net, "ffg-u", inducing=6, noise="factored", lam_max=lam_max)
    with torch.no_grad():
        for p in network.parameters():
            p.normal_()
    alone = reside(model_of(network), CPU, dtype).factors
    together = alone.gathered()
    assert sum(len(group.names) for group in together.groups) == 4
    assert bytes_of(together) <= 1.1 * bytes_of(alone)
    noise = torch.randn(5, alone.normals)
    draws = Draws(5, noise, 0)
    for name, layer in network.layers.items():
        a, b = (network.arrange(f, draws, {}).operands[f.structure.layers[name]]() for f in (alone, together))
        assert isinstance(a, Factored)
        assert isinstance(b, Factored)
        rough = 1e-4 if dtype == torch.float32 else 0.02 * float(a.G.abs().max())
        torch.testing.assert_close(b.G.float(), a.G.float(), rtol=1e-3, atol=rough)
        assert (a.e is None) == (b.e is None)
        if a.e is not None and b.e is not None:
            torch.testing.assert_close(b.e.float(), a.e.float(), rtol=1e-2, atol=1e-4)
        assert layer.geometry.shape[0] == a.G.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_without_a_parameter_left_runs_all_the_same(dtype: torch.dtype) -> None:
    need(dtype)
    network = bayesian_mlp((4, 8, 3), "ffg-u", inducing=3)
    kept, x = reside(model_of(network), CPU, dtype), torch.randn(2, 4)
    assert not list(kept.network.parameters())
    outputs = kept.predict(x, 4, seed=0, keep_outputs=True).outputs
    assert outputs is not None
    assert outputs.dtype == dtype


def test_the_noise_of_a_regression_is_not_rounded() -> None:
    net = mlp(4, 8, 2)
    network = bayesianize(net, "ffg-u", inducing=3, task=Regression(outputs=2, shift=(0.0, 0.0), scale=(1.0, 1.0)))
    kept = reside(model_of(network), CPU, torch.bfloat16)
    assert network.noise is not None
    assert kept.network.noise is not None
    assert torch.equal(kept.network.noise(), network.noise())


def test_the_embedded_model_answers_the_same() -> None:
    model = load(embedded("digits"))
    kept, x = reside(model, CPU, torch.float32), torch.rand(3, 1, 8, 8)
    for told, expected in zip(*(vars(m.predict(x, 20, seed=5).summary).values() for m in (kept, model)), strict=True):
        torch.testing.assert_close(told, expected, rtol=1e-4, atol=1e-5)
