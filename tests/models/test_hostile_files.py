"""Files that lie: each is refused with one error that says what is wrong, and nothing is allocated on its word."""

import functools
import io
import json
import math
import os
import pickle
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from dubito.models import bayesianize, build, load, save
from dubito.models.artifact.artifact import KEY, digest
from dubito.models.artifact.encoding import MASK, SCALE
from dubito.models.errors import ArtifactError
from dubito.models.manifest import Manifest, Precision
from dubito.models.predictions.model import Model
from dubito.models.pruning import prune
from tests import forked
from tests.examples import at_most

Make = Callable[[], bytes]
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]  # of a manifest and its tensors, in place

Z, CENTRE, SPREAD = (f"net.1.posterior.{name}" for name in ("Z_r.value", "law.centre.value", "law.spread.raw"))
LAYER = "net.1.posterior.Z_r.value"
BIG = 1 << 24  # the largest side that a manifest may state

# forging


@functools.cache
def artifact(kind: str = "ffg-u", precision: Precision = "float32") -> bytes:
    """An honest one: 12 inputs, 9 hidden units, 4 outputs, M = 3."""
    torch.manual_seed(0)
    method = kind if kind in ("ensemble-u", "deterministic", "whvi") else "ffg-u"
    hierarchy = 2 if kind == "hierarchy" else None
    network = bayesianize(
        build("mlp", inputs=12, hidden=[9], outputs=4), method, inducing=3, members=2, hierarchy=hierarchy
    )
    if kind == "pruned":
        prune(network, 0.4)
    with tempfile.TemporaryDirectory() as folder:
        save(network, Path(folder) / "model", precision=precision)
        return (Path(folder) / "model").read_bytes()


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensor bytes by the format's own definition, not by the library."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def raw(header: bytes | str, data: bytes = b"") -> bytes:
    header = header.encode() if isinstance(header, str) else header
    return len(header).to_bytes(8, "little") + header + data


def forge(change: Change, kind: str = "ffg-u", precision: Precision = "float32") -> bytes:
    """An artifact that was changed and, where its manifest still reads, signed anew."""
    honest = artifact(kind, precision)
    stated, tensors = json.loads(header_of(honest)[0]["__metadata__"][KEY]), parse(honest)
    change(stated, tensors)
    try:
        manifest = Manifest.model_validate_json(json.dumps(stated))
    except ValidationError:
        return serialise(tensors, {KEY: json.dumps(stated)})
    signed = manifest.model_copy(update={"sha256": digest(manifest.model_dump(mode="json"), tensors)})
    return serialise(tensors, {KEY: signed.model_dump_json()})


def put(part: Any, path: str, value: object) -> None:
    *above, last = path.split(".")
    for key in above:
        part = part[key]
    part[last] = value


def says(path: str, value: object, kind: str = "ffg-u") -> Make:
    """The manifest says this at that place."""
    return lambda: forge(lambda m, t: put(m, path, value), kind)


def banked(changes: dict[str, Any]) -> Make:
    """A manifest with a bank of features, and no tensors for it."""
    return lambda: forge(lambda m, t: m.update({"format": 3, "feature_bank": {**BANK, **changes}}))


def lacks(key: str) -> Make:
    return lambda: forge(lambda m, t: m.pop(key))


def holds(name: str, value: Callable[[Tensor], Tensor], kind: str = "ffg-u", precision: Precision = "float32") -> Make:
    """A tensor is something else than it was, or than Z was where there was none."""
    return lambda: forge(lambda m, t: t.update({name: value(t.get(name, t[Z])).contiguous()}), kind, precision)


def loses(name: str, kind: str = "ffg-u", precision: Precision = "float32") -> Make:
    return lambda: forge(lambda m, t: t.pop(name), kind, precision)


def unsigned(change: Callable[[dict[str, Any]], object], data: bytes = b"") -> Make:
    """The header is changed, `data` added, nothing signed."""

    def make() -> bytes:
        header, rest = header_of(artifact())
        change(header)
        return raw(json.dumps(header), rest + data)

    return make


