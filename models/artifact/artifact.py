"""The artifact: one safetensors file with what a method stores and a manifest in its metadata. No pickle anywhere."""

import copy
import hashlib
import json
import os
import platform
import secrets
import stat
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn

from dubito import __version__
from dubito.models.artifact.described import (
    bare_by,
    check_input,
    describe_network,
    maybe_infinite,
    set_masks,
    skeleton_of,
    state_and_masks,
)
from dubito.models.artifact.encoding import MASK, SCALE, decode, decode_whole, encode
from dubito.models.conversion.architectures import architecture_of, input_of, on_meta
from dubito.models.disk import write_by
from dubito.models.errors import ArchitectureError, ArtifactError, ConversionError, first_line
from dubito.models.manifest import FORMATS, Card, Hierarchy, Manifest, Precision, format_of
from dubito.models.network.layers import MemberLayer
from dubito.models.network.network import BayesianNetwork
from dubito.models.network.normalisation import ScaleShift, fold_batchnorm
from dubito.models.numerics.parameters import Free, Optional, Positive
from dubito.models.predictions.model import Model
from dubito.models.remote.address import Place, place_of
from dubito.models.remote.cache import fetched

KEY = "dubito"  # of the metadata
LONGEST_HEADER = 1 << 26  # bytes; the largest networks need a few hundred thousand


def save(
    model: BayesianNetwork | Model,
    path: str | Path,
    *,
    card: Card | None = None,
    precision: Precision | None = None,
    batchnorm: Literal["keep", "fold"] = "keep",
) -> Manifest:
    """Write the artifact, whole or not at all, and return its manifest.

    Without a `precision` a model keeps the one that it was loaded with; a network is saved in float32.
    `batchnorm="fold"` stores each BatchNorm as one scale and one shift per channel: smaller, and no longer trainable.
    """
    if precision is None:
        precision = model.manifest.precision if isinstance(model, Model) else "float32"
    for name, value, known in (
        ("precision", precision, get_args(Precision)),
        ("batchnorm", batchnorm, ("keep", "fold")),
    ):
        if value not in known:
            raise ArtifactError(f"{name} is {value!r}; expected one of {', '.join(known)}.")
    if not isinstance(model, Model | BayesianNetwork):
        raise ArtifactError(
            f"save got {type(model).__name__}; expected a Bayesian network: bayesianize(net, …), with the method "
            '"deterministic" for a plain one.'
        )
    network = model.network if isinstance(model, Model) else model
    whole = network.state_dict()
    if other := [name.rpartition(".")[0] for name, held in whole.items() if not isinstance(held, Tensor)]:
        raise ArtifactError(
            f"{other[0].removeprefix('net.')} keeps a state that is no tensor (get_extra_state), which no file holds: "
            "let its module keep tensors, as buffers, or numbers that its constructor is given."
        )
    if empty := [name for name, tensor in whole.items() if tensor.is_meta]:
        raise ArtifactError(f"{empty[0]} has no storage (meta device); expected trained weights: load them first.")
    if card is None:
        card = model.card if isinstance(model, Model) else Card(input=input_of(architecture_of(network.net)))
    if batchnorm == "fold":
        if network.joint is not None and network.joint.over_weights:
            raise ArtifactError(
                'batchnorm is "fold", but this model\'s posterior is over weights as they are: save it with "keep".'
            )
        network = fold_batchnorm(network)
    tensors: dict[str, Tensor] = {}
    state, masks = state_and_masks(network)
    homes, infinite, directions = _homes(network), maybe_infinite(network), _directions(network)
    for name, tensor in state.items():
        if homes[name] == name:
            # directions were rounded to float16 when they were found
            own: Precision = "float16" if name in directions and precision != "int8" else precision
            tensors |= encode(name, tensor, masks.get(name.rpartition(".")[0]), own, infinite=name in infinite)
    manifest, unsaved = _manifest(network, card, precision)
    for name, tensor in unsaved.items():  # buffers and constants
        tensors |= encode(name, tensor, None, precision, infinite=True)
    manifest = manifest.model_copy(update={"sha256": digest(manifest.model_dump(mode="json"), tensors)})
    # one key: the library writes several in no fixed order, and the same model should give the same bytes
    content = serialise(tensors, {KEY: manifest.model_dump_json()})
    _write(Path(path), content)
    return manifest


def check_savable(network: BayesianNetwork, card: Card) -> None:
    """Raise what `save` would say of the network, before it is trained any further."""
    _manifest(network, card, "float32")


def load(path: str | Place, network: nn.Module | None = None) -> Model:
    """Read and check an artifact: an ArtifactError says what is wrong with a file that cannot be trusted.

    An address (s3://, gs://, az://, https://, hf://) is read through the cache of verified copies.

    `network` is for artifacts that say nothing of their network: the same nn.Module that was converted.
    """
    return rebuild(path, *examine(path), network)


def rebuild(
    path: str | Place, manifest: Manifest, tensors: Mapping[str, Tensor], network: nn.Module | None = None
) -> Model:
    """The model that an examined file describes."""
    try:
        restored = _restore(manifest, tensors, network)
    except ArtifactError as error:
        raise ArtifactError(f"{place_of(path)}: {error}") from None
    restored.eval()
    return Model(restored, manifest)


