"""The artifact: what was saved comes back bit by bit, at the size promised, or was not saved at all."""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn

from dubito.models import bayesianize, build, ensemble, load, predict, save
from dubito.models.artifact.encoding import MASK, SCALE, decode, encode
from dubito.models.conversion.directions import set_directions
from dubito.models.errors import ArtifactError
from dubito.models.manifest import (
    Calibration,
    Card,
    Image,
    Input,
    Precision,
    Provenance,
    Regression,
)
from dubito.models.network.layers import MemberLayer
from dubito.models.network.network import BayesianNetwork
from dubito.models.network.normalisation import ScaleShift
from dubito.models.numerics.parameters import count
from dubito.models.posteriors.inducing import InducingLayer
from dubito.models.pruning import prune
from tests import forked

# what comes back


def shaken(network: BayesianNetwork) -> BayesianNetwork:
    """No number left where the conversion started it, so that none can come back by being rebuilt."""
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in network.state_dict().values():
            if tensor.is_floating_point():
                tensor += 0.1 * torch.rand(tensor.shape, generator=rng)
    return network


def mlp(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    return build("mlp", inputs=sizes[0], hidden=list(sizes[1:-1]), outputs=sizes[-1])


def with_batchnorm() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, groups=2),
        nn.BatchNorm2d(6, eps=0.1),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8, affine=False),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    with torch.no_grad():
        for norm in (m for m in net if isinstance(m, nn.BatchNorm2d)):
            norm(torch.randn(50, norm.num_features, 1, 1) * 3 + 1)  # statistics of its own
    return net


def one_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def with_shared_layers() -> nn.Sequential:
    """A layer that stands twice, and two layers with one weight matrix."""
    torch.manual_seed(0)
    first, second, twice = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), twice, nn.ReLU(), twice, nn.BatchNorm1d(4))


@dataclass(frozen=True)
class Case:
    network: BayesianNetwork
    x: Tensor
    bare: nn.Module | None = None  # for networks without a name


def flat(method: str, **options: Any) -> Case:
    return Case(shaken(bayesianize(mlp(12, 9, 4), method, **{"inducing": 3, **options})), torch.randn(5, 12))


def unnamed(bare: nn.Module, network: BayesianNetwork, *shape: int) -> Case:
    return Case(shaken(network), torch.randn(4, *shape), bare)


def pruned(case: Case, keep: float) -> Case:
    prune(case.network, keep)
    return case


def directed() -> Case:
    case = flat("ffg-u", noise="factored", inducing=2)
    set_directions(case.network, torch.randn(64, 12), 4)
    return case


def on_digits() -> Case:
    torch.manual_seed(0)
    network = bayesianize(
        build("lenet"),
        "ffg-u",
        inducing=4,
        layers={
            "0": "deterministic",
            "3": {"method": "ensemble-u", "members": 3},
            "7": {"method": "mc-dropout", "rate": 0.3},
            "9": {"inducing": (5, 3), "noise": "exact"},
            "11": "ffg-w",
        },
    )
    return Case(shaken(network), torch.randn(3, 1, 28, 28))


def of_networks_trained_apart() -> Case:
    nets = [with_batchnorm() for _ in range(3)]
    for at, net in enumerate(nets):
        torch.manual_seed(at)
        for p in net.parameters():
            p.data += 0.1 * torch.randn_like(p)
    return unnamed(nets[0], ensemble(nets), 2, 6, 6)


