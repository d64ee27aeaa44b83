"""Matrices of a layer's size are decomposed by one thread of the CPU.

Several threads of a LAPACK routine meet after every few microseconds of work. Where something else runs on a core, each
meeting waits for the scheduler: two threads then take ten times as long as one, sixteen take minutes. One thread also
gives the same bits on a machine with any number of cores.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")
_making = threading.Lock()
_single: ThreadPoolExecutor | None = None
_inside = threading.local()


def by_one_thread(compute: Callable[P, T]) -> Callable[P, T]:
    """A function of tensors, computed by one thread where all of them are on the CPU."""

    @wraps(compute)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if getattr(_inside, "now", False) or any(t.device.type != "cpu" for t in given):
            return compute(*args, **kwargs)
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                return compute(*args, **kwargs)

        return _executor().submit(run).result()

    return alone


def _executor() -> ThreadPoolExecutor:
    """torch keeps the number of threads for each thread that asks; one that is new takes the number set last."""
    global _single
    with _making:
        if _single is None:
            usual = torch.get_num_threads()
            _single = ThreadPoolExecutor(1, "decompositions", _begin)
            _single.submit(torch.get_num_threads).result()
            torch.set_num_threads(usual)
        return _single


def _begin() -> None:
    _inside.now = True
    torch.set_num_threads(1)


def _forget() -> None:
    """A forked process has no threads but the one that forked."""
    global _single, _making
    _single, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
