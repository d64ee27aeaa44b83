"""A network that could not be served is refused where it is converted or saved, in a line that says what to do."""

import re
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dubito.models import bayesianize, build, load, save
from dubito.models.conversion.architectures import FACTORIES
from dubito.models.errors import ArchitectureError, ArtifactError, ConversionError, InputError
from dubito.models.manifest import Card, Input, Regression, Task
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.predictions.prediction import predict

Both = namedtuple("Both", "logits features")
instance = nn.Linear(4, 3)  # taken for a factory


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


class Around(nn.Module):
    """A network whose forward method does something beside."""

    def __init__(self, around: Callable[["Around", Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.around, self.calls = mlp(), around, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.around(self, x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, one: Tensor, other: Tensor) -> Any:
        return self.inner(one + other)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.recurrent, self.head = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.recurrent(self.table(ids))[0][:, -1])


def keep(net: nn.Module, folder: Path, task: Task | None = None, shape: tuple[int, ...] = (4,), **card: Any) -> Path:
    file = folder / "m.safetensors"
    save(bayesianize(net, "deterministic", task=task), file, card=Card(input=Input(shape=shape), **card))
    return file


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one logit": (lambda: mlp(1), "the network has one output; a classification needs a logit for each class"),
    "softmax": (lambda: nn.Sequential(mlp(), nn.Softmax(-1)), "outputs are probabilities.*leave out the Softmax"),
    "several labels": (lambda: nn.Sequential(mlp(), nn.Sigmoid()), "ends in a Sigmoid.*several labels are not served"),
    "and by a function": (lambda: Around(lambda net, x: torch.sigmoid(net.inner(x))), "ends in a Sigmoid"),
    "others": (lambda: Around(lambda net, x: net.inner(x - x.mean(0))), "depends on the other inputs of its batch"),
    "a state": (lambda: Around(lambda net, x: net.inner(x) * net.calls), "changes from call to call"),
    "a named tuple": (lambda: Around(lambda net, x: Both(net.inner(x), x)), "makes a Both; expected to return one"),
    "a dictionary": (lambda: Around(lambda net, x: {"logits": net.inner(x)}), "returns a dict; expected one tensor"),
    "no dimension": (lambda: Around(lambda net, x: net.inner(x)[:, 0]), "one number without a dimension of its own"),
    "statistics of the batch": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)),
        "fails on one input alone.*track_running_stats=True",
    ),
    "computed weights": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Linear(8, 3)),
        "not on the list.* 0 computes its weights anew in each pass.*remove_parametrizations",
    ),
    "a row too many": (lambda: Around(lambda net, x: net.inner(x)[:, :, None]), r"an array of shape \(3, 1\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_that_cannot_be_served_is_not_saved(case: str, tmp_path: Path) -> None:
    make, said = REFUSED[case]
    with pytest.raises(ArtifactError, match=said) as raised:
        keep(make(), tmp_path)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(3))
def test_networks_that_are_near_to_those_are_saved(seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    for net, task in (
        (nn.Sequential(mlp(), nn.LogSoftmax(-1)), None),  # whose softmax is the right one
        (mlp(1), Regression()),
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)), None),
        (nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)), None),
        (cast(nn.Module, torch.compile(mlp())), None),
        (nn.Sequential(mlp(), nn.Softmax(-1), nn.Linear(3, 3)), None),
        (nn.Sequential(nn.Linear(4, 2), nn.Softmax(-1)), Regression(outputs=2)),
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), Regression()),
    ):
        assert load(keep(net, tmp_path, task)).predict(torch.rand(5, 4), 1)


@pytest.mark.parametrize("net", [mlp(), build("mlp", inputs=4, outputs=3)], ids=["own", "by name"])
def test_as_many_names_as_outputs(net: nn.Module, tmp_path: Path) -> None:
    file = keep(net, tmp_path, labels=("a", "b", "c"))
    with pytest.raises(ArtifactError, match="the card names 2 classes, but the network has 3 outputs"):
        keep(net, tmp_path, labels=("a", "b"))
    loaded = load(file)  # and again, from a file that knew better
    with pytest.raises(ArtifactError, match="the card names 1 classes"):
        save(loaded.with_card(labels=("a",)), file)


