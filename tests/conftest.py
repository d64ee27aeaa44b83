"""Runs before any test imports torch."""

import atexit
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main

# what is cached (plans, fonts of plots) stays out of the home folder
CACHE = Path(tempfile.gettempdir()) / f"dubito-tests-{os.getuid()}"
CACHE.mkdir(exist_ok=True)  # torch warns where there is none
os.environ["XDG_CACHE_HOME"] = str(CACHE)
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores: one thread each, in their subprocesses too
    os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # until all is imported
pytest.MonkeyPatch().setattr(typer.main, "get_command", cache(typer.main.get_command))  # else built for each command
# else each client reads all certificates of the machine, which takes 0.09 s
pytest.MonkeyPatch().setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))

FIRST = ("test_readme.py", "service", "training", "deploy", "models")  # longest first: none is left with one at the end
LONGEST = ("deploy/test_image.py", "deploy/test_ray.py")  # of the slow ones: minutes each
EXPORT = ("/test_edge", "service/test_pictures.py", "models/test_contract.py", "models/test_random_features.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take file after file in this order."""
    ranks = {name: rank for rank, name in enumerate(FIRST)}

    def rank(item: pytest.Item) -> tuple[bool, int]:
        late = not (item.get_closest_marker("slow") and any(name in item.nodeid for name in LONGEST))
        return late, ranks.get(item.nodeid.split("/")[1].partition("::")[0], len(FIRST))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files go to workers whole. Those that export networks go to one: the first export of a process takes seconds, and
    equal networks are traced once (`quick_exports`)."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    def scope(nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "exports" if any(name in file for name in EXPORT) else file

    scheduler: object = LoadFileScheduling(config, log)
    scheduler._split_scope = scope  # type: ignore[attr-defined]
    return scheduler


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from a process that has imported all tests; they share the one that commands are forked from.

    Each would take ten seconds of processor time to import the tests, and five more for the commands.
    """
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:  # some tests alone
        return
    from tests import forked
    from tests.forking import PYTHON, Server, write_script

    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it as it is imported
    workers = Server("tests.collected")
    os.environ[forked.ADDRESS] = forked.server().address
    python = Path(workers.folder.name) / "python"
    write_script(python, workers.address, PYTHON)
    for spec in specs:
        spec.python = str(python)


def pytest_collection_finish() -> None:
    """What was imported stays: the collector of garbage need not look at it again and again, nor often at the rest.

    To loggers whose records do not reach the root logger, pytest adds a handler before each test and removes it after.
    torch has sixty such.
    """
    for logger in [*logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind counts what is left then
    gc.set_threshold(100_000, 50, 100)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Draws that name no seed do not depend on the tests before. `TEST_SEED=7 make test` tries other ones.

    Without `torch.manual_seed`, which writes down the stack for a GPU that is not in use yet.
    """
    if (torch := sys.modules.get("torch")) is not None:
        seed = int(os.environ.get("TEST_SEED", "0"))
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.fixture(scope="session")
def quick_exports() -> Iterator[None]:
    """In this process, from here on."""
    from tests import exports

    with exports.quick_exports():
        yield


@pytest.fixture(scope="session")
def small_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes and answers what the embedded digits do, by a network so small that a server of it starts in half the time:
    for tests that ask nothing about its predictions."""
    return _digits(tmp_path_factory, "mlp", inputs=64, hidden=[8], outputs=10)


@pytest.fixture(scope="session")
def convolved_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `small_digits`, with a convolution among its layers."""
    return _digits(tmp_path_factory, "convnet", size=8, stages=[4], hidden=8)


def _digits(folders: pytest.TempPathFactory, architecture: str, **arguments: Any) -> Path:
    import torch

    from dubito.models import bayesianize, build, load, save
    from dubito.models.embedded import embedded

    path = folders.mktemp(architecture) / "digits.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = bayesianize(build(architecture, **arguments), "ffg-u", inducing=4)
    save(network, path, card=load(embedded("digits")).card)
    return path
