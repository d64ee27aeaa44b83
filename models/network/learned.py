"""What passes have shown about one network: held by the network itself, learned anew by each copy of it."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, RLock
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class Learned:
    """Shared by all threads that use the network. A copy of the network has an empty one: its layers may differ."""

    folds: bool = True  # draws can share a pass: False once a pass mixed up rows of the batch
    folded: set[tuple[int, ...]] = field(default_factory=set)  # shapes of inputs whose folded passes were checked
    apart: set[tuple[int, ...]] = field(default_factory=set)  # shapes of an input whose draws were seen to stay apart
    channels_last: bool = True  # feature maps may lie so in memory: False once a `view` failed
    inputs: tuple[int, ...] | None = None  # shape of one, of the last pass
    outputs: int | None = None  # C, of a linearised network
    batched: bool = True  # forward-mode products of several draws can share a pass (`vmap`)
    elsewhere: set[str] = field(default_factory=set)  # parameters used outside the layers that hold them
    taped: set[Hashable] = field(default_factory=set)  # shapes and parameters whose Jacobian was checked
    changing: Any = field(default_factory=RLock)  # held by a pass that swaps the network's weights or hooks its layers
    trained: bool = True  # False once `never_train` was called: modes and noise no longer change
    noise: tuple[Tensor, Tensor | None] | None = None  # σ and gain of a regression on the host, set by `never_train`
    _users: int = 0  # threads inside `evaluating`
    _training: list[nn.Module] = field(default_factory=list)  # modules that the last of them puts back into training
    _mode: Any = field(default_factory=Lock)

    def __reduce__(self) -> tuple[type["Learned"], tuple[()]]:
        """For `copy.deepcopy`: an empty value."""
        return Learned, ()

    @contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[None]:
        """The module in evaluation mode; the last thread to leave restores the mode of each part."""
        if not self.trained:
            yield
            return
        with self._mode:
            if self._users == 0 and (training := [m for m in module.modules() if m.training]):
                self._training = training
                module.eval()
            self._users += 1
        try:
            yield
        finally:
            with self._mode:
                self._users -= 1
                if self._users == 0:
                    for part in self._training:
                        part.training = True
                    self._training = []
