"""A training step as a CUDA graph: the host launches one graph instead of thousands of kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from dubito.models.errors import DubitoError

WARM = 3  # steps without a graph before the capture, in which libraries and the optimiser allocate their buffers


class GraphError(DubitoError):
    """A step that cannot be captured."""


class StepGraph:
    """Runs `update(x, y, weights, …)`, as a graph for batches of the shape that comes first, directly for others."""

    def __init__(self, update: Callable[..., None]) -> None:
        self.update = update
        self.stream = torch.cuda.Stream()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: tuple[Tensor, ...] = ()  # arguments of the graph
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
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=self.stream):  # records the step without running it
                    self.update(*self.held)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # torch's generator is not usable after that
                said = str(error).strip().partition("\n")[0]
                raise GraphError(
                    f"a step cannot be captured as a CUDA graph ({said}). Set fit.graph to false."
                ) from None
            self.graph = graph
        self.graph.replay()
