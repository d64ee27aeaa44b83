"""A real server, and the page of our own that asks the dashboard's queries."""

import __future__

import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from dubito.models.embedded import embedded
from tests.service.conftest import Starter

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="session", autouse=True)
def operators_read_once() -> Iterator[None]:
    """torch's exporter reads its library of operators anew for each export, which takes most of an export's time."""
    from torch._export import utils
    from torch._ops import OperatorBase
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        patch.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))
        patch.setattr(OperatorBase, "py_impl", without_annotations(OperatorBase.py_impl))
        yield


def without_annotations(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same source, whose annotations are not evaluated: torch calls it 10,000 times an export."""
    assert isinstance(method, FunctionType)
    source = textwrap.dedent(inspect.getsource(method))
    names: dict[str, Callable[..., Any]] = {}
    code = compile(source, method.__code__.co_filename, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, method.__globals__, names)
    return names[method.__name__]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of `dubito serve` with the embedded digits."""
    starter = Starter(tmp_path_factory.mktemp("served"))
    yield starter(embedded("digits")).url
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