CASES: dict[str, Callable[[], Case]] = {
    "ffg-u exact": lambda: flat("ffg-u", noise="exact"),
    "ffg-u factored": lambda: flat("ffg-u", noise="factored"),
    "ffg-u without λ": lambda: flat("ffg-u", lam_max=0.0),
    "ffg-u wide": lambda: flat("ffg-u", inducing=(20, 30)),
    "fcg-u": lambda: flat("fcg-u"),
    "ensemble-u": lambda: flat("ensemble-u", members=3),
    "ffg-w": lambda: flat("ffg-w"),
    "fcg-w": lambda: Case(shaken(bayesianize(mlp(5, 4, 3), "fcg-w")), torch.randn(5, 5)),
    "ensemble-w": lambda: flat("ensemble-w", members=3),
    "mc-dropout": lambda: flat("mc-dropout", rate=0.4),
    "deterministic": lambda: flat("deterministic"),
    "mixed": on_digits,
    "hierarchy": lambda: flat("ffg-u", hierarchy=2),
    "hierarchy of an ensemble": lambda: flat("ensemble-u", hierarchy=(2, 3), members=2),
    "pruned Z": lambda: pruned(flat("ffg-u"), 0.4),
    "pruned weights": lambda: pruned(flat("ffg-w"), 0.3),
    "directions": directed,
    "regression": lambda: flat("ffg-u", task=Regression(outputs=4, shift=(1.0, 2.0, 3.0, 4.0), scale=(0.5,))),
    "noise by input": lambda: flat("ffg-u", task=Regression(outputs=2, noise="input", shift=(1.0, 2.0))),
    "batchnorm": lambda: unnamed(
        with_batchnorm(),
        bayesianize(with_batchnorm(), "fcg-u", inducing=(3, 4), noise="factored", layers={"0": "fcg-u"}),
        2,
        6,
        6,
    ),
    "batchnorm in copies": lambda: unnamed(
        with_batchnorm(), bayesianize(with_batchnorm(), "ensemble-w", members=2), 2, 6, 6
    ),
    "networks trained apart": of_networks_trained_apart,
    "shared layers": lambda: unnamed(
        with_shared_layers(), bayesianize(with_shared_layers(), "ffg-u", inducing=2, unsupported="leave"), 4
    ),
    "one layer": lambda: unnamed(one_layer(), bayesianize(one_layer(), "ffg-u", inducing=2), 4),
}
each_case = pytest.mark.parametrize("case", CASES)


@each_case
@pytest.mark.parametrize("samples", [7, 0])
def test_what_was_saved_predicts_the_same_bits(case: str, samples: int, tmp_path: Path) -> None:
    made = CASES[case]()
    path = tmp_path / "model.safetensors"
    before = predict(made.network, made.network.factors(), made.x, samples, 5, keep_outputs=True)
    stated = save(made.network, path)
    model = load(path, network=made.bare)
    after = model.predict(made.x, samples, 5, keep_outputs=True)
    assert before.outputs is not None
    assert after.outputs is not None
    assert torch.equal(before.outputs, after.outputs)
    assert before.samples == after.samples
    assert model.manifest == stated
    assert count(model.network) == count(made.network)
    assert not model.network.training


@each_case
def test_the_same_model_gives_the_same_bytes(case: str, tmp_path: Path) -> None:
    made = CASES[case]()
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    save(made.network, first)
    save(made.network, second)
    save(load(first, network=made.bare), third)
    assert first.read_bytes() == second.read_bytes() == third.read_bytes()


def test_the_masks_of_pruned_tensors_come_back(tmp_path: Path) -> None:
    for name, keep in (("pruned Z", 0.4), ("pruned weights", 0.3)):
        made = CASES[name]()
        save(made.network, tmp_path / "model")
        again = load(tmp_path / "model").network
        before, after = ({n: b for n, b in net.named_buffers() if n.endswith("keep")} for net in (made.network, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[n], after[n]) for n in before)
        entries = sum(b.numel() for b in after.values())
        kept = sum(int(b.sum()) for b in after.values())
        biases = 2 * (9 + 4) if name == "pruned weights" else 0
        assert kept == round(keep * (entries - biases)) + biases


def test_shared_layers_are_stored_once_and_stay_shared(tmp_path: Path) -> None:
    made = CASES["shared layers"]()
    save(made.network, tmp_path / "model")
    again = load(tmp_path / "model", network=made.bare).network.net
    assert isinstance(again, nn.Sequential)
    assert again[4] is again[6]
    assert again[0].weight is again[2].weight
    stored = parse((tmp_path / "model").read_bytes())
    assert not [name for name in stored if name.startswith("net.6.")]
    assert "net.2.weight" not in stored