def test_token_ids_are_kept_as_they_are_and_bounded(tmp_path: Path) -> None:
    model = load(keep(Words(), tmp_path, shape=(5,)))
    assert model.predict(torch.randint(0, 9, (2, 5)), 1).summary is not None
    with pytest.raises(InputError, match="the network has no such index"):
        model.predict(torch.full((2, 5), 9), 1)


class Listed(nn.Module):
    """Its parameters stand in a list, which is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scales = mlp(), nn.ParameterList([torch.ones(4), torch.ones(4)])

    def forward(self, x: Tensor) -> Any:
        for scale in self.scales:
            x = x * scale
        return self.inner(x)


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.recurrent(x)[1][0][-1])


def test_an_ensemble_has_copies_of_layers_that_answer_with_several_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = bayesianize(Steps().eval(), "ensemble-w", unsupported="leave", members=3)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.1 * torch.randn_like(p))  # members that differ
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(5, 4))))
    x = torch.randn(2, 5, 4)
    outputs = load(tmp_path / "m.safetensors").predict(x, 12, 0, keep_outputs=True).outputs
    assert outputs is not None
    assert len({tuple(rows.flatten().tolist()) for rows in outputs.double().round(decimals=5)}) == 3
    with pytest.raises(ConversionError, match="scales is a ParameterList, which is no layer"):
        bayesianize(Listed(), "ensemble-w", unsupported="leave")


def weight_normed() -> nn.Module:
    net = mlp()
    torch.nn.utils.weight_norm(net[0])
    return net


def parametrized() -> nn.Module:
    net = mlp()
    torch.nn.utils.parametrizations.weight_norm(net[0])
    return net


def hooked() -> nn.Module:
    net = mlp()
    net[0].register_forward_hook(lambda module, given, out: out)
    return net


@pytest.mark.filterwarnings("ignore")  # torch calls two of them old
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: mlp().state_dict(), "got a dictionary, which may be a state dict; expected the network itself"),
        (lambda: Two, "got the class Two; expected a network, an instance"),
        (lambda: torch.jit.script(mlp()), "got a TorchScript module; expected the nn.Module"),
        (weight_normed, r"0 \(Linear, with hooks of WeightNorm: call torch.nn.utils.remove_weight_norm first\)"),
        (parametrized, r"0 \(ParametrizedLinear, parametrized: call .*remove_parametrizations first\)"),
        (hooked, r"0 \(Linear, with hooks\)"),
        (lambda: torch.ao.quantization.quantize_dynamic(mlp()), r"0 is quantised \(Linear\); expected .* real numbers"),
    ],
)
def test_what_is_no_plain_network_is_told_what_was_expected(given: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        bayesianize(given(), "ffg-u", inducing=2)


@pytest.mark.filterwarnings("ignore")
def test_a_network_that_cannot_be_copied_says_why() -> None:
    with pytest.raises(ConversionError, match=re.escape("0.weight is computed from other tensors, with hooks of")):
        bayesianize(weight_normed(), "deterministic")


def test_a_plain_network_may_have_layers_of_any_kind(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="recurrent"):
        bayesianize(Words(), "ffg-u", inducing=2)
    assert bayesianize(Words(), "deterministic").layers == {}


def test_weights_without_storage_are_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = mlp()
    with pytest.raises(ArtifactError, match=r"0\.weight has no storage \(meta device\)"):
        keep(net, tmp_path)


def test_a_factory_is_a_name_of_what_builds_a_network() -> None:
    with pytest.raises(ArchitectureError, match="build got Sequential; expected the name of a network"):
        build(mlp())  # type: ignore[arg-type]
    with pytest.raises(ArchitectureError, match="is a Linear that is built already; expected a class, or a function"):
        build(f"{__name__}:instance")


class Kept(nn.Module):
    """Computes with numbers that its state dict may not hold, in a way that cannot be followed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.head, numbers = nn.Linear(8, 3), torch.randn(4, 8)
        if how == "attribute":
            self.numbers = numbers
        else:
            self.register_buffer("numbers", torch.ones(4, 8) if how == "constant" else numbers, how == "buffer")

    def forward(self, x: Tensor) -> Any:
        if not torch.isfinite(x).all():
            raise ValueError("it is not finite")
        return self.head(torch.sin(x @ self.numbers))


