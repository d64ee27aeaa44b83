"""Exports that take less time: most of the seconds of an export are torch's, and many tests export the same network."""

import __future__

import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import Tensor
    from torch.nn import Module


@contextmanager
def quick_exports() -> Iterator[None]:
    """Networks of the same layers are traced once; torch's exporter reads its library of operators once. Sessions have
    one thread: to start the others takes half as long again as to read a small graph."""
    import onnxruntime
    from torch._export import utils
    from torch._ops import OperatorBase
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    from dubito.deploy.edge import linear, trace

    with pytest.MonkeyPatch.context() as patch:
        once = traced_once(trace.by_torch)
        patch.setattr(trace, "by_torch", once)
        patch.setattr(linear, "by_torch", once)
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        patch.setattr(utils, "_materialize_cpp_cia_ops", cache(utils._materialize_cpp_cia_ops))
        patch.setattr(OperatorBase, "py_impl", without_annotations(OperatorBase.py_impl))
        patch.setattr(onnxruntime, "InferenceSession", with_one_thread(onnxruntime.InferenceSession))
        yield


def traced_once(by_torch: Callable[..., "ModelProto"]) -> Callable[..., "ModelProto"]:
    """A trace depends on the modules, their names and values, and the input's shape: equal ones get equal copies."""
    found: dict[object, ModelProto] = {}

    def by_torch_once(
        net: "Module", shape: tuple[int, ...], weights: "list[Tensor] | None" = None, names: Sequence[str] = ()
    ) -> "ModelProto":
        modules = [
            (path, type(m), repr(m), getattr(m, "name", None), getattr(m, "geometry", None))
            for path, m in net.named_modules(remove_duplicate=False)
        ]
        # weights that are given are inputs of the graph: their values do not matter
        tensors = [*net.buffers(), *(net.parameters() if weights is None else ())]
        key = (*modules, *(tensor.detach().numpy().tobytes() for tensor in tensors), shape, *names)
        if key not in found:
            found[key] = by_torch(net, shape, weights, names)
        return copy.deepcopy(found[key])

    return by_torch_once


def with_one_thread(session: Callable[..., Any]) -> Callable[..., Any]:
    """Where no number of threads is asked for."""
    from onnxruntime import SessionOptions

    def opened(content: object, options: SessionOptions | None = None, **more: Any) -> Any:
        options = SessionOptions() if options is None else options
        options.intra_op_num_threads = options.intra_op_num_threads or 1
        return session(content, options, **more)

    return opened


def without_annotations(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same source, whose annotations are not evaluated: torch calls it 10,000 times an export."""
    assert isinstance(method, FunctionType)
    source = textwrap.dedent(inspect.getsource(method))
    names: dict[str, Callable[..., Any]] = {}
    code = compile(source, method.__code__.co_filename, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, method.__globals__, names)
    return names[method.__name__]
