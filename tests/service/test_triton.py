"""Triton's own client, unchanged, against the live server: sync and asyncio, JSON and binary, compressed and not."""

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

from dubito import __version__
from dubito.models import load
from dubito.models.embedded import embedded
from dubito.models.predictions.prediction import Prediction
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.service.web.oip import DRAWS
from tests.service.conftest import Live, Serve, fields_of

Array = NDArray[Any]
ALL = ("probabilities", "class", "max_probability", "entropy", "expected_entropy", "mutual_information")
DECIDED = ("prediction_set", "ood", "ood_score", "ood_threshold")


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(live.address) as found:
        yield found


@pytest.fixture(scope="module")
def x() -> Array:
    return np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def expected(x: Array) -> Prediction:
    return load(embedded("digits")).predict(torch.from_numpy(x), samples=20, seed=5)


def tensor(x: Array, *, binary: bool = True, kind: str = "FP32", name: str = "input") -> Any:
    found = triton.InferInput(name, list(x.shape), kind)
    return found.set_data_from_numpy(x, binary_data=binary)


def assert_expected(result: Any, expected: Prediction) -> None:
    summary = expected.summary
    assert isinstance(summary, Classified)
    for name, values in fields_of(summary).items():
        np.testing.assert_allclose(result.as_numpy(name), values.numpy(), atol=1e-5)
    np.testing.assert_array_equal(result.as_numpy("class"), summary.probabilities.argmax(-1).numpy())
    np.testing.assert_array_equal(result.as_numpy("samples"), [expected.samples] * len(summary.entropy))


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", "1")
    assert not client.is_model_ready("digits", "2")
    assert not client.is_model_ready("nobody")
    server = client.get_server_metadata()
    assert (server["name"], server["version"]) == ("dubito", __version__)
    assert {"binary_tensor_data", "model_repository"} <= set(server["extensions"])
    for metadata in (client.get_model_metadata("digits"), client.get_model_metadata("digits", "1")):
        assert (metadata["name"], metadata["versions"]) == ("digits", ["1"])
        assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
        assert [output["name"] for output in metadata["outputs"]] == [*ALL, *DECIDED, "samples"]


def test_metadata_says_what_comes(client: Any, x: Array) -> None:
    """Every output that metadata names comes, of its datatype and shape; none comes that it does not name."""
    told = {output["name"]: output for output in client.get_model_metadata("digits")["outputs"]}
    reply = client.infer("digits", [tensor(x)]).get_response()
    assert [output["name"] for output in reply["outputs"]] == list(told)
    for output in reply["outputs"]:
        mine = told[output["name"]]
        assert output["datatype"] == mine["datatype"]
        assert len(output["shape"]) == len(mine["shape"])
        assert all(said in (-1, size) for said, size in zip(mine["shape"], output["shape"], strict=True))


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_json_and_binary(client: Any, x: Array, expected: Prediction, binary_in: bool, binary_out: bool | None) -> None:
    """None: no outputs are named, so that all come back."""
    names = [*ALL, *DECIDED, "samples"]
    outputs = None
    if binary_out is not None:
        outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in names]
    result = client.infer(
        "digits",
        [tensor(x, binary=binary_in)],
        outputs=outputs,
        request_id="my own",
        parameters={"samples": 20, "seed": 5},
    )
    reply = result.get_response()
    assert (reply["id"], reply["model_name"], reply["model_version"]) == ("my own", "digits", "1")
    assert reply["parameters"] == {"samples": 20, "seed": "5", "method": "sampling"}
    binary = binary_out is not False
    assert all(("data" in output) != binary for output in reply["outputs"])
    assert [output["name"] for output in reply["outputs"]] == names
    assert_expected(result, expected)
    score, threshold = result.as_numpy("ood_score"), result.as_numpy("ood_threshold")
    np.testing.assert_array_equal(result.as_numpy("ood"), score > threshold)
    assert result.as_numpy("prediction_set").dtype == bool


def test_some_outputs_binary_and_some_json(client: Any, x: Array, expected: Prediction) -> None:
    binary = {"entropy": False, "probabilities": True, "class": False, "ood": True, DRAWS: True, "samples": False}
    result = client.infer(
        "digits",
        [tensor(x)],
        outputs=[triton.InferRequestedOutput(name, binary_data=flag) for name, flag in binary.items()],
        parameters={"samples": 20, "seed": 5},
    )
    reply = result.get_response()
    assert {o["name"]: "data" not in o for o in reply["outputs"]} == binary  # and in the order they were asked for
    assert isinstance(expected.summary, Classified)
    for name in ("entropy", "probabilities"):
        np.testing.assert_allclose(result.as_numpy(name), vars(expected.summary)[name].numpy(), atol=1e-5)
    drawn = result.as_numpy(DRAWS)
    assert drawn.shape == (3, 20, 10)
    np.testing.assert_allclose(drawn.mean(1), expected.summary.probabilities.numpy(), atol=1e-5)