def test_saving_changes_nothing(tmp_path: Path) -> None:
    made = CASES["batchnorm"]()
    before = {name: t.clone() for name, t in made.network.state_dict().items()}
    save(made.network, tmp_path / "model", precision="int8", batchnorm="fold")
    after = made.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert before.keys() == after.keys()


def test_a_network_that_the_caller_brings_is_left_alone(tmp_path: Path) -> None:
    made = CASES["batchnorm"]()
    save(made.network, tmp_path / "model")
    bare = with_batchnorm()
    before = {name: t.clone() for name, t in bare.state_dict().items()}
    load(tmp_path / "model", network=bare)
    assert all(torch.equal(before[name], t) for name, t in bare.state_dict().items())


def test_a_network_that_the_caller_brings_must_fit(tmp_path: Path) -> None:
    made = CASES["batchnorm"]()
    path = tmp_path / "model"
    save(made.network, path)
    with pytest.raises(ArtifactError, match="the network has no Linear or Conv layer '0'"):
        load(path, network=nn.Sequential(nn.ReLU()))
    wider = with_batchnorm()
    wider[6] = nn.Linear(32, 5)
    with pytest.raises(ArtifactError, match=r"tensor 'net\.6\.posterior\.Z_r\.value' has shape"):
        load(path, network=wider)


def test_a_header_of_any_length_is_read(tmp_path: Path) -> None:
    """Its length is the file's first bytes; one in 32 starts like a pickle."""
    network, starts = CASES["deterministic"]().network, set()
    for n in range(0, 256, 8):
        save(network, tmp_path / "model", card=Card(labels=("x" * n,)))
        starts.add((tmp_path / "model").read_bytes()[0])
        assert load(tmp_path / "model").card.labels == ("x" * n,)
    assert 0x80 in starts


def test_the_card_comes_back(tmp_path: Path) -> None:
    card = Card(
        input=Input(shape=(3, 2, 2), image=Image(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))),
        labels=("Zürich", "[/b]", "\u2028", "a\nb"),
        calibration=Calibration(
            false_positive_rate=0.05,
            coverage=0.9,
            measure="mutual_information",
            thresholds={"mutual_information": {0: 1.0, 16: 0.1}, "entropy": {1: 0.7}},
            quantiles={0: 0.5, 20: 0.25},
            temperature=1.5,
        ),
        metrics={"accuracy": 0.9300000000000001, "ece": 1e-300},
        provenance=Provenance(
            recipe={"fit": {"steps": [1, 2.5, None, True]}}, data_hash="ab", seed=2**62, versions={"data": "1"}
        ),
    )
    network = CASES["ffg-u exact"]().network
    save(network, tmp_path / "model", card=card)
    model = load(tmp_path / "model")
    found = model.card
    assert found.provenance.versions.keys() == {"data", "dubito", "torch", "python"}
    assert found.provenance.versions["data"] == "1"
    assert found.model_copy(update={"provenance": card.provenance}) == card
    assert found.provenance.recipe == card.provenance.recipe
    save(model.with_card(metrics={"accuracy": 1}, labels=["a", "b", "c", "d"]), tmp_path / "model")  # an int, a list
    assert load(tmp_path / "model").card.metrics == {"accuracy": 1.0}
    assert load(tmp_path / "model").card.labels == ("a", "b", "c", "d")


def test_a_recipe_may_hold_what_json_does_not(tmp_path: Path) -> None:
    network = CASES["ffg-u exact"]().network
    save(network, tmp_path / "model", card=Card(provenance=Provenance(recipe={"patience": math.inf})))
    assert load(tmp_path / "model").card.provenance.recipe == {"patience": None}


