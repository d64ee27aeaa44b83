"""What every process of `tests/forked.py` has imported before it is forked."""

import atexit
import gc
from importlib import import_module

gc.disable()  # until all is imported
for name in (
    "dubito.cli",
    "dubito.service.run",
    "dubito.training.recipe",
    "torch._dynamo",  # torch's optimisers import its compiler at their first use
    # what uvicorn, fastapi and typer import as a command runs
    "pydantic.v1",
    "rich.progress",
    "uvicorn.loops.auto",
    "uvicorn.protocols.websockets.auto",
    "tests.forked",
):
    import_module(name)
gc.enable()
gc.collect()
gc.freeze()  # the processes' collectors of garbage need not look at all of this
atexit.register(gc.unfreeze)
