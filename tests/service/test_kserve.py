"""KServe's `InferenceRESTClient`, unchanged, against the live server: inference and its three health calls."""

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
import torch

from dubito.models import load
from dubito.models.embedded import embedded
from dubito.models.predictions.uncertainty import Classified
from tests.service.conftest import Live, fields_of

T = TypeVar("T")
X = np.random.default_rng(3).normal(size=(2, 1, 8, 8)).astype(np.float32)


@cache
def kserve() -> Any:
    """Imported where it is used, for it brings pandas: workers that run other files need not wait for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports is not ours to mend
        import kserve

        import_module("kserve.inference_client")
        import_module("kserve.protocol.infer_type")
    return kserve


def ask(what: Callable[[Any], Awaitable[T]]) -> T:
    async def inside() -> T:
        module = kserve().inference_client
        async with module.InferenceRESTClient(module.RESTConfig(protocol="v2", timeout=60)) as client:
            return await what(client)

    return asyncio.run(inside())


def request(*, binary: bool, binary_out: bool | None = None, **parameters: Any) -> Any:
    types = kserve().protocol.infer_type
    tensor = types.InferInput("input", list(X.shape), "FP32")
    tensor.set_data_from_numpy(X, binary_data=binary)
    if binary_out is not None:
        parameters["binary_data_output"] = binary_out
    return types.InferRequest("digits", [tensor], request_id="mine", parameters=parameters)


def test_the_three_health_calls(live: Live) -> None:
    assert ask(lambda client: client.is_server_live(live.url)) is True
    assert ask(lambda client: client.is_server_ready(live.url)) is True
    assert ask(lambda client: client.is_model_ready(live.url, "digits")) is True
    assert ask(lambda client: client.is_model_ready(live.url, "nobody")) is False


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_inference(live: Live, binary: bool, binary_out: bool | None) -> None:
    expected = load(embedded("digits")).predict(torch.from_numpy(X), samples=20, seed=9)
    assert isinstance(expected.summary, Classified)
    told = request(binary=binary, binary_out=binary_out, samples=20, seed=9)
    reply = ask(lambda client: client.infer(live.url, told, model_name="digits"))
    assert (reply.id, reply.model_name) == ("mine", "digits")  # it does not read the version
    outputs = {output.name: output.as_numpy() for output in reply.outputs}
    for name, values in fields_of(expected.summary).items():
        np.testing.assert_allclose(outputs[name], values.numpy(), atol=1e-5)
    np.testing.assert_array_equal(outputs["class"], expected.summary.probabilities.argmax(-1).numpy())
    np.testing.assert_array_equal(outputs["ood"], outputs["ood_score"] > outputs["ood_threshold"])
    assert outputs["prediction_set"].shape == (2, 10)


def test_wanted_outputs(live: Live) -> None:
    told = request(binary=True, samples=4, seed=1)
    told.request_outputs = [
        kserve().protocol.infer_type.RequestedOutput("entropy", {"binary_data": True}),
        kserve().protocol.infer_type.RequestedOutput("class", {"binary_data": False}),
    ]
    reply = ask(lambda client: client.infer(live.url, told, model_name="digits"))
    assert [output.name for output in reply.outputs] == ["entropy", "class"]


def test_a_dictionary_is_enough(live: Live) -> None:
    told = {"inputs": [{"name": "input", "shape": [2, 1, 8, 8], "datatype": "FP32", "data": X.tolist()}]}
    reply = ask(lambda client: client.infer(live.url, told, model_name="digits"))
    assert [output.shape for output in reply.outputs if output.name == "probabilities"] == [[2, 10]]


def test_errors_are_read_by_the_client(live: Live) -> None:
    told = request(binary=False, samples=-3)
    with pytest.raises(httpx.HTTPStatusError, match="samples is -3; expected a whole number from 0 to 1024"):
        ask(lambda client: client.infer(live.url, told, model_name="digits"))
    with pytest.raises(httpx.HTTPStatusError, match="no such model is served"):
        ask(lambda client: client.infer(live.url, told, model_name="nobody"))