def test_without_a_card_the_architecture_says_what_it_takes(tmp_path: Path) -> None:
    save(CASES["mixed"]().network, tmp_path / "model")
    declared = load(tmp_path / "model").card.input
    assert declared is not None
    assert declared.shape == (1, 28, 28)
    assert declared.image is not None


# BatchNorm folded


def test_folded_batchnorm_answers_the_same_and_stays_folded(tmp_path: Path) -> None:
    for name, norms in (("batchnorm", 2), ("batchnorm in copies", 4)):
        made = CASES[name]()
        kept, folded, again = (tmp_path / p for p in ("kept", "folded", "again"))
        assert save(made.network, kept).batchnorm == "kept"
        assert save(made.network, folded, batchnorm="fold").batchnorm == "folded"
        assert folded.stat().st_size < kept.stat().st_size
        assert not [key for key in parse(folded.read_bytes()) if "running" in key or "num_batches" in key]
        expected = load(kept, network=made.bare).predict(made.x, 6, 1, keep_outputs=True).outputs
        model = load(folded, network=made.bare)
        found = model.predict(made.x, 6, 1, keep_outputs=True).outputs
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert sum(isinstance(m, ScaleShift) for m in model.network.modules()) == norms
        for batchnorm in ("keep", "fold"):
            save(model, again, batchnorm=batchnorm)
            assert again.read_bytes() == folded.read_bytes()


def test_each_member_has_its_own_batchnorm(tmp_path: Path) -> None:
    made = CASES["networks trained apart"]()
    save(made.network, tmp_path / "model")
    model = load(tmp_path / "model", network=made.bare)
    copies = [m for m in model.network.modules() if isinstance(m, MemberLayer)]
    assert [len(m.copies) for m in copies] == [3, 3]
    weights = [c.get_parameter("weight") for c in copies[0].copies]
    assert not torch.equal(weights[0], weights[1])


# precision


def stored_and_decoded(precision: Precision, path: Path) -> Iterator[tuple[str, Tensor, Tensor, dict[str, Tensor]]]:
    """Name, saved tensor, loaded tensor and the file's tensors, for networks with vectors, matrices and kernels."""
    for name in ("ffg-u exact", "fcg-u", "ensemble-u", "ffg-w", "pruned Z", "mixed", "batchnorm"):
        made = CASES[name]()
        save(made.network, path, precision=precision)
        before, after = made.network.state_dict(), load(path, network=made.bare).network.state_dict()
        assert before.keys() == after.keys()
        stored = parse(path.read_bytes())
        for key in before:
            yield key, before[key], after[key], stored


@pytest.mark.parametrize(
    ("precision", "dtype", "bound"), [("float16", torch.float16, 2**-11), ("bfloat16", torch.bfloat16, 2**-8)]
)
def test_half_precision_is_within_half_a_unit_of_the_last_bit(
    precision: Precision, dtype: torch.dtype, bound: float, tmp_path: Path
) -> None:
    halves = 0
    for key, before, after, stored in stored_and_decoded(precision, tmp_path / "model"):
        if before.is_floating_point():
            # 2**-25: half a step of float16's subnormal numbers, which only entries that matter little may reach
            slack = 2**-25 if precision == "float16" and before.abs().amax() >= 2**-14 else 0.0
            error = (after.double() - before.double()).abs()
            assert bool((error <= (bound * before.double().abs()).clamp(min=slack)).all()), key
            halves += stored[key].dtype == dtype
        elif not key.endswith(".keep"):
            assert torch.equal(before, after)
    assert halves > 30


def test_int8_is_within_half_a_step_of_its_row(tmp_path: Path) -> None:
    for key, before, after, stored in stored_and_decoded("int8", tmp_path / "model"):
        if not before.is_floating_point() or before.dim() < 2:
            assert key.endswith(".keep") or stored[key].dtype != torch.int8
            continue
        assert stored[key].dtype == torch.int8
        rows = before.flatten(0, 1) if before.dim() == 3 else before.flatten(1)  # a member's rows are apart
        step = rows.double().abs().amax(1, keepdim=True) / 127
        error = (after.double().view(rows.shape) - rows.double()).abs()
        assert bool((error <= step / 2 * (1 + 1e-5)).all()), key
        torch.testing.assert_close(stored[key + SCALE].double(), step[:, 0])
        assert not after[before == 0].any()  # pruned entries stay exactly zero


