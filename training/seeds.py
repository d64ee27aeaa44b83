"""Seeds of a training run: each purpose and each step has a random stream of its own."""

import hashlib

import torch


def stream(seed: int, purpose: str, *place: int) -> int:
    """A seed below 2⁶³. Hashed, because torch uses only the low 32 bits of a seed on a CPU."""
    key = " ".join(map(str, (seed, purpose, *place)))
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def sow(seed: int, device: torch.device) -> None:
    """Seed torch's global generators; `torch.manual_seed` would also queue a call for each absent kind of device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
