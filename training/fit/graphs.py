"""A training step captured once as a CUDA graph and replayed: the host then launches one thing instead of thousands."""

from collections.abc import Callable

import torch
from torch import Tensor

WARM = 3  # steps run as they are before a capture, so that libraries and the optimiser have made what they need


class Graphs:
    """Runs `update(x, y, weights)`; batches of the first shape that comes are captured, any other runs as it is."""

    def __init__(self, update: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        self.update = update
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: tuple[Tensor, ...] = ()  # what the captured step reads
        self.warm = 0

    def run(self, *arguments: Tensor) -> None:
        if not self.held:
            self.held = tuple(t.clone() for t in arguments)
        if [t.shape for t in arguments] != [t.shape for t in self.held]:
            self.update(*arguments)
            return
        for held, new in zip(self.held, arguments, strict=True):
            held.copy_(new)
        if self.warm < WARM:
            self.warm += 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.update(*self.held)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):  # which records and does not run
                self.update(*self.held)
        self.graph.replay()
