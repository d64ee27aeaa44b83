"""Runs before any test imports torch."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

# what is cached (plans, fonts of plots) stays out of the home folder
CACHE = Path(tempfile.gettempdir()) / f"dubito-tests-{os.getuid()}"
CACHE.mkdir(exist_ok=True)  # torch warns where there is none
os.environ["XDG_CACHE_HOME"] = str(CACHE)
if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores: one thread each, in their subprocesses too
    os.environ["OMP_NUM_THREADS"] = "1"


FIRST = ("test_readme.py", "service", "training", "deploy", "models")  # longest first: none is left with one at the end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take file after file in this order."""
    ranks = {name: rank for rank, name in enumerate(FIRST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.split("/")[1].partition("::")[0], len(FIRST)))


def pytest_collection_finish() -> None:
    """What was imported stays: the collector of garbage need not look at it again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Draws that name no seed do not depend on the tests before. `TEST_SEED=7 make test` tries other ones."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int(os.environ.get("TEST_SEED", "0")))
