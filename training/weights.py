"""Weights of a network that was trained elsewhere: .safetensors, or .pth, .pt and .ckpt as torch.save writes them.

This is the one place with torch.load. It is called with weights_only=True: torch's own unpickler makes tensors, plain
values and what `SAFE` lists, and refuses a file that asks for anything else, so no code of the file runs. Commands that
train come here; the server never does (tests/test_structure.py).
"""

import argparse
import json
import pathlib
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dubito.models.errors import DubitoError

SAFE: list[Any] = [
    argparse.Namespace,
    pathlib.PosixPath,
]  # beside tensors and plain values: what training scripts often add
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema")  # taken first: the better weights
WRAPPED = ("state_dict", "model_state_dict", "model", "net", "network", "weights", "module")
NAMES = ("classes", "class_names", "labels", "categories", "class_to_idx", "idx_to_class")
BESIDE = ("aux", "AuxLogits")  # heads that are used in training only
MOST_NAMED = 4  # keys in a message
SAVE = "Save the weights alone: torch.save(model.state_dict(), path)."


class WeightsError(DubitoError):
    """Weights that cannot be read, or that belong to another network."""


@dataclass(frozen=True)
class Weights:
    path: Path
    tensors: Mapping[str, Tensor]
    labels: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()  # how the file was wrapped

    def renamed(self, changes: Sequence[str]) -> "Weights":
        """With other names: each change is OLD=NEW, of a whole name or of its first parts."""
        tensors = dict(self.tensors)
        for change in changes:
            old, equals, new = change.partition("=")
            if not equals or not any(_under(old, key) for key in tensors):
                raise WeightsError(f"--rename is {change!r}; expected OLD=NEW with a name in {self.path}, as fc.1=fc.")
            tensors = {new + key[len(old) :] if _under(old, key) else key: t for key, t in tensors.items()}
        return replace(self, tensors=tensors)


def _under(prefix: str, key: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def read_weights(path: Path) -> Weights:
    """The tensors of a file by name, out of whatever a training script wrapped them in."""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}.") from None
    if not start:
        raise WeightsError(f"{path} is empty; expected weights.")
    if start[8:9] == b"{":
        try:
            return Weights(path, load_file(path))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} is no whole .safetensors file: {error}.") from None
    content = _loaded(path)
    labels = _labels_in(path, content)
    tensors, places = _unwrapped(content)
    if tensors is None:
        kind = type(content).__name__
        keys = f" with {_some(map(str, content))}" if isinstance(content, Mapping) and content else ""
        kind = f"{kind}{keys}" if keys or not isinstance(content, Mapping) else f"{kind} without entries"
        raise WeightsError(f"{path} holds a {kind}, and no tensors by name; expected a state dict. {SAVE}")
    remarks = []
    if places:
        averaged = ", the average over training (EMA)" if places[0] in AVERAGED else ""
        remarks.append(f"{path.name}: the weights stand under {'.'.join(places)}{averaged}")
    return Weights(path, tensors, labels, tuple(remarks))