def test_unseeded_requests_differ(client: Any, x: Array) -> None:
    first, second = (client.infer("digits", [tensor(x)], parameters={"samples": 20}) for _ in range(2))
    assert "id" not in first.get_response()
    assert np.abs(first.as_numpy("probabilities") - second.as_numpy("probabilities")).max() > 1e-6


def test_auto_says_each_rows_samples(client: Any, x: Array) -> None:
    expected = load(embedded("digits")).predict(torch.from_numpy(x), "auto", seed=5)
    assert expected.settled is not None
    result = client.infer("digits", [tensor(x)], parameters={"samples": "auto", "seed": 5})
    np.testing.assert_array_equal(result.as_numpy("samples"), expected.settled.samples.numpy())


@pytest.mark.parametrize("kind", ["FP16", "FP64", "INT8", "INT64", "UINT16", "BOOL"])
def test_other_datatypes_are_numbers_too(client: Any, kind: str) -> None:
    dtype = {"FP16": "f2", "FP64": "f8", "INT8": "i1", "INT64": "i8", "UINT16": "u2", "BOOL": "?"}[kind]
    x = (np.arange(64).reshape(1, 1, 8, 8) % 2).astype(dtype)
    result = client.infer("digits", [tensor(x, kind=kind)], parameters={"samples": 0})
    same = client.infer("digits", [tensor(x.astype(np.float32))], parameters={"samples": 0})
    np.testing.assert_array_equal(result.as_numpy("probabilities"), same.as_numpy("probabilities"))


def test_timeout_is_in_microseconds(client: Any, x: Array) -> None:
    with pytest.raises(InferenceServerException, match=r"\[504\] no answer within 0.001 s"):
        client.infer("digits", [tensor(x)], parameters={"samples": 1024}, timeout=1000)
    assert client.infer("digits", [tensor(x)], timeout=30_000_000).as_numpy("class").shape == (3,)
    assert client.infer("digits", [tensor(x)], timeout=0).as_numpy("class").shape == (3,)  # of Triton: none of its own
    with pytest.raises(InferenceServerException, match="timeout is 'soon'"):
        client.infer("digits", [tensor(x)], timeout="soon")


@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("response_coding", [None, "gzip", "deflate"])
def test_compression(
    client: Any, x: Array, expected: Prediction, request_coding: str | None, response_coding: str | None
) -> None:
    many = np.concatenate([x] * 20)
    result = client.infer(
        "digits",
        [tensor(many)],
        request_compression_algorithm=request_coding,
        response_compression_algorithm=response_coding,
        parameters={"samples": 20, "seed": 5},
    )
    assert isinstance(expected.summary, Classified)
    probabilities = result.as_numpy("probabilities")
    np.testing.assert_allclose(probabilities, expected.summary.probabilities.repeat(20, 1).numpy(), atol=1e-5)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_replies_are_compressed_where_asked(live: Live, coding: str) -> None:
    told = {"inputs": [{"name": "input", "shape": [20, 1, 8, 8], "datatype": "FP32", "data": [0.0] * 1280}]}
    url = f"{live.url}/v2/models/digits/infer"
    packed = httpx.post(url, json=told, headers={"accept-encoding": coding})
    assert packed.headers["content-encoding"] == coding
    for refused in ("identity", f"{coding};q=0", f"{coding}; q=0", f"{coding};q=0.000, br"):
        plain = httpx.post(url, json=told, headers={"accept-encoding": refused})
        assert "content-encoding" not in plain.headers
        assert len(plain.content) == int(plain.headers["content-length"])
    assert [o["name"] for o in packed.json()["outputs"]] == [o["name"] for o in plain.json()["outputs"]]


def test_asyncio_client(live: Live, x: Array, expected: Prediction) -> None:
    async def ask() -> None:
        async with triton_aio.InferenceServerClient(live.address) as client:
            assert await client.is_server_live()
            assert await client.is_server_ready()
            assert await client.is_model_ready("digits", "1")
            assert (await client.get_server_metadata())["name"] == "dubito"
            assert (await client.get_model_metadata("digits"))["platform"] == "dubito_safetensors"
            options = {"parameters": {"samples": 20, "seed": 5}}
            asks = [
                client.infer("digits", [tensor(x, binary=binary)], request_id=coding, **options, **codings)
                for binary in (True, False)
                for coding in ("gzip", "deflate")
                for codings in ({"request_compression_algorithm": coding, "response_compression_algorithm": coding},)
            ]
            for result in await asyncio.gather(*asks):
                assert_expected(result, expected)
            with pytest.raises(InferenceServerException, match="no such model is served"):
                await client.infer("nobody", [tensor(x)])

    asyncio.run(ask())