def examine(path: str | Place) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest and the tensors as they are stored, whole and unchanged since they were saved; nothing is built."""
    try:
        manifest, stated, content = _read(fetched(path))
        tensors = _parse_tensors(content)
        if digest(stated, tensors) != manifest.sha256:
            raise ArtifactError(
                "the SHA-256 of its content is not the one it states: it was changed or damaged after it was saved."
            )
    except ArtifactError as error:
        raise ArtifactError(f"{place_of(path)}: {error}") from None
    return manifest, tensors


def is_artifact(path: str | Path) -> bool:
    """Whether the file has a manifest of ours; one that cannot be read has none."""
    try:
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return length <= LONGEST_HEADER and KEY in json.loads(file.read(length)).get("__metadata__", {})
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return False


def digest(stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the manifest's JSON (but for this number) and every tensor's name, type, shape and bytes.

    Over what the file says, not over what it means today: a later version may know more fields.
    """
    known = {key: value for key, value in stated.items() if key != "sha256"}
    total = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data))
    return total.hexdigest()


def _manifest(network: BayesianNetwork, card: Card, precision: Precision) -> tuple[Manifest, dict[str, Tensor]]:
    """And the tensors of a traced network that its state does not hold."""
    layers = {name: layer.entry.model_copy(update=layer.q.update()) for name, layer in network.layers.items()}
    members = {name: len(m.copies) for name, m in network.net.named_modules() if isinstance(m, MemberLayer)}
    hierarchy = None
    if network.hierarchy is not None:
        d_out, d_in = network.hierarchy.geometry.shape
        hierarchy = Hierarchy(d_out=d_out, d_in=d_in, layer=network.hierarchy.entry)
    folded = any(isinstance(m, ScaleShift) for m in network.modules())
    bank = None if network.feature_bank is None else network.feature_bank.entry
    joint: dict[str, Any] = {} if network.joint is None else {network.joint.key: network.joint.entry}
    versions = {"dubito": __version__, "torch": torch.__version__, "python": platform.python_version()}
    provenance = card.provenance.model_copy(update={"versions": {**versions, **card.provenance.versions}})
    known = architecture_of(network.net)
    try:
        manifest = Manifest(
            format=format_of(card, bank, joint=next(iter(joint.values()), None)),
            architecture=known,
            task=network.task,
            layers=layers,
            members=members,
            hierarchy=hierarchy,
            feature_bank=bank,
            batchnorm="folded" if folded else "kept",
            precision=precision,
            card=card.model_copy(update={"provenance": provenance}),
            sha256="0" * 64,
            **joint,
        )
        manifest, unsaved = describe_network(network, manifest)
        # as `load` will read it: a card may hold what no file can, such as a metric that is NaN
        return Manifest.model_validate_json(manifest.model_dump_json(warnings=False)), unsaved
    except (ValidationError, PydanticSerializationError) as error:
        raise ArtifactError(f"the manifest cannot be saved: {_complaint(error)}.") from None


def _complaint(error: ValidationError | PydanticSerializationError) -> str:
    if isinstance(error, PydanticSerializationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'manifest'}: {first['msg']}"


