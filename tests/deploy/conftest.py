"""A real server, and the page of our own that asks the dashboard's queries."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.service.conftest import Starter

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module", autouse=True)
def where_needed(request: pytest.FixtureRequest) -> None:
    """Other files need not import torch's exporter."""
    if request.path.name.startswith("test_edge"):
        request.getfixturevalue("quick_exports")


@pytest.fixture(scope="session")
def url(small_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `dubito serve` with digits."""
    starter = Starter(tmp_path_factory.mktemp("served"))
    yield starter(small_digits).url
    starter.close()


@pytest.fixture(scope="session")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", DEPLOY.parent / "docs" / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["picture"] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module
