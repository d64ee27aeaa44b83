"""The device and the dtype in which models run."""

import torch

from dubito.models.errors import DubitoError, NumericsError
from dubito.models.numerics.proof import fault_of, name_of

BF16 = (8, 0)  # compute capability from which a GPU has it natively


def device_of(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise DubitoError("the device is cuda, but torch finds no GPU here; take --device cpu or auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype of activations, and the reason for it."""
    if name != "auto":
        return getattr(torch, name), "the settings say so"
    if device.type != "cuda":
        return torch.float32, "models run on the CPU" if torch.cuda.is_available() else "there is no GPU here"
    if torch.cuda.get_device_capability(device) < BF16:
        return torch.float32, f"{torch.cuda.get_device_name(device)} has no bfloat16 of its own"
    return torch.bfloat16, "the GPU has it"


def trusted(dtype: torch.dtype, device: torch.device) -> tuple[torch.dtype, str | None]:
    """The dtype if the device computes right in it; else float32, and what was wrong."""
    if (wrong := fault_of(device, torch.float32)) is not None:
        raise NumericsError(
            f"this {device.type} computes wrongly even in float32 (torch {torch.__version__}): {wrong}. Nothing can be "
            "served from it: take another --device, machine or version of torch."
        )
    if (wrong := fault_of(device, dtype)) is None:
        return dtype, None
    return torch.float32, f"this {device.type} computes wrongly in {name_of(dtype)}: {wrong}"