class AsksForTheType(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * 2 if isinstance(x, Tensor) else self.layer(x)


def answers_again(network: Any, tmp_path: Path, **card: Any) -> None:
    """As it is saved, so it is loaded."""
    x = torch.randn(3, 4)
    before = predict(network, network.factors(), x, 4, 0, keep_outputs=True).outputs
    save(network, tmp_path / "m.safetensors", **card)
    after = load(tmp_path / "m.safetensors").predict(x, 4, 0, keep_outputs=True).outputs
    assert before is not None
    assert after is not None
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("card", [{}, {"card": Card(input=Input(shape=(4,)))}])
@pytest.mark.parametrize("how", ["buffer", "constant", "buffer not kept", "attribute"])
def test_what_a_factory_makes_anew_must_answer_alike(
    how: str, card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTORIES, "tests:kept", lambda: Kept(how))
    network = bayesianize(build("tests:kept"), "ffg-w")
    if how in ("buffer", "constant"):
        answers_again(network, tmp_path, **card)
        return
    said = "buffer 'numbers' is" if how == "buffer not kept" else "Something that it computes with is"
    with pytest.raises(ArtifactError, match=rf"tests:kept makes anew .* differently\. .*{said} not in its state"):
        answers_again(network, tmp_path, **card)


class Counts(nn.Module):
    """Keeps a cache, in double precision, that no file needs."""

    seen: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("scale", torch.ones(4, dtype=torch.float64))
        self.double()

    def forward(self, x: Tensor) -> Any:
        if not torch.isfinite(x).all():
            raise ValueError("it is not finite")
        self.seen += len(x)
        return self.head(x.double() * self.scale).float()


def test_caches_need_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTORIES, "tests:counts", Counts)
    network = bayesianize(build("tests:counts"), "deterministic")
    answers_again(network, tmp_path, card=Card(input=Input(shape=(4,))))
    before = torch.get_rng_state()
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(4,))))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_that_is_followed_wrongly_is_kept_by_its_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FACTORIES, "tests:asks", AsksForTheType)
    answers_again(bayesianize(build("tests:asks"), "ffg-w"), tmp_path, card=Card(input=Input(shape=(4,))))


def test_without_declared_inputs_those_that_were_seen_are_tried(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="ask for the type of its input"):
        answers_again(bayesianize(AsksForTheType(), "ffg-w"), tmp_path)


@pytest.mark.parametrize("made", [mlp, lambda: build("mlp", inputs=4, outputs=3)])
def test_what_was_changed_by_hand_is_not_saved(made: Callable[[], nn.Module], tmp_path: Path) -> None:
    hooked, replaced, within = made(), made(), made()
    hooked.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
    inner = replaced.forward
    replaced.forward = lambda x: inner(x) * 2
    relu = next(part for part in within.modules() if isinstance(part, nn.ReLU))
    relu.forward = torch.tanh  # type: ignore[method-assign]
    for net, said in ((hooked, "has hooks"), (replaced, "its forward method replaced"), (within, "method replaced")):
        with pytest.raises(ArtifactError, match=said):
            answers_again(bayesianize(net, "ffg-w"), tmp_path)


def test_a_network_with_a_feature_bank_is_tried_by_its_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTORIES, "tests:kept", lambda: Kept("buffer"))
    network = bayesianize(build("tests:kept"), "ffg-w")
    network.set_feature_bank(FeatureBank.of(torch.randn(1, 20, 8), "head"))
    answers_again(network, tmp_path, card=Card(input=Input(shape=(4,)), labels=("a", "b", "c")))
