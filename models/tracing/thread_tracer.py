"""torch.fx beside other threads: while it traces a network, it replaces methods of nn.Module for the whole process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

_one_at_a_time = threading.RLock()  # the second of two would put back what the first has replaced


class ThreadTracer(fx.Tracer):
    """Records calls of its own thread alone; modules of other threads, which answer requests, run as ever."""

    _thread: int | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other thread traces meanwhile: around what is replaced for a trace besides."""
        with _one_at_a_time:
            before, self._thread = self._thread, threading.get_ident()
            try:
                yield
            finally:
                self._thread = before

    @property
    def records(self) -> bool:
        """Whether a call of this thread belongs to the trace."""
        return threading.get_ident() == self._thread

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with self.alone():
            return super().trace(root, concrete_args)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        if not self.records:
            return attr_val
        return self.attribute(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.records:
            return forward(*args, **kwargs)
        return self.module(m, forward, args, kwargs)

    def attribute(self, name: str, value: Any, known: Any) -> Any:
        """Of a module, as the traced code gets it."""
        return super().getattr(name, value, known)

    def module(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module called by the traced code answers with."""
        return super().call_module(module, forward, args, kwargs)
