"""A plug-in network that does what the first number of an input says, on purpose; found through an entry point."""

import time

import torch
from torch import Tensor, nn

FAILS, NO_MEMORY, LITTLE_MEMORY, DIES, SLOW = 13.0, 14.0, 15.0, 16.0, 17.0


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        codes = set(x[:, 0].tolist())
        if FAILS in codes:
            raise RuntimeError("a secret in /some/path")
        if NO_MEMORY in codes or (LITTLE_MEMORY in codes and len(x) > 4):
            raise torch.OutOfMemoryError("no memory")
        if DIES in codes:
            raise SystemExit
        if SLOW in codes:
            time.sleep(0.25)
        found: Tensor = self.linear(x)
        return found