ERRORS: dict[str, tuple[Callable[[Any, Array], object], str]] = {
    "unknown model": (lambda c, x: c.infer("nobody", [tensor(x)]), r"\[404\] no such model is served"),
    "unknown version": (lambda c, x: c.infer("digits", [tensor(x)], "7"), r"\[404\] .*it is in version 1"),
    "metadata of an unknown model": (lambda c, x: c.get_model_metadata("nobody"), r"\[404\] no such model"),
    "unknown input": (lambda c, x: c.infer("digits", [tensor(x, name="x")]), r"\[400\] inputs are 'x'.*'input'"),
    "two inputs": (lambda c, x: c.infer("digits", [tensor(x), tensor(x, name="y")]), r"\[400\] inputs are 'input, y'"),
    "the same input twice": (lambda c, x: c.infer("digits", [tensor(x), tensor(x)]), r"\[400\] .*twice"),
    "wrong shape": (lambda c, x: c.infer("digits", [tensor(x[:, :, :7])]), r"\[400\] .*\(3, 1, 7, 8\).*\(B, 1, 8, 8\)"),
    "wrong rank": (lambda c, x: c.infer("digits", [tensor(x.reshape(3, 64))]), r"\[400\] .*\(3, 64\)"),
    "no rows": (lambda c, x: c.infer("digits", [tensor(x[:0])]), r"\[400\] .*\[0, 1, 8, 8\]; expected at least one"),
    "NaN": (lambda c, x: c.infer("digits", [tensor(x * np.nan)]), r"\[400\] input 0 holds NaN"),
    "text": (
        lambda c, x: c.infer("digits", [tensor(np.array([b"a", b"b"], object), kind="BYTES")]),
        r"\[400\] the picture cannot be read",
    ),
    "unknown output": (
        lambda c, x: c.infer("digits", [tensor(x)], outputs=[triton.InferRequestedOutput("logits")]),
        r"\[400\] this model has no output 'logits'; it has probabilities",
    ),
    "output of regression": (
        lambda c, x: c.infer("digits", [tensor(x)], outputs=[triton.InferRequestedOutput("mean")]),
        r"\[400\] this model has no output 'mean'",
    ),
    "samples": (lambda c, x: c.infer("digits", [tensor(x)], parameters={"samples": -1}), r"\[400\] samples is -1; exp"),
    "seed": (lambda c, x: c.infer("digits", [tensor(x)], parameters={"seed": "x"}), r"\[400\] seed is 'x'; expected"),
    "loading": (lambda c, x: c.load_model("nobody"), r"\[404\] no such model in the repository"),
    "unloading": (lambda c, x: c.unload_model("nobody"), r"\[404\] no such model is served"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_read_by_the_client(client: Any, x: Array, case: str) -> None:
    ask, said = ERRORS[case]
    with pytest.raises(InferenceServerException) as caught:
        ask(client, x)
    assert re.match(said, str(caught.value)), str(caught.value)


def test_a_wrong_datatype_is_refused(client: Any, live: Live, x: Array) -> None:
    for kind in ("FP8", "float32", "BF16", "fp32", "", None, 7):
        told = {"inputs": [{"name": "input", "shape": [1, 1, 8, 8], "datatype": kind, "data": [0.0] * 64}]}
        reply = httpx.post(f"{live.url}/v2/models/digits/infer", json=told)
        assert reply.status_code == 400
        assert "expected BOOL, UINT8" in reply.json()["error"]
    lying = tensor(x)
    lying._datatype = "FP64"
    with pytest.raises(InferenceServerException, match=r"says 768 bytes; its shape \[3, 1, 8, 8\] of FP64 takes 1536"):
        client.infer("digits", [lying])


def test_pictures_as_bytes(client: Any) -> None:
    import io

    from PIL import Image

    pixels = np.random.default_rng(1).integers(0, 256, (8, 8), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    pictures = np.array([file.getvalue()] * 2, object)
    of_files = client.infer("digits", [tensor(pictures, kind="BYTES")], parameters={"samples": 0})
    of_pixels = client.infer("digits", [tensor(pixels[None], kind="UINT8")], parameters={"samples": 0})
    probabilities = of_files.as_numpy("probabilities")
    np.testing.assert_array_equal(probabilities[0], probabilities[1])
    np.testing.assert_allclose(probabilities[:1], of_pixels.as_numpy("probabilities"), atol=1e-6)


def test_a_raw_body_is_one_input(live: Live, x: Array) -> None:
    """The header length is 0: nothing but the numbers of one FP32 input, and all outputs come back binary."""
    url, headers = f"{live.url}/v2/models/digits/infer", {"inference-header-content-length": "0"}
    reply = httpx.post(url, content=x[0].tobytes(), headers=headers)
    assert reply.status_code == 200
    result = triton.InferenceServerClient.parse_response_body(
        reply.content, header_length=int(reply.headers["inference-header-content-length"])
    )
    assert all("data" not in output for output in result.get_response()["outputs"])
    np.testing.assert_allclose(result.as_numpy("probabilities").sum(-1), [1.0], atol=1e-5)
    assert result.as_numpy("class").shape == (1,)
    for wrong in (b"", x[0].tobytes()[:-1], x.tobytes()):
        refused = httpx.post(url, content=wrong, headers=headers)
        assert refused.status_code == 400
        assert f"has {len(wrong)} bytes; one FP32 input of shape (1, 8, 8) takes 256" in refused.json()["error"]


def test_repository(serve: Serve, make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    root = tmp_path / "models"
    make_artifact(root / "plants" / "1" / "model.safetensors")
    make_artifact(root / "prices" / "3" / "model.safetensors", kind="regression")
    server = serve(root)
    x = np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
    with triton.InferenceServerClient(server.address) as client:
        rows = client.get_model_repository_index()
        assert [(r["name"], r["version"], r["state"]) for r in rows] == [
            ("plants", "1", "READY"),
            ("prices", "3", "READY"),
        ]
        client.unload_model("plants")
        assert not client.is_model_ready("plants")
        assert client.is_model_ready("prices", "3")
        with pytest.raises(InferenceServerException, match=r"\[404\]"):
            client.infer("plants", [tensor(x)])
        assert [r["state"] for r in client.get_model_repository_index()] == ["UNAVAILABLE", "READY"]
        make_artifact(root / "plants" / "2" / "model.safetensors", seed=1)
        client.load_model("plants")
        assert client.is_model_ready("plants", "2")
        assert client.infer("plants", [tensor(x)], "2").get_response()["model_version"] == "2"
        broken = root / "plants" / "10" / "model.safetensors"
        broken.parent.mkdir()
        broken.write_bytes(b"no artifact")
        with pytest.raises(
            InferenceServerException, match=r"\[400\] the artifact cannot be loaded: plants/10/"
        ) as caught:
            client.load_model("plants")
        assert str(tmp_path) not in str(caught.value)
        assert client.is_model_ready("plants", "2")  # the one before it goes on
        assert [(r["version"], r["state"], bool(r["reason"])) for r in client.get_model_repository_index()] == [
            ("1", "UNAVAILABLE", False),
            ("2", "READY", False),
            ("10", "UNAVAILABLE", True),
            ("3", "READY", False),
        ]
        ready = httpx.post(f"{server.url}/v2/repository/index", json={"ready": True}).json()
        assert [(r["name"], r["version"]) for r in ready] == [("plants", "2"), ("prices", "3")]
        _check_regression(client, root / "prices" / "3" / "model.safetensors", x)


def _check_regression(client: Any, path: Path, x: Array) -> None:
    expected = load(path).predict(torch.from_numpy(x), samples=8, seed=1)
    assert isinstance(expected.summary, Regressed)
    outputs = [o["name"] for o in client.get_model_metadata("prices")["outputs"]]
    assert outputs[:4] == ["mean", "epistemic_variance", "aleatoric_variance", "interval"]
    names = [*outputs, DRAWS]
    for binary in (True, False):
        wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
        result = client.infer("prices", [tensor(x)], outputs=wanted, parameters={"samples": 8, "seed": 1})
        for name, values in vars(expected.summary).items():
            np.testing.assert_allclose(result.as_numpy(name), values.numpy(), atol=1e-5)
        drawn, interval = result.as_numpy(DRAWS), result.as_numpy("interval")
        assert (drawn.shape, interval.shape) == ((2, 8, 2), (2, 2, 2))
        np.testing.assert_allclose(drawn.mean(1), expected.summary.mean.numpy(), atol=1e-5)
        np.testing.assert_allclose(interval.mean(-1), expected.summary.mean.numpy(), atol=1e-5)


def test_a_repository_that_may_not_be_changed(serve: Serve, small_digits: Path) -> None:
    server = serve(small_digits, "--set", "repository_api=false", "--set", "buckets=1")
    with triton.InferenceServerClient(server.address) as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match=r"\[503\] .*repository_api is off"):
                change("digits")
        assert client.is_model_ready("digits")
        assert len(client.get_model_repository_index()) == 1
