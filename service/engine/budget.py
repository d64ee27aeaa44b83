"""The memory of a device: what models keep there, what a pass needs, and so which passes fit.

At time t, a pass of K draws and B inputs needs about K (s_t + B a_t): weights and activations. Its peak over t is
convex in B, so linear interpolation between two measured sizes never underestimates it, nor does a line from zero
beyond the largest one. On a GPU the allocator is measured, on a CPU the outputs of operators (not the workspaces
inside them).
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHARE = 0.8  # of a GPU's memory, by default
TRIED = 2  # draws of a measured pass: with one, dense weights would never be stacked
KINDS = ("resident", "draws", "bank", "plans")


class Budget:
    """The memory of one device, shared by the models on it."""

    def __init__(self, limit: int | None) -> None:
        """`limit` in bytes; None: no limit."""
        self.limit = limit
        self.shares: list[MemoryShare] = []

    @classmethod
    def of(cls, limit: int, device: torch.device) -> "Budget":
        """`limit` 0: a share of a GPU's memory, no limit on a CPU."""
        if limit:
            return cls(limit)
        if device.type == "cuda":
            return cls(int(SHARE * torch.cuda.get_device_properties(device).total_memory))
        return cls(None)

    def share(self) -> "MemoryShare":
        self.shares.append(MemoryShare(self))
        return self.shares[-1]

    def release(self, share: "MemoryShare") -> None:
        self.shares.remove(share)
        share.kinds.clear()  # they refer to the model: the cycle would keep it in memory

    def held(self, kind: str) -> int:
        sizes = [share.kinds.get(kind) for share in list(self.shares)]  # another thread may release one meanwhile
        return sum(size() for size in sizes if size is not None)

    @property
    def left(self) -> int:
        """Bytes left for a pass and its draws; only one pass runs at a time."""
        assert self.limit is not None
        return self.limit - sum(self.held(kind) for kind in KINDS if kind != "draws")


class MemoryShare:
    """One model's part: the bytes it holds by kind, and the bytes its passes need."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.kinds: dict[str, Callable[[], int]] = {}
        self.peaks: dict[int, int] = {}  # inputs of a pass of `TRIED` draws -> bytes
        self.sample = 0  # bytes of one draw of all layers, which a pass in several blocks keeps

    @property
    def limited(self) -> bool:
        return self.budget.limit is not None

    def measured(self, B: int, peak: int) -> None:
        self.peaks[B] = max(peak, self.peaks.get(B, 0))

    def need(self, B: int, K: int) -> float:
        """Bytes of a pass with its draws; 0 where nothing was measured."""
        return max(K, TRIED) / TRIED * self._peak(B) + K * self.sample

    def fits(self, B: int, K: int) -> bool:
        return not self.limited or self.need(B, K) <= self.budget.left

    def _peak(self, B: int) -> float:
        sizes = sorted(self.peaks)
        if not sizes:
            return 0.0
        i = bisect_left(sizes, B)
        if i == len(sizes):
            return self.peaks[sizes[-1]] * B / sizes[-1]
        if i == 0 or sizes[i] == B:
            return self.peaks[sizes[i]]
        low, high = sizes[i - 1], sizes[i]
        share = (B - low) / (high - low)
        return (1 - share) * self.peaks[low] + share * self.peaks[high]


def peak_of(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes of the tensors that `run` creates."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    living = _Living()
    with living:
        run()
    return living.peak


class _Living(TorchDispatchMode):
    """Tracks the storages that operators create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports its compiler, which takes seconds, and nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        self.living = {key: one for key, one in self.living.items() if not one[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self.living[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.living.values()))
        return out