def _loaded(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(SAFE):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds, all of them about the file
        said = " ".join(str(error).split())
        if found := re.search(r"GLOBAL ([\w.]+)", said):
            raise WeightsError(
                f"{path} holds an object of {found[1]}, beside or instead of weights. Reading it would run code that "
                f"the file names, so it is refused. {SAVE}"
            ) from None
        raise WeightsError(f"{path} {_instead(path)}") from None


def _instead(path: Path) -> str:
    """What a file is that torch.load cannot read, and what to do."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        try:
            with zipfile.ZipFile(path) as archive:
                inside = archive.namelist()
        except (OSError, zipfile.BadZipFile):
            return "was cut off or damaged after torch.save wrote it: copy or download it again."
        if any("/code/" in name for name in inside):
            return f"is a TorchScript archive, which holds code. {SAVE}"
    if start == b"\x89HDF":
        return "is an HDF5 file, as Keras writes; expected the weights of a PyTorch network."
    return f"is neither a .safetensors file nor one of torch.save, or it is damaged. {SAVE}"


def _unwrapped(content: Any) -> tuple[dict[str, Tensor] | None, list[str]]:
    """The tensors by name, and the keys that led to them."""
    if not isinstance(content, Mapping):
        return None, []
    for key in (*AVERAGED, *WRAPPED):
        tensors, places = _unwrapped(content.get(key))
        if tensors is not None:
            return tensors, [key, *places]
    found = {str(key): t for key, t in content.items() if isinstance(t, Tensor)}
    return found if any(t.dim() > 0 for t in found.values()) else None, []


def _labels_in(path: Path, content: Any) -> tuple[str, ...] | None:
    """Names of the classes that a checkpoint states, itself or among its hyper-parameters."""
    if not isinstance(content, Mapping):
        return None
    inner = (content.get(key) for key in ("hyper_parameters", "args", "meta", "config"))
    for part in (content, *(vars(i) if isinstance(i, argparse.Namespace) else i for i in inner)):
        stated = {key: as_labels(part.get(key)) for key in NAMES} if isinstance(part, Mapping) else {}
        named = {key: labels for key, labels in stated.items() if labels is not None}
        if len(set(named.values())) > 1:
            said = "; ".join(f"{key}: {', '.join(labels[:3])}, …" for key, labels in named.items())
            raise WeightsError(f"{path} names its classes in ways that disagree ({said}). Give them by --labels FILE.")
        if named:
            return next(iter(named.values()))
    return None


def as_labels(value: Any) -> tuple[str, ...] | None:
    """Class names in order: a list, or a dictionary from names to numbers or from numbers to names."""
    if isinstance(value, Mapping) and value:
        if all(isinstance(v, int) for v in value.values()):
            value = {v: k for k, v in value.items()}
        try:
            numbered = {int(k): v for k, v in value.items()}
        except (TypeError, ValueError):
            return None
        value = [numbered.get(i) for i in range(len(numbered))]
    if isinstance(value, list | tuple) and len(value) > 1 and all(isinstance(v, str) for v in value):
        return tuple(value)
    return None


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names from a file, in the order of the network's outputs: one a line, or JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from None
    try:
        labels = as_labels(json.loads(text))
    except ValueError:
        labels = as_labels([line.strip() for line in text.splitlines() if line.strip()])
    if labels is None or len(set(labels)) < len(labels):
        raise WeightsError(
            f"{path} has no names of classes, or one twice; expected one a line in the order of the network's outputs, "
            "or JSON: a list, or an object with the number of each name."
        )
    return labels


def fitting_names(weights: Weights, names: Sequence[str]) -> Weights:
    """With the prefix (`module.`, `model.`, `_orig_mod.`, …) removed under which most names are the network's."""
    wanted = set(names)
    counts = {"": len(wanted & weights.tensors.keys())}
    for key in weights.tensors:
        parts = key.split(".")
        for n in range(1, min(len(parts), 4)):
            if ".".join(parts[n:]) in wanted:
                prefix = ".".join(parts[:n]) + "."
                counts[prefix] = counts.get(prefix, 0) + 1
    prefix = max(counts, key=lambda p: (counts[p], -len(p)))
    kept = {key[len(prefix) :]: t for key, t in weights.tensors.items() if key.startswith(prefix)}
    remarks = list(weights.remarks)
    if prefix:
        left = len(weights.tensors) - len(kept)
        others = f"; {left} tensors without it are not the network's" if left else ""
        remarks.append(f"{weights.path.name}: the names begin with {prefix!r}, which is left out{others}")
    beside = [key for key in kept if key not in wanted and key.startswith(BESIDE)]
    if beside:
        remarks.append(f"{weights.path.name}: {_some(beside)} are used in training only, and left out")
    return replace(weights, tensors={k: t for k, t in kept.items() if k not in beside}, remarks=tuple(remarks))


def fill(net: nn.Module, weights: Weights, name: str) -> None:
    """Load the weights, all of them and nothing else, or say on both sides what does not fit."""
    state = net.state_dict()
    tensors = weights.tensors
    missing = [key for key in state if key not in tensors and not key.endswith("num_batches_tracked")]
    beyond = [key for key in tensors if key not in state]
    if missing or beyond:
        raise WeightsError(_advice(weights, state, missing, beyond, name))
    for key, tensor in tensors.items():
        if tensor.shape != state[key].shape:
            raise WeightsError(
                f"{weights.path} has {key} of shape {tuple(tensor.shape)}, but {name} {tuple(state[key].shape)}: it is "
                "another network, or was built with other arguments (input size, width, classes)."
            )
        if not tensor.is_floating_point() and state[key].is_floating_point():
            raise WeightsError(f"{weights.path} has {key} as {tensor.dtype}; expected floats, not a quantised network.")
        if not tensor.isfinite().all():
            raise WeightsError(f"{weights.path} has NaN or infinity in {key}: the training that wrote it diverged.")
    net.load_state_dict(dict(tensors), strict=False)


def _advice(
    weights: Weights, state: Mapping[str, Tensor], missing: Sequence[str], beyond: Sequence[str], name: str
) -> str:
    said = f"{weights.path} does not fit {name}:"
    if len(missing) == len(state):
        return f"{said} none of its names is the network's; it has {_some(beyond)}, the network {_some(missing)}."
    theirs, ours = (_with_shapes(keys, of) for keys, of in ((beyond, weights.tensors), (missing, state)))
    said = f"{said} it has {theirs}, where the network has {ours}."
    own = {key.rpartition(".")[0] for key in missing}
    head = {key.rpartition(".")[0] for key in beyond}
    if len(own) == len(head) == 1:
        (old,), (new,) = head, own
        weight = weights.tensors.get(f"{old}.weight")
        of = "nn.Linear" if weight is None else f"nn.Linear({', '.join(map(str, reversed(weight.shape)))})"
        return (
            f"{said} The head was replaced. If it is nn.Sequential(nn.Dropout(), {of}), which predicts as {of} does: "
            f"--rename {old}={new}. Otherwise name a function that builds your network: --network "
            "package.module:function."
        )
    return f"{said} Name the network that they were saved from, or a function that builds it: --network NAME."


def _with_shapes(keys: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
    return ", ".join(f"{key} {tuple(tensors[key].shape)}" for key in keys[:MOST_NAMED]) + more if keys else "nothing"


def _some(keys: Any) -> str:
    every = list(keys)
    return ", ".join(every[:MOST_NAMED]) + (f" and {len(every) - MOST_NAMED} more" if len(every) > MOST_NAMED else "")