def _write(path: Path, content: bytes) -> None:
    try:
        write_by(path.with_name(f".{path.name}.{secrets.token_hex(8)}"), path, content, mode="xb")
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot write {path}: {_reason(error)}.") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _read(path: Path) -> tuple[Manifest, dict[str, Any], bytes]:
    """The manifest and the whole file, which is read only once its header makes sense."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a directory has an error of its own
            raise ArtifactError("it is a pipe or a device, not a file.")
        with path.open("rb") as file:
            size, start = os.fstat(file.fileno()).st_size, file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8:
                raise ArtifactError(f"it has {size} bytes; expected a dubito artifact: it is empty or cut.")
            if length > LONGEST_HEADER or length > size - 8:
                raise ArtifactError(_foreign(start, length, size))
            manifest, stated = _parse_header(file.read(length), size - 8 - length)
            file.seek(0)
            return manifest, stated, file.read()
    except (OSError, ValueError, MemoryError) as error:
        raise ArtifactError(f"it cannot be read: {_reason(error)}.") from None


def _foreign(start: bytes, length: int, size: int) -> str:
    """What a file may be whose first bytes are not the length of a header."""
    kinds = {b"PK\x03\x04": "a zip archive (as torch.save writes)", b"\x80": "a pickle", b"\x89HDF": "an HDF5 file"}
    for magic, kind in kinds.items():
        if start.startswith(magic) and length > LONGEST_HEADER:  # else it may well be a length
            return f"it is {kind}; expected a dubito artifact, which is a safetensors file."
    return f"it claims a header of {length:,} bytes in a file of {size:,}: not a safetensors file, or one that was cut."


def _parse_header(header: bytes, rest: int) -> tuple[Manifest, dict[str, Any]]:
    try:
        parts = json.loads(header)
        text = parts.pop("__metadata__")[KEY]
        stated = json.loads(text)
        data = max((index(part["data_offsets"][1]) for part in parts.values()), default=0)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        raise ArtifactError(f"it has no {KEY!r} manifest in its header: not a dubito artifact.") from None
    if data != rest:
        raise ArtifactError(f"it has {rest:,} bytes of tensors, but its header describes {data:,}: cut or damaged.")
    stated_format = stated.get("format") if isinstance(stated, dict) else None
    if type(stated_format) is not int or stated_format not in FORMATS:
        *others, last = map(str, FORMATS)
        known = " and ".join([*([", ".join(others)] if others else []), last])
        raise ArtifactError(
            f"its format is {stated_format!r}; this version of dubito reads format {known}. "
            "Update dubito, or save it again."
        )
    try:
        return Manifest.model_validate_json(text), stated
    except ValidationError as error:
        raise ArtifactError(f"its manifest is wrong: {_complaint(error)}.") from None
    except RecursionError:
        raise ArtifactError("its manifest is nested too deeply.") from None


def _parse_tensors(content: bytes) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = parse(content)
    except Exception as error:  # the library raises several kinds, all of them about the file
        raise ArtifactError(f"its tensors cannot be read: {error}.") from None
    return tensors


def _restore(manifest: Manifest, tensors: Mapping[str, Tensor], given: nn.Module | None) -> BayesianNetwork:
    """Everything is checked against a network without storage before anything of the claimed size is allocated."""
    try:
        with torch.device("meta"):
            bare = _without_storage(given) if given is not None else bare_by(manifest)
            if given is None and manifest.traced is not None:
                check_input(bare, manifest)
            _check_copies(bare, manifest, tensors)
            skeleton = skeleton_of(bare, manifest)
        state, masks = _decode_all(skeleton, tensors)
        if given is None and (manifest.traced is not None or on_meta(manifest.architecture.name)):
            network, homes = skeleton, _homes(skeleton)
            network.load_state_dict(state, assign=True)
            _tie(network, homes)
        else:  # such a network may hold tensors that no state dict names
            network = skeleton_of(given if given is not None else bare_by(manifest), manifest)
            network.load_state_dict(state)
    except (ArchitectureError, ConversionError) as error:
        raise ArtifactError(str(error)) from None
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(f"its manifest describes no network that can be built: {first_line(error)}.") from None
    if network.joint is not None:
        network.joint.check(network.net)
    set_masks(network, masks)
    return network


def _without_storage(net: nn.Module) -> nn.Module:
    """A copy on the meta device; layers and weights that stand in several places still do."""
    memo: dict[int, object] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in net.parameters()}
    memo |= {id(b): b.to("meta") for b in net.buffers()}
    return copy.deepcopy(net, memo)


def _homes(network: nn.Module) -> dict[str, str]:
    """For each name in the state the first name of the same tensor, under which alone it is stored."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(t), name) for name, t in network.state_dict(keep_vars=True).items()}


def _directions(network: nn.Module) -> set[str]:
    """Names of the directions of λ-noise that layers have of their own."""
    modules = network.named_modules(remove_duplicate=False)
    return {f"{name}.directions" for name, m in modules if isinstance(m, Optional) and m.optional == "directions"}


def _tie(network: nn.Module, homes: Mapping[str, str]) -> None:
    """Let a tensor that has several names be one again."""
    for name, home in homes.items():
        if name != home:
            (above, _, last), (first_above, _, first) = name.rpartition("."), home.rpartition(".")
            owner, first_owner = network.get_submodule(above), network.get_submodule(first_above)
            if last in owner._parameters and first in first_owner._parameters:
                owner._parameters[last] = first_owner._parameters[first]


def _check_copies(bare: nn.Module, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """Modules take memory even without storage: no more copies than the file can fill."""
    parts = dict(bare.named_modules())
    for name in manifest.members:
        if name in parts and any(parts[name].children()):
            raise ArtifactError(f"its manifest copies {name!r} for each member, which is no single layer.")
    if (copies := sum(manifest.members.values())) > len(tensors):
        raise ArtifactError(f"its manifest claims {copies:,} copies of layers in {len(tensors):,} tensors.")


def _decode_all(
    skeleton: BayesianNetwork, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    state: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    homes, infinite, known = _homes(skeleton), maybe_infinite(skeleton), set[str]()
    for name, expected in skeleton.state_dict().items():
        if homes[name] != name:
            state[name] = state[homes[name]]
        elif expected.is_floating_point():
            known |= {name, name + SCALE, name + MASK}
            state[name], keep = decode(name, expected.shape, tensors, infinite=name in infinite)
            if keep is not None:
                masks[name.rpartition(".")[0]] = keep
        else:
            known.add(name)
            state[name] = decode_whole(name, expected, tensors)
    if unknown := sorted(tensors.keys() - known):
        raise ArtifactError(f"tensor {unknown[0]!r} belongs to nothing that the manifest describes.")
    for place in masks:
        if not isinstance(skeleton.get_submodule(place), Free | Positive):
            raise ArtifactError(f"tensor {place!r} is stored as pruned, but cannot be.")
    return state, masks