def adds(dtype: str, shape: list[int], n: int) -> Make:
    """One more tensor of n bytes."""

    def change(header: dict[str, Any]) -> None:
        end = max(part["data_offsets"][1] for name, part in header.items() if name != "__metadata__")
        header["z"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + n]}

    return unsigned(change, bytes(n))


def poisoned(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: t.index_fill(0, torch.tensor([1]), value)


def zipped() -> bytes:
    """What torch.save writes: a zip archive with a pickle inside."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"weight": [1.0]}))
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def exchanged(header: dict[str, Any]) -> None:
    header[CENTRE], header[SPREAD] = header[SPREAD], header[CENTRE]


WEIGHTS = {"kind": "weights", "method": "ensemble-w", "sigma_max": None, "sigma": 0.3}
INDUCING = {"kind": "inducing", "method": "ffg-u", "M_out": 3, "M_in": 3, "lam_max": 0.03, "sigma_max": 0.1}
INDUCING |= {"sigma": 0.3, "noise": "exact"}
BLOCKS = {"kind": "whvi", "method": "whvi", "D": BIG, "covariance": "full", "flows": 64, "sigma": 0.3}
BANK = {"layer": "3", "points": 4, "features": 9}
CALIBRATION = {"false_positive_rate": 0.05, "coverage": 0.9, "measure": "entropy", "quantiles": {"1": 0.5}}
DEEP = "[" * 100_000 + "]" * 100_000

NOT_OURS = "it has no 'dubito' manifest in its header"
WRONG = "its manifest is wrong: "
UNREADABLE = "its tensors cannot be read"
CUT = r"it has [\d,]+ bytes of tensors, but its header describes [\d,]+: cut or damaged"
INFINITE = rf"tensor '{LAYER}' holds NaN or infinity"
CHANGED = "the SHA-256 of its content is not the one it states"

HOSTILE: dict[str, tuple[Make, str]] = {
    # not safetensors
    "empty": (lambda: b"", "it has 0 bytes; .* empty or cut"),
    "seven bytes": (lambda: artifact()[:7], "it has 7 bytes; .* empty or cut"),
    "text": (
        lambda: b"This is a text, and no artifact.\n" * 9,
        r"it claims a header of [\d,]+ bytes in a file of 297:",
    ),
    "zip": (zipped, r"it is a zip archive \(as torch.save writes\)"),
    "pickle, protocol 2": (lambda: pickle.dumps([1.5] * 99, protocol=2), "it is a pickle"),
    "pickle, protocol 4": (lambda: pickle.dumps([1.5] * 99, protocol=4), "it is a pickle"),
    "pickle, protocol 5": (lambda: pickle.dumps([1.5] * 99, protocol=5), "it is a pickle"),
    "torch's old format": (lambda: pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + b"...", "it is a pickle"),
    "header of 2**63 bytes": (
        lambda: (1 << 63).to_bytes(8, "little") + artifact()[8:],
        "it claims a header of 9,223,372,036,854,775,808 bytes",
    ),
    "header of 2**64 - 1 bytes": (
        lambda: b"\xff" * 8 + artifact()[8:],
        "claims a header of 18,446,744,073,709,551,615",
    ),
    "header one byte longer than the file": (
        lambda: (len(artifact()) - 7).to_bytes(8, "little") + artifact()[8:],
        "it claims a header of",
    ),
    "no header": (lambda: raw("", b"1234"), NOT_OURS),
    "header of spaces": (lambda: raw(" " * 800), NOT_OURS),
    "header not UTF-8": (lambda: raw(b'{"\xff\xfe": 1}'), NOT_OURS),
    "header a list": (lambda: raw("[1, 2]"), NOT_OURS),
    "header nested 100000 deep": (lambda: raw(DEEP), NOT_OURS),
    "tensors only": (lambda: serialise({"a": torch.zeros(3)}), NOT_OURS),
    "other metadata": (lambda: serialise({"a": torch.zeros(3)}, {"format": "pt"}), NOT_OURS),
    "manifest a number": (unsigned(lambda h: put(h, f"__metadata__.{KEY}", 1)), NOT_OURS),
    "manifest not JSON": (lambda: serialise({}, {KEY: "{"}), NOT_OURS),
    "manifest nested 100000 deep": (lambda: serialise({}, {KEY: f'{{"format": 1, "card": {DEEP}}}'}), NOT_OURS),
    "manifest with half a character": (
        unsigned(lambda h: put(h, f"__metadata__.{KEY}", '{"format": 1, "card": "\ud800"}')),
        WRONG,
    ),
    # the manifest
    "format 9": (
        says("format", 9),
        "its format is 9; this version of dubito reads format 1, 2, 3, 4, 5, 6 and 7. Update dubito",
    ),
    "no format": (lacks("format"), "its format is None"),
    "format a list": (says("format", [1]), r"its format is \[1\]"),
    "unknown key": (says("colour", "red"), WRONG + "colour: Extra inputs"),
    "a bank in format 1": (says("feature_bank", BANK), WRONG + ".*the format is 1, but it has keys of format 3"),
    "a bank of another layer": (banked({"layer": "9"}), "its bank holds 9 features of layer '9'; the network has no"),
    "a bank of other features": (banked({"features": 8}), "its bank holds 8 features of layer '3'; the network has no"),
    "a bank without its tensors": (banked({}), "tensor 'feature_bank.levels' is missing"),
    "a bank too large": (banked({"points": 1 << 23}), WRONG + ".*the bank has more than 67,108,864 numbers"),
    "unknown key of a layer": (says("layers.1.colour", "red"), WRONG + "layers.1: inducing.colour: Extra inputs"),
    "missing key": (lacks("batchnorm"), WRONG + "batchnorm: Field required"),
    "SHA-256 not one": (says("sha256", "?"), WRONG + "sha256"),
    "unknown architecture": (says("architecture.name", "mlq"), "no architecture 'mlq'; there are: mlp, lenet"),
    "unknown name in torchvision": (
        says("architecture", {"name": "torchvision/resnet51"}),
        "torchvision has no classifier 'resnet51'",
    ),
    "unknown argument": (says("architecture.arguments.width", 3), "mlp: got an unexpected keyword argument 'width'"),
    "argument of another type": (says("architecture.arguments.hidden", "abc"), "mlp|describes no network"),
    "argument too large": (
        says("architecture.arguments.inputs", 10**12),
        "mlp: inputs is 1000000000000; expected 1 to 16777216",
    ),
    "argument changed": (
        says("architecture.arguments.inputs", 13),
        r"tensor 'net.1.posterior.Z_c.value' has shape \(3, 13\), but the manifest makes it \(3, 14\)",
    ),
    "unknown layer": (says("layers.9", INDUCING), "the network has no Linear or Conv layer '9'"),
    "layer without weights": (says("layers.2", INDUCING), "the network has no Linear or Conv layer '2'"),
    "layers left out": (says("layers", {}), "tensor 'net.1.weight' is missing"),
    "ensemble without members": (
        says("layers.1.method", "ensemble-u"),
        WRONG + "layers.1.* ensemble-u has members None",
    ),
    "weights without members": (says("layers.1", WEIGHTS), WRONG + "layers.1.* ensemble-w has members None"),
    "members without an ensemble": (says("layers.1.members", 3), WRONG + "layers.1.* ffg-u has members 3"),
    "too many members": (says("layers.1", {**WEIGHTS, "members": 10**6}), WRONG + r"layers.1.*members: .* 1024"),
    "cap below the floor": (says("layers.1.sigma_max", 1e-9), "describes no network that can be built: the cap 1e-09"),
    "blocks of no power of two": (says("layers.1", {**BLOCKS, "D": 48}), WRONG + "layers.1.* D is 48; the side of"),
    "blocks beyond the layer": (says("layers.1", BLOCKS), "layer '1': D = 16777216 for weights of 9 × 13"),
    "too many flows": (says("layers.1", {**BLOCKS, "flows": 65}), WRONG + "layers.1.*flows: .* 64"),
    "too many directions": (says("layers.1.directions", 1 << 70), "describes no network that can be built"),
    "hierarchical without a hierarchy": (says("layers.1.method", "hierarchical"), WRONG + ".* needs a hierarchy"),
    "hierarchy of another size": (says("hierarchy.d_in", 5, "hierarchy"), WRONG + ".* hierarchy does not fit"),
    "hierarchy without V": (
        says("hierarchy.layer.method", "hierarchical", "hierarchy"),
        WRONG + ".*hierarchical cannot draw",
    ),
    "hierarchy over nothing": (
        says("hierarchy", {"d_out": 3, "d_in": 6, "layer": INDUCING}),
        WRONG + ".* hierarchy does not fit",
    ),
    "copies of an unknown layer": (says("members", {"9": 2}), "the network has no layer '9'"),
    "copies of the whole network": (says("members", {"": 2}), "copies '' for each member, which is no single layer"),
    "copies without tensors": (says("members", {"2": 500}), "claims 500 copies of layers in 14 tensors"),
    "calibration without its measure": (
        says("card.calibration", {**CALIBRATION, "thresholds": {}}),
        WRONG + "card.calibration: .* 'entropy' has no thresholds",
    ),
    "calibration without a K": (
        says("card.calibration", {**CALIBRATION, "thresholds": {"entropy": {}}}),
        WRONG + "card.calibration: .* at least one K",
    ),
    "pictures of other channels": (
        says("card.input", {"shape": [3, 2, 2], "image": {"mean": [0.5], "std": [0.5]}}),
        WRONG + "card.input: .* one entry per channel",
    ),
    # the tensors
    "absurd shape": (unsigned(lambda h: put(h[Z], "shape", [1 << 62, 1 << 62])), UNREADABLE),
    "absurd size": (unsigned(lambda h: h[Z].update(shape=[1 << 40], data_offsets=[0, 1 << 42])), CUT),
    "offsets not numbers": (unsigned(lambda h: put(h[Z], "data_offsets", ["0", "9"])), NOT_OURS),
    "infinite offsets": (unsigned(lambda h: put(h[Z], "data_offsets", [0, math.inf])), NOT_OURS),
    "end before the start": (unsigned(lambda h: h[Z]["data_offsets"].reverse()), UNREADABLE),
    "overlap": (unsigned(lambda h: put(h[Z], "data_offsets", h[CENTRE]["data_offsets"])), UNREADABLE),
    "absurd shape without elements": (adds("F32", [0, 1 << 62, 1 << 62], 0), UNREADABLE),
    "type that torch has not": (adds("F6_E2M3", [4], 3), UNREADABLE),
    "unknown type": (adds("F128", [1], 16), UNREADABLE),
    "more bytes than tensors": (lambda: artifact() + b"more", CUT),
    "transposed": (
        holds(Z, lambda t: t.T),
        rf"tensor '{LAYER}' has shape \(9, 3\), but the manifest makes it \(3, 9\)",
    ),
    "flattened": (holds(Z, Tensor.flatten), r"has shape \(27,\), but the manifest makes it \(3, 9\)"),
    "NaN": (holds(Z, poisoned(math.nan)), INFINITE),
    "infinity": (holds(Z, poisoned(math.inf)), INFINITE),
    "minus infinity": (holds(Z, poisoned(-math.inf)), INFINITE),
    "infinity in float16": (holds(Z, poisoned(math.inf), precision="float16"), INFINITE),
    "NaN in bfloat16": (holds(Z, poisoned(math.nan), precision="bfloat16"), INFINITE),
    "NaN among the values of a pruned tensor": (holds(Z, poisoned(math.nan), "pruned"), INFINITE),
    "NaN among the scales": (holds(Z + SCALE, poisoned(math.nan), precision="int8"), INFINITE),
    "float64": (holds(Z, Tensor.double), f"tensor '{LAYER}' is stored as torch.float64"),
    "whole numbers": (holds(Z, Tensor.int), f"tensor '{LAYER}' is stored as torch.int32"),
    "complex numbers": (holds(Z, lambda t: t.to(torch.complex64)), f"tensor '{LAYER}' is stored as torch.complex64"),
    "extra tensor": (holds("more", torch.zeros_like), "tensor 'more' belongs to nothing that the manifest describes"),
    "missing tensor": (loses(Z), f"tensor '{LAYER}' is missing"),
    "mask too short": (
        holds(Z + MASK, lambda t: t[:-1], "pruned"),
        rf"tensor '{LAYER}#mask' has shape \(3,\), but the manifest makes it \(4,\)",
    ),
    "mask too long": (holds(Z + MASK, lambda t: t.repeat(2), "pruned"), rf"tensor '{LAYER}#mask' has shape \(8,\)"),
    "mask not of bytes": (holds(Z + MASK, Tensor.bool, "pruned"), f"tensor '{LAYER}#mask'"),
    "mask of too many bits": (holds(Z + MASK, lambda t: t | 255, "pruned"), r"but the manifest makes it \(27,\)"),
    "mask alone": (loses(Z, "pruned"), f"tensor '{LAYER}' is missing"),
    "values without their mask": (loses(Z + MASK, "pruned"), r"but the manifest makes it \(3, 9\)"),
    "mask of what cannot be pruned": (
        lambda: forge(lambda m, t: t.update({"net.1.bias#mask": torch.tensor([255, 1]).byte()}), "deterministic"),
        "tensor 'net.1' is stored as pruned, but cannot be",
    ),
    "int8 without scale": (loses(Z + SCALE, precision="int8"), f"tensor '{LAYER}' is stored as torch.int8"),
    "scale too long": (
        holds(Z + SCALE, lambda t: t.repeat(3), precision="int8"),
        rf"tensor '{LAYER}#scale' has shape \(9,\), but the manifest makes it \(3,\)",
    ),
    "scale in float16": (holds(Z + SCALE, Tensor.half, precision="int8"), f"tensor '{LAYER}#scale'"),
    "scale without int8": (holds(Z + SCALE, lambda t: t[:, 0]), f"tensor '{LAYER}' is stored as torch.float32"),
    # the signature
    "tensors exchanged": (unsigned(exchanged), CHANGED),
    "manifest changed": (lambda: artifact().replace(rb"\"seed\":null", rb"\"seed\":1234"), CHANGED),
    "last bit flipped": (lambda: artifact()[:-1] + bytes([artifact()[-1] ^ 1]), CHANGED),
}


def refusal(path: Path) -> str:
    """The one error: it names the file once, says what is wrong in one line, and nothing else hides behind it."""
    with pytest.raises(ArtifactError) as caught:
        load(path)
    assert caught.type is ArtifactError
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    name, _, reason = str(caught.value).partition(": ")
    assert name == str(path)
    assert str(path) not in reason
    assert "\n" not in reason
    return reason


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    make, reason = HOSTILE[name]
    (tmp_path / "model").write_bytes(make())
    found = refusal(tmp_path / "model")
    assert re.search(reason, found), found


def test_the_forger_signs_well(tmp_path: Path) -> None:
    """Otherwise the signature, and not the check that a case is about, would refuse everything above."""
    path = tmp_path / "model"
    for kind in ("ffg-u", "pruned", "hierarchy", "deterministic", "ensemble-u"):
        for precision in ("float32", "float16", "bfloat16", "int8"):
            path.write_bytes(forge(lambda m, t: None, kind, precision))
            load(path)
    path.write_bytes(unsigned(lambda h: None)())
    load(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "it cannot be read: Is a directory."
    assert refusal(tmp_path / "nothing") == "it cannot be read: No such file or directory."
    assert refusal(tmp_path / "nothing" / "model") == "it cannot be read: No such file or directory."
    assert refusal(tmp_path / "a\0b") == "it cannot be read: embedded null byte."
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert refusal(path) == "it is a pipe or a device, not a file."


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """A terabyte of nothing, which takes no space on the disk: without a header, and behind an artifact."""
    for start, reason in ((b"", NOT_OURS), (artifact(), CUT)):
        with (tmp_path / "model").open("wb") as file:
            file.write(start)
            file.truncate(1 << 40)
        assert re.search(reason, refusal(tmp_path / "model"))


@pytest.mark.parametrize(("kind", "precision"), [("ffg-u", "float32"), ("pruned", "int8")])
def test_a_file_cut_anywhere_is_refused(kind: str, precision: Precision, tmp_path: Path) -> None:
    whole, path = artifact(kind, precision), tmp_path / "model"
    header = 8 + int.from_bytes(whole[:8], "little")
    sixteenths = (len(whole) * k // 16 for k in range(16))
    for end in {*range(16), *range(16, header, 97), *range(header - 4, len(whole), 23), len(whole) - 1, *sixteenths}:
        path.write_bytes(whole[:end])
        assert re.search(f"empty or cut|it claims a header|{CUT}", refusal(path)), end


# whatever is changed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "model"


def loaded(content: bytes, place: Path) -> Model | None:
    """None where it was refused; any other exception fails the test."""
    place.write_bytes(content)
    try:
        return load(place)
    except ArtifactError:
        return None


def same(a: Model, b: Model) -> bool:
    one, other = a.network.state_dict(), b.network.state_dict()
    equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return equal and a.manifest == b.manifest


share = st.floats(0, 1, exclude_max=True)  # of a list or a file: where in it


@given(share, st.integers(1, 255))
@settings(derandomize=True, deadline=None, max_examples=at_most(100))
def test_a_changed_byte_is_noticed_or_means_nothing(place: Path, at: float, by: int) -> None:
    """White space and other spellings of the same number, in the header, are all that may pass."""
    whole = artifact()
    i = int(at * len(whole))
    found = loaded(whole[:i] + bytes([whole[i] ^ by]) + whole[i + 1 :], place)
    if found is not None:
        honest = loaded(whole, place)
        assert honest is not None
        assert same(found, honest)
        assert i < 8 + int.from_bytes(whole[:8], "little")


def test_white_space_after_the_header_means_nothing(place: Path) -> None:
    header, data = header_of(artifact())
    one, other = (loaded(raw(json.dumps(header) + space, data), place) for space in (" " * 8, "\n\t \r" * 2))
    assert one is not None
    assert other is not None
    assert same(one, other)


def places(part: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with every key in it."""
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield part, key
        yield from places(part[key])


WORDS = ["", "ffg-u", "fcg-u", "ensemble-u", "hierarchical", "ffg-w", "weights", "dropout", "lenet", "custom", "é"]
OTHERS: list[Any] = [[], {}, [[]], [BIG], {"1": 3}, {"2": 1}, [1] * 300, WEIGHTS, INDUCING]
values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 1 << 70), st.floats(), st.sampled_from(WORDS), st.sampled_from(OTHERS)
)


