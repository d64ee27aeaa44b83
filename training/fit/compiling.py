"""torch.compile for a training step."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

log = logging.getLogger("dubito")
P = ParamSpec("P")
R = TypeVar("R")


def compiled(step: Callable[P, R]) -> Callable[P, R]:
    """The compiled step, with the same draws as without; the step itself, with a warning, if torch cannot compile it.

    Compiled as one graph only: with graph breaks, torch reuses a piece compiled for one layer in another.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes seconds to load

    run: Callable[P, R] = torch.compile(step, fullgraph=True, options={"fallback_random": True})

    def once(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal run
        try:
            return run(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            why = str(error).strip().partition("\n")[0][:200]
            log.warning("fit.compile is left out, since torch cannot compile this network's step: %s", why)
            run = step
            return run(*args, **kwargs)

    return once