@pytest.mark.parametrize(
    ("values", "precision", "kept"),
    [
        ([65504.0, 1.0], "float16", torch.float16),
        ([65536.0, 1.0], "float16", torch.float32),  # would be infinite
        ([65536.0, 1.0], "bfloat16", torch.bfloat16),
        ([3.4e38, 1.0], "bfloat16", torch.float32),
        ([1e-6, 3e-5], "float16", torch.float32),  # would lose its digits
        ([1e-6, 3e-5], "bfloat16", torch.bfloat16),
        ([6e-5, 1e-1], "float16", torch.float32),  # beside it, 6e-5 still counts
        ([1e-6, 1.0], "float16", torch.float16),  # beside it, 1e-6 does not
        ([0.0, 0.0], "float16", torch.float16),
        ([65536.0, 1e-9], "float16", torch.float32),
        ([1e-9, 70000.0], "int8", torch.float32),  # vectors of an int8 artifact are halved
        ([0.5, 0.7], "int8", torch.float16),
    ],
)
def test_what_half_precision_cannot_hold_stays_in_float32(
    values: list[float], precision: Precision, kept: torch.dtype
) -> None:
    tensor = torch.tensor(values)
    stored = encode("t", tensor, None, precision)
    assert stored["t"].dtype == kept
    found, _ = decode("t", tensor.shape, stored)
    if kept == torch.float32:
        assert torch.equal(found, tensor)
    assert bool(found.isfinite().all())


def test_rows_of_zeros_survive_int8() -> None:
    tensor = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    found, _ = decode("t", tensor.shape, encode("t", tensor, None, "int8"))
    assert torch.equal(found[0], tensor[0])


