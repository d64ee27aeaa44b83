"""Manifests whose network lies: each is refused with one line, runs nothing that is not listed, allocates nothing."""

import copy
import functools
import json
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn

from dubito.models import bayesianize, load, save
from dubito.models.artifact.artifact import KEY, digest
from dubito.models.errors import ArtifactError, PredictionError
from dubito.models.manifest import Card, Input, Manifest
from dubito.models.traced import MOST_CALLS
from dubito.models.tracing.operators import ATTRIBUTES, FUNCTIONS, METHODS, MODULES
from tests import forked
from tests.examples import at_most
from tests.models.test_hostile_files import LIMIT, UNDER_A_LIMIT

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]  # of a traced network and of the tensors
BIG = 1 << 24


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        return x * self.gamma


class Small(nn.Module):
    """Every kind of step: modules, one with a forward method of its own, functions, methods, attributes, tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.scale = Scale()
        self.token = nn.Parameter(torch.rand(1, 4))
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Any:
        y = self.scale(self.first(x.reshape(x.shape[0], -1)))
        y = F.gelu(y) + self.token.expand(x.shape[0], -1)
        return self.last(torch.cat([y[:, :2], y[..., 2:]], dim=1))


@functools.cache
def honest() -> bytes:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save(bayesianize(Small(), "deterministic"), Path(folder) / "m", card=Card(input=Input(shape=(2, 3))))
        return (Path(folder) / "m").read_bytes()


def manifest_of(content: bytes) -> dict[str, Any]:
    end = 8 + int.from_bytes(content[:8], "little")
    stated: dict[str, Any] = json.loads(json.loads(content[8:end])["__metadata__"][KEY])
    return stated


def forge(change: Change) -> bytes:
    """The honest artifact with another network, signed anew where its manifest still reads."""
    stated, tensors = manifest_of(honest()), parse(honest())
    change(stated["traced"], tensors)
    try:
        manifest = Manifest.model_validate_json(json.dumps(stated))
    except ValidationError:
        return serialise(tensors, {KEY: json.dumps(stated)})
    signed = manifest.model_copy(update={"sha256": digest(manifest.model_dump(mode="json"), tensors)})
    return serialise(tensors, {KEY: signed.model_dump_json()})


def refusal(content: bytes, path: Path) -> str:
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        load(path)
    reason = str(caught.value).removeprefix(f"{path}: ")
    assert "\n" not in reason
    assert len(reason) < 600
    assert caught.value.__cause__ is None
    return reason


def call(do: str, of: str, *args: object, **named: object) -> Change:
    """One more call at the end, whose result is the answer."""

    def change(net: dict[str, Any], tensors: object) -> None:
        net["calls"].append({"do": do, "of": of, "args": list(args), "named": named})
        net["output"] = {"#": len(net["calls"])}

    return change


def part(name: str, value: object) -> Change:
    return lambda net, tensors: net["parts"].update({name: value})


def first_call(**changes: object) -> Change:
    return lambda net, tensors: net["calls"][0].update(changes)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def deeper(net: dict[str, Any], tensors: object) -> None:
    """Each call doubles a list that holds the results so far."""
    for number in range(len(net["calls"]), len(net["calls"]) + 40):
        net["calls"].append({"do": "function", "of": "operator.add", "args": [{"#": number}, {"#": number}]})
    net["output"] = {"#": len(net["calls"])}


def powers(net: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """A whole number that is squared until it fills the memory."""
    net["calls"].append({"do": "attribute", "of": "ndim", "args": [{"#": 0}]})
    for number in range(len(net["calls"]), len(net["calls"]) + 60):
        net["calls"].append({"do": "function", "of": "operator.mul", "args": [{"#": number}, {"#": number}]})
    net["output"] = {"#": len(net["calls"])}


def many_sizes(net: dict[str, Any], tensors: object) -> None:
    net["calls"].append({"do": "attribute", "of": "shape", "args": [{"#": 0}]})
    net["calls"].append({"do": "function", "of": "operator.mul", "args": [{"#": len(net["calls"])}, BIG]})


X = {"#": 0}
UNKNOWN = "which this version of dubito does not run"
NOT_LISTED = "which is not on the list of torch.nn"
NO_NAME = "which is taken or no plain name"
WRONG = "its manifest is wrong: "

HOSTILE: dict[str, tuple[Change, str]] = {
    # calls
    "unknown function": (call("function", "torch.load", "a.pt"), f"calls the function 'torch.load', {UNKNOWN}"),
    "a function of os": (call("function", "os.system", "true"), UNKNOWN),
    "eval": (call("function", "builtins.eval", "1"), UNKNOWN),
    "getattr as a function": (call("function", "builtins.getattr", X, "shape"), UNKNOWN),
    "a function by its path": (call("function", "operator.attrgetter", "__class__"), UNKNOWN),
    "unknown method": (call("method", "tofile", X, "a"), f"calls the method 'tofile', {UNKNOWN}"),
    "numpy": (call("method", "numpy", X), UNKNOWN),
    "a method with a dot": (call("method", "view.__func__", X), UNKNOWN),
    "a dunder method": (call("method", "__reduce__", X), UNKNOWN),
    "a method of nothing": (call("method", "view"), UNKNOWN),
    "__class__": (call("attribute", "__class__", X), f"calls the attribute '__class__', {UNKNOWN}"),
    "__dict__ behind a dot": (call("attribute", "shape.__dict__", X), UNKNOWN),
    "grad_fn": (call("attribute", "grad_fn", X), UNKNOWN),
    "an unknown kind of call": (call("import", "os"), WRONG + "traced.*do"),
    "a module that is not there": (call("module", "third", X), "calls for the module 'third', which it does not have"),
    "the whole network": (call("module", "", X), "calls for the module '', which it does not have"),
    "a module by an attribute": (call("module", "first.weight", X), "which it does not have"),
    "a tensor that is not there": (call("tensor", "first.gain"), "calls for the tensor 'first.gain'"),
    "a tensor by an attribute": (call("tensor", "first.__class__"), "calls for the tensor 'first.__class__'"),
    "a keyword with underscores": (call("function", "torch.cat", X, __class__=1), "an argument '__class__'"),
    "a result of its own": (call("function", "functional.gelu", {"#": 99}), "uses result 99 before it is there"),
    "a cycle": (first_call(args=[{"#": 3}]), "uses result 3 before it is there; expected 0 to 0"),
    "a negative result": (first_call(args=[{"#": -1}]), "uses result -1"),
    "a result by a word": (first_call(args=[{"#": "x"}]), "which stands for nothing that is known here"),
    "an output that is not there": (lambda n, t: n.update(output={"#": 4096}), "uses result 4096"),
    "an output of two": (lambda n, t: n.update(output=[X, X]), "answers 2 of them with tuple"),
    "too many calls": (
        lambda n, t: n.update(calls=n["calls"] * (MOST_CALLS // len(n["calls"]) + 1)),
        WRONG + "traced.*calls",
    ),
    # arguments
    "an object of two keys": (first_call(args=[{"#": 0, "list": []}]), "expected a number, a list or an object"),
    "an unknown object": (first_call(args=[{"lambda": "x"}]), "stands for nothing that is known here"),
    "an unknown type of numbers": (first_call(args=[X, {"dtype": "__class__"}]), "stands for nothing"),
    "nested 50 deep": (first_call(args=[nested(50)]), "lists of more than 1024 entries, or 6 inside each other"),
    "a long list": (first_call(args=[[0] * 5000]), "lists of more than 1024 entries"),
    "a long text": (first_call(args=["x" * 5000]), "an argument has 5,000 letters"),
    "a gigantic number": (first_call(args=[1 << 200]), "an argument is .*; expected at most"),
    "text and lists multiplied": (call("function", "operator.mul", "x", 10**9), "mul of str and int"),
    "sizes multiplied": (many_sizes, "mul of Size and int"),
    "a number squared sixty times": (powers, "a number beyond"),
    "a power of numbers": (call("function", "operator.pow", 10, 10**9), "a power of numbers beyond 1024"),
    # parts
    "unknown module": (part("more", {"kind": "Module"}), f"has a module 'Module', {NOT_LISTED}"),
    "a class of Python": (part("more", {"kind": "__class__"}), NOT_LISTED),
    "a lazy module": (part("more", {"kind": "LazyLinear", "arguments": {"out_features": 3}}), NOT_LISTED),
    "unknown argument": (part("more", {"kind": "ReLU", "arguments": {"slope": 1}}), "has ReLU with 'slope'; expected"),
    "a device": (part("more", {"kind": "Linear", "arguments": {"device": "cpu"}}), "has Linear with 'device'"),
    "missing argument": (part("more", {"kind": "Linear", "arguments": {}}), "has Linear with .*missing"),
    "a module of 10**12": (
        part("first", {"kind": "Linear", "arguments": {"in_features": 6, "out_features": 10**12}}),
        "an argument is 1000000000000; expected at most 16,777,216",
    ),
    "a module of another size": (
        part("first", {"kind": "Linear", "arguments": {"in_features": 6, "out_features": 5}}),
        "cannot take inputs of shape",
    ),
    "a layer of a million layers": (
        part("more", {"kind": "LSTM", "arguments": {"input_size": 2, "hidden_size": 2, "num_layers": 10**6}}),
        "has 1,000,000 attention or recurrent layers; at most 1024 fit",
    ),
    "two thousand encoder layers": (
        lambda n, t: n["parts"].update({f"e{i}": {"kind": "TransformerEncoderLayer"} for i in range(2000)}),
        "has 2,000 attention or recurrent layers",
    ),
    "minus one layers": (
        part("more", {"kind": "GRU", "arguments": {"input_size": 2, "hidden_size": 2, "num_layers": -1}}),
        "has GRU of -1 layers; expected 1 to 1024",
    ),
    "a tensor of 2**60": (part("more", {"shape": [BIG, BIG, 1 << 12]}), "tensor 'net.more' is missing"),
    "a tensor without end": (part("more", {"shape": [10**12]}), WRONG + "traced.*parts"),
    "a tensor of another type": (part("token", {"shape": [1, 4], "dtype": "object"}), WRONG + "traced.*parts"),
    "a part called __class__": (part("__class__", {"kind": "ReLU"}), f"called '__class__', {NO_NAME}"),
    "a part called forward": (part("forward", {"kind": "ReLU"}), f"called 'forward', {NO_NAME}"),
    "a tensor called training": (part("training", {"shape": [2]}), f"called 'training', {NO_NAME}"),
    "a part called _modules": (part("_modules.x", {"kind": "ReLU"}), NO_NAME),
    "a part twice": (part("first.weight", {"shape": [4, 6]}), "inside a module that has no other modules"),
    "a part without a name": (part("more..x", {"kind": "ReLU"}), NO_NAME),
    "an inner tensor with dots": (
        part("scale", {"tensors": {"a.b": {"shape": [4]}}, "calls": [], "output": X}),
        "expected a plain name",
    ),
    "an inner call out of its module": (
        part("scale", {"calls": [{"do": "tensor", "of": "first.weight"}], "output": X}),
        "calls for the tensor 'first.weight'",
    ),
    "the same as nothing": (lambda n, t: n.update(same={"again": "third"}), "which is not there"),
    "the same as a tensor of another shape": (
        lambda n, t: n.update(same={"token": "scale.gamma"}),
        "has no tensor 'token' that could be the same",
    ),
    "the same as itself above": (lambda n, t: n.update(same={"last.0.x": "last"}), "no other modules"),
    # results
    "a gigantic constant": (
        call("function", "torch.zeros", BIG, BIG),
        r"cannot take inputs of shape \(2, 3\): a result of [\d,]+ numbers",
    ),
    "a gigantic padding": (call("function", "functional.pad", X, [BIG, BIG, BIG, 0]), "a result of [\\d,]+ numbers"),
    "repeated without end": (call("method", "repeat", X, 1, BIG, BIG), "a result of [\\d,]+ numbers"),
    "doubled without end": (
        lambda n, t: [call("function", "torch.cat", [{"#": len(n["calls"])}] * 900)(n, t) for _ in range(8)],
        "a result of [\\d,]+ numbers",
    ),
    "in a million pieces": (
        lambda n, t: [
            call("function", "torch.zeros", 1 << 21)(n, t),
            call("method", "split", {"#": len(n["calls"])}, 1)(n, t),
        ],
        "a tensor cut into 2,097,152 pieces",
    ),
    "rows that are lost": (call("method", "sum", X), "answers 2 of them with a tensor of shape"),
    "text for a tensor": (call("function", "functional.gelu", "x"), "cannot take inputs of shape"),
    # the tensors
    "a tensor too few": (lambda n, t: t.pop("net.token"), "tensor 'net.token' is missing"),
    "a tensor too many": (lambda n, t: t.update(more=torch.zeros(2)), "tensor 'more' belongs to nothing"),
    "a tensor of another shape": (lambda n, t: t.update({"net.token": torch.zeros(4, 1)}), "has shape"),
    "another shape of inputs": (
        lambda n, t: n.update(input=[3, 2]),
        r"takes inputs of shape \(3, 2\), but it declares",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_network_is_refused_by_one_line(name: str, tmp_path: Path) -> None:
    change, reason = HOSTILE[name]
    found = refusal(forge(change), tmp_path / "m")
    assert re.search(reason, found), found


def test_the_honest_one_loads(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(forge(lambda net, tensors: None))
    load(tmp_path / "m").predict(torch.rand(3, 2, 3), 0)


def test_an_earlier_dubito_refuses_it_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dubito.models.artifact import artifact

    monkeypatch.setattr(artifact, "FORMATS", (1, 2, 3))  # as it was before
    assert refusal(honest(), tmp_path / "m") == (
        "its format is 4; this version of dubito reads format 1, 2 and 3. Update dubito, or save it again."
    )


def test_the_lists_hold_nothing_that_reaches_further() -> None:
    for name in (*METHODS, *ATTRIBUTES):
        assert "__" not in name
        assert hasattr(torch.Tensor, name), name
    reached = (
        "load",
        "save",
        "from_file",
        "eval",
        "exec",
        "compile",
        "import",
        "open",
        "numpy",
        "apply",
        "map_",
        "storage",
    )
    for name in (*METHODS, *ATTRIBUTES, *(function.rpartition(".")[2] for function in FUNCTIONS)):
        assert not name.startswith(reached), name
    assert all(issubclass(module, nn.Module) for module in MODULES.values())


# whatever is changed

WORDS = [
    "",
    "first",
    "last.1",
    "token",
    "torch.cat",
    "operator.mul",
    "functional.pad",
    "view",
    "shape",
    "__class__",
    "x",
]
KINDS = [*MODULES, "Module", "Sequential", "__class__"]
OBJECTS: list[Any] = [{"#": 0}, {"#": 3}, {"#": -1}, {"list": [{"#": 1}]}, {"slice": [0, None, 2]}, {"dtype": "int64"}]
OBJECTS += [
    {"device": True},
    {"...": True},
    {"number": "nan"},
    {"dict": {"a": 1}},
    [],
    {},
    [[]],
    nested(30),
    [1] * 2000,
]
OBJECTS += [{"kind": "Linear", "arguments": {"in_features": BIG, "out_features": BIG}}, {"shape": [BIG, BIG]}]
OBJECTS += [
    {"do": "function", "of": "torch.zeros", "args": [BIG, BIG]},
    {"do": "method", "of": "repeat", "args": [{"#": 0}]},
]
scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 1 << 70), st.floats(), st.sampled_from(WORDS))
values = st.one_of(
    scalars, st.sampled_from(KINDS), st.sampled_from(sorted(FUNCTIONS)), st.sampled_from(sorted(METHODS))
)
values = st.one_of(values, st.sampled_from(OBJECTS))
share = st.floats(0, 1, exclude_max=True)


def places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [pair for key in keys for pair in [(value, key), *places(value[key])]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "m"


def loaded(content: bytes, place: Path) -> None:
    """Refused with one line, or it answers; any other exception fails the test."""
    place.write_bytes(content)
    try:
        model = load(place)
    except ArtifactError as error:
        assert str(error).count("\n") == 0  # noqa: PT017
        return
    model.predict(torch.rand(2, 2, 3), 0)


@given(st.lists(st.tuples(share, values), min_size=1, max_size=3))
@settings(derandomize=True, deadline=None, max_examples=at_most(100))
def test_no_network_raises_anything_else(place: Path, changes: list[tuple[float, Any]]) -> None:
    """Up to three places of the network hold something else; what still loads answers or raises an ordinary error."""

    def change(net: dict[str, Any], tensors: object) -> None:
        for at, value in changes:
            everywhere = places(net)
            container, key = everywhere[int(at * len(everywhere))]
            container[key] = copy.deepcopy(value)

    with suppress(PredictionError):  # outputs of another shape, or not finite
        loaded(forge(change), place)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["function", "method", "attribute"]),
            st.sampled_from(sorted({*FUNCTIONS, *METHODS, *ATTRIBUTES})),
            st.lists(st.one_of(st.sampled_from(OBJECTS), scalars), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(derandomize=True, deadline=None, max_examples=at_most(100))
def test_no_calls_of_the_list_raise_anything_else(place: Path, calls: list[tuple[str, str, list[Any]]]) -> None:
    """Calls of what is on the list, with arguments that make no sense, most of them on the results before."""

    def change(net: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for do, of, args in calls:
            call(do, of, {"#": len(net["calls"])}, *args)(net, tensors)

    with suppress(PredictionError):
        loaded(forge(change), place)


# memory

ABSURD = [
    "a module of 10**12",
    "a tensor of 2**60",
    "a gigantic constant",
    "a gigantic padding",
    "repeated without end",
]
ABSURD += ["doubled without end", "in a million pieces", "sizes multiplied", "a number squared sixty times"]
ABSURD += ["text and lists multiplied", "a layer of a million layers", "a power of numbers"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of the process from /proc")
def test_absurd_networks_are_refused_without_allocating(tmp_path: Path) -> None:
    """In a process that may grow by 300 MB; each claim, believed, would take more."""
    (tmp_path / "honest").write_bytes(honest())
    wide = part("first", {"kind": "Linear", "arguments": {"in_features": 6, "out_features": BIG}})
    paths = []
    for number, change in enumerate([wide, deeper, *(HOSTILE[name][0] for name in ABSURD)]):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(forge(change))
    answer = forked.run(str(LIMIT), tmp_path / "honest", *paths, code=UNDER_A_LIMIT)
    assert answer.returncode == 0, answer.stderr
    first, *refused, grown = answer.stdout.splitlines()
    assert first == "limited"
    assert len(refused) == len(paths) - 1  # a sum that is doubled forty times is an honest network
    assert all("memory" not in line for line in refused)
    assert int(grown) < LIMIT
