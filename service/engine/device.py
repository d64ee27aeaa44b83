"""The devices and the dtype in which models run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dubito.models.errors import DubitoError, InputError, NumericsError
from dubito.models.numerics.proof import fault_of, name_of
from dubito.service.engine.budget import Budget
from dubito.service.engine.turn import Turn

BF16 = (8, 0)  # compute capability from which a GPU has it natively


@dataclass
class Device:
    """A device that models run on, the lock by which they take turns, and its memory."""

    name: str  # as the settings have it
    device: torch.device
    dtype: torch.dtype  # of activations
    budget: Budget
    turn: Turn = field(default_factory=Turn)
    proven: bool = True  # it computes right in the dtype asked for
    said: dict[str, str] = field(default_factory=dict)  # of it in the log


def devices_of(names: Sequence[str], option: str) -> list[str]:
    """`auto` is one device, `all` is every GPU; else a list such as cuda:0, cuda:1 or cpu, cpu."""
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if [*names] in (["auto"], ["all"]):
        return (gpus if [*names] == ["all"] else gpus[:1]) or ["cpu"]
    named = ["cuda:0" if name == "cuda" else name for name in names]
    for name in named:
        if name != "cpu" and name not in gpus:
            found = ", ".join(gpus) or "no GPU"
            raise InputError(f"{option} names {name!r}; expected cpu, auto, all or GPUs, and torch finds {found} here.")
    if len({name.partition(":")[0] for name in named}) > 1:
        came = ",".join(names)
        raise InputError(f"{option} is {came!r}; expected devices of one kind, whose answers agree to the bit.")
    return named


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
