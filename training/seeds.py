"""Seeds for all that is random in a training run: each purpose and each step has a stream of its own."""

import hashlib


def stream(seed: int, purpose: str, *place: int) -> int:
    """A seed below 2⁶³. Hashed, because torch heeds the low 32 bits alone where it draws on a CPU."""
    told = " ".join(map(str, (seed, purpose, *place)))
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "little") >> 1
