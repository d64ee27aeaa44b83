"""A real server, and the page of our own that asks the dashboard's queries."""

import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from dubito.models.embedded import embedded
from tests.service.conftest import Starter

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="session", autouse=True)
def operators_read_once() -> Iterator[None]:
    """torch's exporter reads its library of operators anew for each export, which takes most of an export's time."""
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        patch.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))
        yield


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `dubito serve` with the embedded digits."""
    starter = Starter(tmp_path_factory.mktemp("served"))
    yield starter(embedded("digits")).url
    starter.close()


@pytest.fixture(scope="session")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", DEPLOY / "grafana" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["picture"] = module  # where its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module