@given(st.integers(0, 40), st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(derandomize=True, deadline=None)
def test_a_pruned_tensor_is_its_values_and_its_bits(columns: int, rows: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    keep = torch.rand(rows, columns, generator=rng) < 0.5
    tensor = torch.randn(rows, columns, generator=rng) * keep
    stored = encode("t", tensor, keep, "float32")
    bits = np.packbits(keep.numpy().reshape(-1), bitorder="little")
    assert stored["t" + MASK].tolist() == bits.tolist()
    assert torch.equal(stored["t"], tensor[keep])
    found, mask = decode("t", tensor.shape, stored)
    assert torch.equal(found, tensor)
    assert mask is not None
    assert torch.equal(mask, keep)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision_saved_again_gives_the_same_bytes(precision: Precision, tmp_path: Path) -> None:
    for name in ("ffg-u exact", "pruned Z", "hierarchy", "directions"):
        save(CASES[name]().network, tmp_path / "first", precision=precision)
        save(load(tmp_path / "first"), tmp_path / "second", precision=precision)
        assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


# size


def header_of(content: bytes) -> dict[str, Any]:
    """The header by the format's own definition, not by the library."""
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    return header


def assert_nothing_dense(content: bytes, network: BayesianNetwork) -> int:
    """No tensor of an inducing layer is as large as W, however it is cut; returns how many layers that says it of."""
    sizes = {k: math.prod(v["shape"]) for k, v in header_of(content).items() if k != "__metadata__"}
    checked = 0
    for name, layer in network.layers.items():
        d_out, d_in = layer.geometry.shape
        assert isinstance(layer.entry, InducingLayer)
        if layer.entry.M_out < min(d_out, d_in) and layer.entry.M_in < min(d_out, d_in):
            mine = {k: n for k, n in sizes.items() if k.startswith(f"net.{name}.")}
            assert mine
            assert all(n < d_out * d_in for n in mine.values()), name
            checked += 1
    return checked


@pytest.mark.parametrize("precision", get_args(Precision))
@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u"])
def test_nothing_dense_is_stored(method: str, precision: Precision, tmp_path: Path) -> None:
    network = bayesianize(mlp(40, 30, 20), method, inducing=5)
    save(network, tmp_path / "model", precision=precision)
    assert assert_nothing_dense((tmp_path / "model").read_bytes(), network) == 2


@pytest.mark.slow
def test_sizes_of_the_cifar_resnet50(tmp_path: Path) -> None:
    """Against the plain network's own float32 state; counts alone would give 24.3 % and, half of Z pruned, 13.2 %."""
    torch.manual_seed(0)
    net = build("resnet50-cifar")
    plain = len(serialise(net.state_dict()))
    network = bayesianize(net, "ffg-u", inducing=64, start="prior")
    path = tmp_path / "model"

    def share(precision: Precision) -> float:
        save(network, path, precision=precision)
        return path.stat().st_size / plain

    assert share("float32") <= 0.246
    assert assert_nothing_dense(path.read_bytes(), network) > 40
    again = load(path).network.state_dict()
    assert all(torch.equal(t, again[name]) for name, t in network.state_dict().items())
    assert share("float16") <= 0.125
    assert share("int8") <= 0.066
    prune(network, 0.5)
    assert share("float16") <= 0.075
    assert count(load(path).network) == count(network) == 3_106_678


# saving fails whole


def left(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot write .*/nowhere/model: No such file or directory\."):
        save(CASES["ffg-u exact"]().network, tmp_path / "nowhere" / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ArtifactError, match=r"cannot write .*/model: Is a directory\."):
        save(CASES["ffg-u exact"]().network, tmp_path / "model")
    with pytest.raises(ArtifactError, match=r"cannot write .*: embedded null byte"):
        save(CASES["ffg-u exact"]().network, tmp_path / "a\0b")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    save(CASES["ffg-u exact"]().network, tmp_path / "model")
    before = left(tmp_path)
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(ArtifactError, match=r"cannot write .*: Permission denied"):
            save(CASES["ffg-w"]().network, tmp_path / "model")
    finally:
        tmp_path.chmod(0o755)
    assert left(tmp_path) == before


def test_a_disk_that_is_full_half_way(tmp_path: Path) -> None:
    """A limit on the size of files stops the write in the middle."""
    save(CASES["ffg-u exact"]().network, tmp_path / "model")
    before = left(tmp_path)
    code = (
        "import resource, sys\n"
        "from dubito.models import bayesianize, build, save\n"
        "from dubito.models.errors import ArtifactError\n"
        "network = bayesianize(build('lenet'), 'ffg-u', inducing=4)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try:\n"
        "    save(network, sys.argv[1])\n"
        "except ArtifactError as error:\n"
        "    print(error)\n"
    )
    answer = forked.run(tmp_path / "model", code=code)
    assert answer.stdout == f"cannot write {tmp_path / 'model'}: File too large.\n", answer.stderr
    assert left(tmp_path) == before


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path, network = tmp_path / "model", CASES["ffg-u exact"]().network
    save(network, path)
    model, before = load(path), left(tmp_path)
    with pytest.raises(ArtifactError, match=r"the manifest cannot be saved: card\.metrics\.nll"):
        save(model, path, card=model.card.model_copy(update={"metrics": {"nll": math.nan}}))
    with pytest.raises(ArtifactError, match=r"the manifest cannot be saved: .*surrogates"):
        save(model, path, card=model.card.model_copy(update={"labels": ("\ud800", "b", "c", "d")}))
    with pytest.raises(ValidationError, match="nothing_known"):
        model.with_card(nothing_known=3)
    network.state_dict()["net.1.posterior.Z_r.value"][0, 0] = math.inf
    with pytest.raises(ArtifactError, match=r"tensor 'net\.1\.posterior\.Z_r\.value' holds NaN or infinity"):
        save(network, path)
    assert left(tmp_path) == before
