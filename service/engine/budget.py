"""The memory of a device: what models keep there, what a pass takes, and so which passes fit.

A pass of K samples of B inputs takes at a moment t about K (s_t + B a_t): weights, and activations. Its peak is the
largest of these, so it is convex in B: between two sizes that were measured, a straight line never says too little, and
beyond the largest neither does a line from zero. Measured is what the allocator hands out, on a CPU what the operators
make; workspaces inside a CPU's operators are not seen.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHARE = 0.8  # of a GPU's memory, where nobody says
TRIED = 2  # samples of a pass that is measured: with one, dense weights are never laid out side by side
KINDS = ("resident", "draws", "bank", "plans")


class Budget:
    """Of one device, shared by the models on it."""

    def __init__(self, limit: int | None) -> None:
        """None: as much as there is."""
        self.limit = limit
        self.shares: list[Share] = []

    @classmethod
    def of(cls, asked: int, device: torch.device) -> "Budget":
        if asked:
            return cls(asked)
        if device.type == "cuda":
            return cls(int(SHARE * torch.cuda.get_device_properties(device).total_memory))
        return cls(None)

    def share(self) -> "Share":
        self.shares.append(Share(self))
        return self.shares[-1]

    def release(self, share: "Share") -> None:
        self.shares.remove(share)
        share.kinds.clear()  # which know the model: a circle would keep it

    def held(self, kind: str) -> int:
        return sum(share.kinds[kind]() for share in list(self.shares) if kind in share.kinds)

    @property
    def left(self) -> int:
        """For a pass and its draws: there is one at a time."""
        assert self.limit is not None
        return self.limit - sum(self.held(kind) for kind in KINDS if kind != "draws")


class Share:
    """One model's part: what it holds of each kind, and what its passes take."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.kinds: dict[str, Callable[[], int]] = {}
        self.peaks: dict[int, int] = {}  # inputs of a pass of `TRIED` samples -> bytes
        self.sample = 0  # bytes of one sample's draws: a pass in several blocks keeps those of all layers

    @property
    def limited(self) -> bool:
        return self.budget.limit is not None

    def measured(self, B: int, peak: int) -> None:
        self.peaks[B] = max(peak, self.peaks.get(B, 0))

    def need(self, B: int, K: int) -> float:
        """Bytes of a pass, its draws among them; 0 where nothing was measured."""
        return max(K, TRIED) / TRIED * self._peak(B) + K * self.sample

    def fits(self, B: int, K: int) -> bool:
        return not self.limited or self.need(B, K) <= self.budget.left

    def _peak(self, B: int) -> float:
        sizes = sorted(self.peaks)
        if not sizes:
            return 0.0
        at = bisect_left(sizes, B)
        if at == len(sizes):
            return self.peaks[sizes[-1]] * B / sizes[-1]
        if at == 0 or sizes[at] == B:
            return self.peaks[sizes[at]]
        low, high = sizes[at - 1], sizes[at]
        share = (B - low) / (high - low)
        return (1 - share) * self.peaks[low] + share * self.peaks[high]


def peak_of(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that tensors made by `run` take at a time."""
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
    """Follows each storage that an operator makes until it is gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to keep the compiler out of here torch would import it, which takes seconds, and nothing is compiled."""
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
