"""What every process of `tests/forked.py` has imported before it is forked."""

import gc
import sys
from functools import cache
from importlib import import_module

import typer.main

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
    "tests.forking",
):
    import_module(name)
import_module("dubito.models.posteriors.dictionary").entry_classes()  # each is imported at its first use
OURS = frozenset(sys.modules)  # what dubito imports before it knows of any address
import_module("s3fs")  # and with it fsspec and aiohttp, which every address of the web takes
import_module("huggingface_hub.hf_file_system")
for name in [*sys.modules]:
    if name.partition(".")[0] == "huggingface_hub":  # it reads the environment as it is imported; what it needs stays
        del sys.modules[name]
import_module("tests.few")  # and with it pytest
import_module("pyarrow.compute")  # which pyarrow imports at its first use
typer.main.get_command = cache(typer.main.get_command)  # else built for each command
typer.main.get_command(import_module("dubito.cli").app)
gc.enable()
gc.collect()
gc.freeze()  # the processes' collectors of garbage need not look at all of this
