"""How a tensor is kept in a file: full or half precision, int8 with a scale per row, pruned as values and bits."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dubito.models.errors import ArtifactError
from dubito.models.manifest import Precision

HALF: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

MEMBERS = ".points.value"  # what a state calls an ensemble's matrices
SCALE, MASK = "#scale", "#mask"  # suffixes of the tensors that stand beside another one


def encode(
    name: str, tensor: Tensor, keep: Tensor | None, precision: Precision, *, infinite: bool = False
) -> dict[str, Tensor]:
    """The tensors that stand for this one in the file; with `infinite`, it may hold ±infinity, as a mask does."""
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return {name: _copied(tensor)}
    tensor = tensor.float()
    finite = bool(tensor.isfinite().all())
    if not finite and (not infinite or tensor.isnan().any()):
        raise ArtifactError(f"tensor {name!r} holds {_wrong(infinite)}, so nothing was saved; the training diverged.")
    stored: dict[str, Tensor] = {}
    if precision == "int8" and tensor.dim() >= 2 and finite:
        scale = _rows(name, tensor).abs().amax(1) / 127
        step = torch.where(scale > 0, scale, 1.0)
        values = (_rows(name, tensor) / step[:, None]).round().to(torch.int8).view(tensor.shape)
        stored[name + SCALE] = scale
    elif precision == "float32":
        values = tensor
    else:  # what an int8 artifact holds beside matrices is kept in half precision: scales and the like
        values = _halved(tensor, HALF.get(precision, torch.float16))
    if keep is not None:
        stored[name + MASK] = pack(keep.cpu())
        values = values[keep.cpu()]
    stored[name] = _copied(values)
    return stored


def _wrong(infinite: bool) -> str:
    return "NaN" if infinite else "NaN or infinity"


def _copied(tensor: Tensor) -> Tensor:
    """On its own: two tensors of a file may not share memory."""
    return tensor.clone(memory_format=torch.contiguous_format)


def decode(
    name: str, shape: torch.Size, stored: Mapping[str, Tensor], *, infinite: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The tensor of that shape in float32, and its mask where it was pruned; every claim is checked before its use.

    With `infinite`, it may hold ±infinity.
    """
    if name not in stored:
        raise ArtifactError(_missing(name))
    values, scale, mask = stored[name], stored.get(name + SCALE), stored.get(name + MASK)
    if values.dtype not in (*FLOATS, torch.int8) or (values.dtype == torch.int8) != (scale is not None):
        raise ArtifactError(f"tensor {name!r} is stored as {values.dtype}, which no artifact of this format uses so.")
    keep = None
    if mask is None:
        if values.shape != shape:
            raise ArtifactError(_mismatch(name, values.shape, shape))
    else:
        keep = unpack(name, mask, shape)
        if values.dim() != 1 or len(values) != int(keep.sum()):
            raise ArtifactError(_mismatch(name, values.shape, torch.Size([int(keep.sum())])))
        dense = torch.zeros(shape, dtype=values.dtype)
        dense[keep] = values
        values = dense
    tensor = values.float()
    if scale is not None:
        rows = 0 if len(shape) < 2 else len(_rows(name, torch.empty(shape, device="meta")))
        if scale.dtype != torch.float32 or scale.shape != (rows,):
            raise ArtifactError(_mismatch(name + SCALE, scale.shape, torch.Size([rows])))
        tensor = (_rows(name, tensor) * scale[:, None]).view(shape)
    if tensor.isnan().any() if infinite else not tensor.isfinite().all():
        raise ArtifactError(f"tensor {name!r} holds {_wrong(infinite)}; the file is damaged or the training diverged.")
    return tensor, keep


def decode_whole(name: str, expected: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    """A tensor of whole numbers or flags, stored as it is."""
    if name not in stored:
        raise ArtifactError(_missing(name))
    if stored[name].shape != expected.shape or stored[name].dtype != expected.dtype:
        raise ArtifactError(_mismatch(name, stored[name].shape, expected.shape))
    return stored[name]


def _missing(name: str) -> str:
    return f"tensor {name!r} is missing; the file was made for another network, or cut."


def _rows(name: str, tensor: Tensor) -> Tensor:
    """What shares a scale: a row of a matrix, a row of each member's matrix, an output channel of a kernel."""
    return tensor.flatten(0, 1) if name.endswith(MEMBERS) and tensor.dim() == 3 else tensor.flatten(1)


def _halved(tensor: Tensor, half: torch.dtype) -> Tensor:
    """In half precision, unless an entry would overflow or sink into the subnormal numbers."""
    if torch.equal(tensor.to(half).float(), tensor):
        return tensor.to(half)
    info = torch.finfo(half)
    size = tensor.abs()
    fits = (size <= info.max) & ((size >= info.tiny) | (size == 0))
    lost = tensor[~fits].abs().amax() if not bool(fits.all()) else None
    # entries that sink are harmless where they are tiny beside the tensor's largest one
    harmless = lost is None or (bool(lost < info.tiny) and bool(size.amax() > 2**11 * lost))
    return tensor.to(half) if harmless else tensor


def pack(mask: Tensor) -> Tensor:
    """Eight flags a byte, the first in the lowest bit."""
    flags = mask.flatten().to(torch.uint8)
    flags = torch.nn.functional.pad(flags, (0, -len(flags) % 8)).view(-1, 8)
    return (flags << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack(name: str, packed: Tensor, shape: torch.Size) -> Tensor:
    n = shape.numel()
    if packed.dtype != torch.uint8 or packed.shape != ((n + 7) // 8,):
        raise ArtifactError(_mismatch(name + MASK, packed.shape, torch.Size([(n + 7) // 8])))
    flags = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return flags.flatten()[:n].bool().view(shape)


def _mismatch(name: str, came: torch.Size, expected: torch.Size) -> str:
    return (
        f"tensor {name!r} has shape {tuple(came)}, but the manifest makes it {tuple(expected)}. "
        "The tensors and the manifest come from different runs: save both again with `dubito.models.save`."
    )