@given(share, values, st.sampled_from(["ffg-u", "hierarchy", "ensemble-u", "whvi"]))
@settings(derandomize=True, deadline=None, max_examples=at_most(100))
def test_no_manifest_raises_anything_else(place: Path, at: float, value: object, kind: str) -> None:
    def change(m: dict[str, Any], t: object) -> None:
        everywhere = list(places(m))
        container, key = everywhere[int(at * len(everywhere))]
        container[key] = value

    loaded(forge(change, kind), place)


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64)


@given(
    share,
    st.lists(st.integers(0, 13), max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from(["", SCALE, MASK, "."]),
    st.sampled_from([("ffg-u", "float32"), ("pruned", "int8"), ("ensemble-u", "float16"), ("whvi", "float32")]),
)
@settings(derandomize=True, deadline=None, max_examples=at_most(40))
def test_no_tensor_raises_anything_else(
    place: Path, at: float, shape: list[int], dtype: torch.dtype, suffix: str, base: tuple[str, Precision]
) -> None:
    def change(m: object, t: dict[str, Tensor]) -> None:
        t[sorted(t)[int(at * len(t))] + suffix] = torch.ones(shape, dtype=dtype)

    loaded(forge(change, *base), place)


# memory

LIMIT = 300 << 20
UNDER_A_LIMIT = """
import resource, sys, torch
from dubito.models import load
from dubito.models.errors import ArtifactError

limit, honest, *hostile = sys.argv[1:]
load(honest)
held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (held + int(limit), held + int(limit)))
try:
    torch.empty(20 * int(limit), dtype=torch.uint8)  # the allocator may hold a gigabyte in reserve
except RuntimeError:
    print("limited")
for path in hostile:
    try:
        load(path)
    except ArtifactError as error:
        print("refused", error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024)
"""


def wide(m: dict[str, Any], **layer: object) -> None:
    """A hidden layer of 2**24 units, and what else the first layer claims."""
    m["architecture"]["arguments"]["hidden"] = [BIG]
    m["layers"]["1"] = layer if "kind" in layer else m["layers"]["1"] | layer


def behind_a_mask(m: dict[str, Any], t: dict[str, Tensor]) -> None:
    wide(m)
    t |= {Z: torch.zeros(0), Z + MASK: torch.zeros(8, dtype=torch.uint8)}


def under_a_hierarchy(m: dict[str, Any], t: object) -> None:
    for entry in m["layers"].values():
        entry.update(method="hierarchical", sigma_max=None, M_out=BIG, M_in=BIG // 2)
    m["hierarchy"] = {"d_out": BIG, "d_in": BIG, "layer": {**INDUCING, "M_out": BIG, "M_in": BIG}}


ABSURD: dict[str, Change] = {
    "wide": lambda m, t: wide(m),
    "wide and deep": lambda m, t: put(m, "architecture.arguments.hidden", [BIG] * 200),
    "outputs": lambda m, t: put(m, "architecture.arguments.outputs", BIG),
    "classes": lambda m, t: m.update(architecture={"name": "lenet", "arguments": {"classes": BIG}}, layers={}),
    "inducing weights": lambda m, t: wide(m, M_out=BIG, M_in=BIG),
    "covariance": lambda m, t: m["layers"]["1"].update(method="fcg-u", M_out=1 << 12, M_in=1 << 12),
    "covariance of weights": lambda m, t: wide(m, **{**WEIGHTS, "method": "fcg-w"}),
    "members": lambda m, t: wide(m, method="ensemble-u", members=1024, M_out=BIG, M_in=BIG),
    "members' weights": lambda m, t: wide(m, **WEIGHTS, members=1024),
    "copies": lambda m, t: put(m, "members", {str(i): 1024 for i in range(4)}),
    "directions": lambda m, t: put(m, "layers.1.directions", 1 << 40),
    "hierarchy": under_a_hierarchy,
    "mask": behind_a_mask,
    "blocks": lambda m, t: wide(m, **BLOCKS),
    "many blocks": lambda m, t: wide(m, **{**BLOCKS, "D": 1}),
    "outputs of a regression": lambda m, t: put(m, "task", {"kind": "regression", "outputs": BIG}),
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of the process from /proc")
def test_absurd_claims_are_refused_without_allocating(tmp_path: Path) -> None:
    """In a process that may grow by 300 MB; each claim, believed, would take more, most of them terabytes.

    Memory that is asked for but not touched counts against the limit, memory that is touched in the peak.
    """
    (tmp_path / "honest").write_bytes(artifact())
    for name, change in ABSURD.items():
        (tmp_path / name).write_bytes(forge(change))
    for name in ("absurd shape", "absurd size", "header of 2**63 bytes"):
        (tmp_path / name).write_bytes(HOSTILE[name][0]())
    hostile = [p for p in sorted(tmp_path.iterdir()) if p.name != "honest"]
    answer = forked.run(str(LIMIT), tmp_path / "honest", *hostile, code=UNDER_A_LIMIT)
    assert answer.returncode == 0, answer.stderr
    first, *refused, grown = answer.stdout.splitlines()
    assert first == "limited"
    for path, line in zip(hostile, refused, strict=True):
        assert line.startswith(f"refused {path}: "), line
        assert "memory" not in line, line  # refused for what it claims, not because the claim was tried
    assert int(grown) < LIMIT


def test_a_file_that_says_less_than_today_is_still_whole(tmp_path: Path) -> None:
    """An earlier version wrote no such field: the hash is of what the file says, not of what is read into it."""
    honest = artifact("ffg-u", "float32")
    stated, tensors = json.loads(header_of(honest)[0]["__metadata__"][KEY]), parse(honest)
    del stated["precision"], stated["card"]["provenance"]["train_sample"]
    stated["sha256"] = digest(stated, tensors)
    (tmp_path / "old.safetensors").write_bytes(serialise(tensors, {KEY: json.dumps(stated)}))
    assert load(tmp_path / "old.safetensors").manifest.precision == "float32"
