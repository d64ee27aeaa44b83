"""Seeds for all that is random in a training run: each purpose and each step has a stream of its own."""

import hashlib

import torch


def stream(seed: int, purpose: str, *place: int) -> int:
    """A seed below 2⁶³. Hashed, because torch heeds the low 32 bits alone where it draws on a CPU."""
    told = " ".join(map(str, (seed, purpose, *place)))
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little") >> 1


def sow(seed: int, device: torch.device) -> None:
    """Seed torch's own generators; `torch.manual_seed` would queue a call for every kind of device that is absent."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
