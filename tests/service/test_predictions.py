"""A prediction through HTTP is the one that Python gives, whatever the body, the model and the company it is in."""

import asyncio
import base64
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image as Pillow

from dubito.models import load, save
from dubito.models.images import prepare
from dubito.models.manifest import Card, Input
from dubito.models.predictions.answers import answers
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import Prediction
from dubito.service.web.connection import PIECE
from dubito.service.web.options import RETURNS
from tests.service.conftest import Serve, fields_of
from tests.small_models import bayesian_mlp

SAMPLES: tuple[int | str, ...] = (0, 1, 20, "auto")
SEED = 11
Array = NDArray[Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """A server, and the models that it serves."""

    http: httpx.Client
    models: Mapping[str, Model]

    def post(self, name: str, **request: Any) -> Any:
        reply = self.http.post(f"/v1/models/{name}/predict", **request)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def infer(self, name: str, content: bytes, length: int | None = None) -> dict[str, Array]:
        headers = {} if length is None else {"inference-header-content-length": str(length)}
        reply = self.http.post(f"/v2/models/{name}/infer", content=content, headers=headers)
        assert reply.status_code == 200, reply.text
        size = int(reply.headers.get("inference-header-content-length", len(reply.content)))
        told, rest, found = json.loads(reply.content[:size]), reply.content[size:], {}
        dtypes = {"FP32": "<f4", "INT64": "<i8", "BOOL": "?"}
        for output in told["outputs"]:
            dtype = np.dtype(dtypes[output["datatype"]])
            if "data" in output:
                array = np.array([np.nan if v is None else v for v in output["data"]], dtype)
            else:
                n = output["parameters"]["binary_data_size"]
                array, rest = np.frombuffer(rest[:n], dtype), rest[n:]
            found[output["name"]] = array.reshape(output["shape"])
        assert not rest
        return found


@pytest.fixture(scope="module")
def place(
    serve: Serve, convolved_digits: Path, make_artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("artifacts")
    files = {
        "digits": convolved_digits,
        "plants": make_artifact(folder / "plants.safetensors"),
        "photos": make_artifact(folder / "photos.safetensors", kind="image"),
        "prices": make_artifact(folder / "prices.safetensors", kind="regression"),
        "plain": make_artifact(folder / "plain.safetensors", method="deterministic"),
        "crowd": make_artifact(folder / "crowd.safetensors", method="ensemble-w"),
        "crowd-u": make_artifact(folder / "crowd-u.safetensors", method="ensemble-u"),
        "hadamard": make_artifact(folder / "hadamard.safetensors", kind="regression", method="whvi"),
        "bare": bare(folder / "bare.safetensors"),
    }
    server = serve(*files.values(), "--set", "buckets=1,2,4,16")
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield Place(http, {name: load(path) for name, path in files.items()})


def bare(path: Path) -> Path:
    """A model without labels or calibration."""
    torch.manual_seed(5)
    save(
        bayesian_mlp((4, 8, 3), "ffg-u", inducing=2),
        path,
        card=Card(input=Input(shape=(4,))),
    )
    return path


MODELS = ("digits", "plants", "photos", "prices", "plain", "crowd", "crowd-u", "hadamard", "bare")


def inputs_of(model: Model, rows: int = 3, seed: int = 0) -> Array:
    assert model.card.input is not None
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, *model.card.input.shape)).astype(np.float32)


def expected_of(model: Model, x: Array, samples: int | str, seed: int = SEED) -> tuple[Prediction, list[Row]]:
    prediction = model.predict(torch.from_numpy(x), samples, seed)  # type: ignore[arg-type]
    return prediction, answers(prediction, model.card)


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Numbers to 1e-5; flags, classes, names and everything else exactly."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5, rel=1e-5), where
    else:
        assert found == expected, where
        assert type(found) is type(expected), where


def assert_columns(found: dict[str, Array], prediction: Prediction, rows: list[Row], labels: Any) -> None:
    """The named outputs of /v2 say what the rows of /v1 say."""
    for name, values in fields_of(prediction.summary).items():
        np.testing.assert_allclose(found[name], values.numpy(), atol=1e-5, rtol=1e-5)
    for i, row in enumerate(rows):
        for name in ("class", "max_probability"):
            if name in row:
                assert found[name][i] == pytest.approx(row[name], abs=1e-5)
        if row["ood"] is None:
            assert "ood" not in found
        else:
            assert bool(found["ood"][i]) == row["ood"]["flag"]
            assert found["ood_score"][i] == pytest.approx(row["ood"]["score"], abs=1e-5)
            assert found["ood_threshold"][i] == pytest.approx(row["ood"]["threshold"], abs=1e-5)
        if row.get("prediction_set") is not None:
            fitting = [label for label, fits in zip(labels, found["prediction_set"][i], strict=True) if fits]
            assert fitting == row["prediction_set"]
        if row.get("interval") is not None:
            np.testing.assert_allclose(found["interval"][i], row["interval"], atol=1e-5, rtol=1e-5)
        settled = prediction.settled
        assert found["samples"][i] == (prediction.samples if settled is None else settled.samples[i])


def npy(x: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


def oip(x: Array, *, binary: bool, **parameters: Any) -> tuple[bytes, int | None]:
    tensor: dict[str, Any] = {"name": "input", "shape": x.shape, "datatype": "FP32"}
    tensor |= {"parameters": {"binary_data_size": x.nbytes}} if binary else {"data": x.ravel().tolist()}
    told = {"inputs": [tensor], "parameters": {**parameters, "binary_data_output": binary}}
    head = json.dumps(told).encode()
    return (head + x.tobytes(), len(head)) if binary else (head, None)


@pytest.mark.parametrize("samples", SAMPLES)
@pytest.mark.parametrize("name", MODELS)
def test_tensors(place: Place, name: str, samples: int | str) -> None:
    """JSON lists, .npy, a form of .npy, and both forms of the Open Inference Protocol."""
    model = place.models[name]
    x = inputs_of(model)
    prediction, rows = expected_of(model, x, samples)
    query = {"samples": samples, "seed": SEED}
    replies = [
        place.post(name, json={"inputs": x.tolist(), **query}),
        place.post(name, content=npy(x), headers={"content-type": "application/x-npy"}, params=query),
        place.post(name, files=[("a", ("a.npy", npy(x[:1]))), ("b", ("b.npy", npy(x[1:])))], params=query),
    ]
    for reply in replies:
        assert_same(reply["predictions"], rows)
        assert (reply["model"], reply["version"]) == (name, "1")
        assert (reply["samples"], reply["seed"]) == (prediction.samples, SEED)
        assert {"parse", "queue", "encode", "total"} <= set(reply["timing_ms"])
    assert replies[0]["predictions"] == replies[1]["predictions"] == replies[2]["predictions"]  # to the bit
    (alone,) = place.post(name, json={"inputs": x[1].tolist(), **query})["predictions"]  # without the batch axis
    assert_same(alone, expected_of(model, x[1:2], samples)[1][0])
    for binary in (True, False):
        columns = place.infer(name, *oip(x, binary=binary, **query))
        assert_columns(columns, prediction, rows, model.card.labels)


@pytest.mark.parametrize("name", ["digits", "photos"])
def test_pictures(place: Place, name: str) -> None:
    """Raw PNG and JPEG, base64, in a form, as uint8 .npy and as BYTES: what `prepare` makes of the pixels."""
    model, rng = place.models[name], np.random.default_rng(1)
    declared = model.card.input
    assert declared is not None
    query: dict[str, Any] = {"samples": 20, "seed": SEED}
    for shape, kind in (((8, 8), "PNG"), ((13, 9), "PNG"), ((20, 31, 3), "PNG"), ((16, 16, 3), "JPEG")):
        file = io.BytesIO()
        Pillow.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file, kind)
        body = file.getvalue()
        pixels = np.array(Pillow.open(io.BytesIO(body)))
        x = prepare(torch.from_numpy(pixels), declared)[None].numpy()
        _, rows = expected_of(model, x, 20)
        text = base64.b64encode(body).decode()
        replies = [
            place.post(name, content=body, headers={"content-type": f"image/{kind.lower()}"}, params=query),
            place.post(name, json={"images": [text], **query}),
            place.post(name, json={"images": [f"data:image/png;base64,{text}"], **query}),
            place.post(name, files={"file": ("x.png", body)}, params=query),
            place.post(name, content=npy(pixels), headers={"content-type": "application/x-npy"}, params=query),
        ]
        for reply in replies:
            assert_same(reply["predictions"], rows)
        blob = len(body).to_bytes(4, "little") + body
        tensor = {"name": "input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": len(blob)}}
        head = json.dumps({"inputs": [tensor], "parameters": query}).encode()
        columns = place.infer(name, head + blob, len(head))
        np.testing.assert_allclose(columns["probabilities"][0], rows[0]["probabilities"], atol=1e-5)
    pixels = rng.integers(0, 256, (4, *declared.shape), dtype=np.uint8)  # as the network takes them, channels first
    x = torch.stack([prepare(torch.from_numpy(p).permute(1, 2, 0), declared) for p in pixels]).numpy()
    reply = place.post(name, content=npy(pixels), headers={"content-type": "application/x-npy"}, params=query)
    assert_same(reply["predictions"], expected_of(model, x, 20)[1])


@pytest.mark.parametrize("name", ["digits", "plants", "prices", "crowd"])
def test_in_a_mixed_batch(place: Place, name: str) -> None:
    """Many at once, of other samples, seeds and rows; each gets the answer that it would get alone."""
    model = place.models[name]
    asks = []
    for i in range(30):  # every kind with every kind of seed
        x = inputs_of(model, rows=1 + i % 3, seed=i)
        samples, seed = (*SAMPLES, 7, 33)[i % 6], None if i % 5 == 4 else 1000 + i % 7
        asks.append((x, samples, seed))

    async def send_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=place.http.base_url, timeout=60, limits=limits) as client:
            posts = [
                client.post(
                    f"/v1/models/{name}/predict",
                    json={"inputs": x.tolist(), "samples": samples, **({} if seed is None else {"seed": seed})},
                )
                for x, samples, seed in asks
            ]
            return await asyncio.gather(*posts)

    for (x, samples, seed), reply in zip(asks, asyncio.run(send_all()), strict=True):
        assert reply.status_code == 200, reply.text
        found = reply.json()
        if seed is not None:
            assert found["seed"] == seed
            assert_same(found["predictions"], expected_of(model, x, samples, seed)[1])
        else:
            check_unseeded(model, x, samples, found)


def check_unseeded(model: Model, x: Array, samples: int | str, found: Any) -> None:
    """It may share another's draws, but tells their seed: the same draws give the same answer again."""
    _, rows = expected_of(model, x, samples, found["seed"])
    assert_same(found["predictions"], rows)


def test_a_large_request_goes_in_parts(place: Place) -> None:
    """Its rows see the same functions, in whatever parts they go to the device."""
    model = place.models["plants"]
    x = inputs_of(model, rows=1000, seed=3)
    query = {"samples": 33, "seed": SEED}
    reply = place.post("plants", content=npy(x), headers={"content-type": "application/x-npy"}, params=query)
    assert_same(reply["predictions"], expected_of(model, x, 33)[1])
    unseeded = place.post(
        "plants", content=npy(x), headers={"content-type": "application/x-npy"}, params={"samples": 33}
    )
    check_unseeded(model, x, 33, unseeded)


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_repeats_to_the_bit_and_none_does_not(place: Place, name: str) -> None:
    model = place.models[name]
    x = inputs_of(model)
    for samples in SAMPLES:
        body = {"inputs": x.tolist(), "samples": samples, "seed": 3}
        with ThreadPoolExecutor(4) as pool:  # the others are in its way, or not
            replies = list(pool.map(lambda body: place.post(name, json=body), [body, body | {"seed": 4}, body, body]))
        assert replies[0]["predictions"] == replies[2]["predictions"] == replies[3]["predictions"]
        assert place.post(name, json=body)["predictions"] == replies[0]["predictions"]
    first, second = (place.post(name, json={"inputs": x.tolist(), "samples": 20}) for _ in range(2))
    random = name not in ("plain", "crowd")
    assert (first["predictions"] != second["predictions"]) == random
    if random:
        assert first["seed"] != second["seed"]
        again = place.post(name, json={"inputs": x.tolist(), "samples": 20, "seed": first["seed"]})
        assert_same(again["predictions"], first["predictions"])


def test_auto_says_how_many_each_input_took(place: Place) -> None:
    model = place.models["digits"]
    x = inputs_of(model, rows=12, seed=2)
    for tolerance, most in ((0.05, 128), (0.01, 64), (0.3, 16)):
        body = {"inputs": x.tolist(), "samples": "auto", "seed": 1, "tolerance": tolerance, "max_samples": most}
        reply = place.post("digits", json=body)
        expected = model.predict(torch.from_numpy(x), "auto", 1, tolerance=tolerance, max_samples=most)
        assert expected.settled is not None
        drawn = [row["samples"] for row in reply["predictions"]]
        assert drawn == expected.settled.samples.tolist()
        assert reply["samples"] == max(drawn) <= most
        assert_same(reply["predictions"], answers(expected, model.card))


def test_return(place: Place) -> None:
    for name in ("digits", "prices", "plain", "crowd"):
        model = place.models[name]
        x = inputs_of(model)
        body = {"inputs": x.tolist(), "samples": 6, "seed": 2}
        whole = place.post(name, json=body)["predictions"]
        prediction = model.predict(torch.from_numpy(x), 6, 2, keep_outputs=True)
        with_draws = place.post(name, json=body | {"return": ["probabilities", "samples"]})["predictions"]
        for i, (row, plain) in enumerate(zip(with_draws, whole, strict=True)):
            draws = np.array(row.pop("samples"))
            assert draws.shape[0] == prediction.samples
            assert_same(row, plain)
            key = "mean" if name == "prices" else "probabilities"
            np.testing.assert_allclose(draws.mean(0), plain[key], atol=1e-5, rtol=1e-5)
            assert prediction.outputs is not None
            if name != "prices":
                T = 1.0 if model.card.calibration is None else model.card.calibration.temperature
                assert T > 0  # the kept outputs are divided by it already
                np.testing.assert_allclose(draws, prediction.outputs[:, i].softmax(-1).numpy(), atol=1e-5)
        for chosen in ([], ["entropy"], ["label", "class"]):
            short = place.post(name, json=body | {"return": chosen})["predictions"]
            assert_same(short, [{k: v for k, v in row.items() if k != "probabilities"} for row in whole])
    text = place.post(
        "plants",
        content=npy(np.zeros((1, 4))),
        headers={"content-type": "application/x-npy"},
        params={"return": "samples,probabilities", "samples": "2"},
    )
    assert {"samples", "probabilities"} <= set(text["predictions"][0])


def test_options_come_in_the_query_too_where_the_body_is_json(place: Place) -> None:
    body = {"inputs": np.zeros((1, 4)).tolist()}
    reply = place.post("plants", json=body, params={"samples": "3", "seed": "9"})
    assert (reply["samples"], reply["seed"]) == (3, 9)
    assert place.post("plants", json=body | {"samples": 4}, params={"samples": "3"})["samples"] == 4
    assert place.post("plants", json=body | {"version": "1"})["version"] == "1"
    largest = (1 << 63) - 1
    assert place.post("plants", json=body | {"seed": largest})["seed"] == largest


@pytest.mark.parametrize("spaces", [0, 70_000], ids=["short", "long"])
def test_options_of_the_body_count_before_those_of_the_query(place: Place, spaces: int) -> None:
    """However long it is: a long one is decoded first."""

    def told(body: dict[str, Any], **query: str) -> httpx.Response:
        content = " " * spaces + json.dumps({"inputs": np.zeros((1, 4)).tolist()} | body)
        headers = {"content-type": "application/json"}
        return place.http.post("/v1/models/plants/predict", content=content, params=query, headers=headers)

    body = {"samples": 3, "version": "1", "timeout_ms": 30_000, "return": []}
    for query in ({"samples": "abc"}, {"version": "7"}, {"timeout_ms": "0"}, {"samples": "auto", "return": "samples"}):
        reply = told(body, **query)
        assert reply.status_code == 200, reply.text
        assert reply.json()["samples"] == 3
        assert told({}, **query).status_code in (400, 404)
    assert told({"images": None}).status_code == 200
    assert "the body has no `inputs`" in told({"inputs": None}).json()["detail"]
    assert "the body has both" in told({"images": [""]}).json()["detail"]


def test_the_timeout_begins_once_the_body_has_come(place: Place) -> None:
    """Also of a body of which the application has the beginning before its end."""
    file = io.BytesIO()
    np.save(file, np.zeros((4096, 4), np.float32))
    body = file.getvalue()
    assert len(body) > PIECE

    def slowly() -> Iterator[bytes]:
        yield body[:-100]
        time.sleep(1.5)
        yield body[-100:]

    options = {"samples": "1", "timeout_ms": "1400"}
    headers = {"content-type": "application/x-npy"}
    reply = place.http.post("/v1/models/plants/predict", content=slowly(), params=options, headers=headers)
    assert reply.status_code == 200, reply.text


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"samples": -1}, 400, r"samples is -1; expected a whole number from 0 to 1024 or \"auto\"."),
    ({"samples": 1025}, 400, r"samples is 1025; expected .* from 0 to 1024"),
    ({"samples": 1.5}, 400, r"samples is 1.5; expected a whole number"),
    ({"samples": True}, 400, r"samples is True; expected a whole number"),
    ({"samples": "many"}, 400, r"samples is 'many'; expected"),
    ({"samples": None}, 400, r"samples is None; expected"),
    ({"samples": [20]}, 400, r"samples is \[20\]; expected"),
    ({"seed": -1}, 400, r"seed is -1; expected a whole number from 0 to 9223372036854775807"),
    ({"seed": 1 << 63}, 400, r"seed is 9223372036854775808; expected"),
    ({"seed": 0.5}, 400, r"seed is 0.5; expected"),
    ({"seed": "x" * 200}, 400, r"seed is 'x+\.\.\.; expected"),
    ({"max_samples": 0}, 400, r"max_samples is 0; expected a whole number from 1 to 1024"),
    ({"tolerance": 0}, 400, r"tolerance is 0; expected a number between 0 and 1"),
    ({"tolerance": 1}, 400, r"tolerance is 1; expected"),
    ({"tolerance": "nan"}, 400, r"tolerance is 'nan'; expected"),
    ({"tolerance": {}}, 400, r"tolerance is {}; expected"),
    ({"timeout_ms": 0}, 400, r"timeout_ms is 0; expected a whole number from 1 to 300000"),
    ({"timeout_ms": 10**9}, 400, r"timeout_ms is 1000000000; expected"),
    ({"return": "all"}, 400, r"return is 'all'; expected a list of some of: probabilities, samples"),
    ({"return": [1]}, 400, r"return is \[1\]; expected a list"),
    ({"return": {}}, 400, r"return is {}; expected a list"),
    ({"return": ["samples"], "samples": "auto"}, 400, r"return asks for samples, but samples is \"auto\": give"),
    ({"version": 1}, 400, r"version is 1; expected a string such as"),
    ({"version": "2"}, 404, r"this model is not served in that version; it is in version 1"),
    ({"sample": 3}, 400, r"there is no option 'sample'; there are: samples, seed"),
    ({"images": [""]}, 400, r"the body has both `inputs` and `images`; expected `inputs` .*, and not both"),
    ({"inputs": [[0, 0, 0]]}, 400, r"inputs have shape \(1, 3\); expected \(B, 4\), at least one row"),
    ({"inputs": []}, 400, r"inputs have shape \(0,\); expected \(B, 4\)"),
    ({"inputs": [[0, 0, 0, "x"]]}, 400, r"inputs are no array of numbers; expected nested lists of shape \(B, 4\)"),
    ({"inputs": [[0], [0, 0]]}, 400, r"inputs are no array of numbers"),
    ({"inputs": {"a": 1}}, 400, r"inputs are no array of numbers"),
    ({"inputs": None}, 400, r"the body has no `inputs`; expected"),
    ({"inputs": "zeros"}, 400, r"inputs are no array of numbers"),
    ({"inputs": [[0, 0, 0, None]]}, 400, r"inputs are no array of numbers"),
    ({"inputs": [[0, 0, 0, True]]}, 400, r"inputs are no array of numbers"),
    ({"inputs": [[0, 0, 0, "1"]]}, 400, r"inputs are no array of numbers"),
    ({"inputs": [[0] * 4, [0, 0, 0, 1e39]]}, 400, r"input 1 holds NaN, infinity or a number too large for float32"),
]  # fmt: skip


KEYS = [
    ("v1/models/plants/predict", {"instances": [[0.0] * 4]}, r"no `inputs`, but a key 'instances'; expected `inputs`"),
    ("v1/models/plants/predict", {"Inputs": [[0.0] * 4], "seed": 1}, r"but a key 'Inputs'; expected `inputs`"),
    ("v1/models/plants/predict", {"image": "", "samples": 3}, r"but a key 'image'; expected .* or `images`"),
    ("v1/models/plants/predict", {"samples": 3}, r"^the body has no `inputs`; expected `inputs`"),
    ("v1/models/plants/predict", {"inputs": [{"name": "input"}]}, r"Tensors with name .* go to /v2/models/NAME/infer"),
    ("v2/models/plants/infer", {"instances": []}, r"inputs is missing or no list; .* The request has 'instances'"),
    ("v2/models/plants/infer", {"inputs": [[0.0] * 4]}, r"expected {\"name\": .* lists go to /v1/models/NAME/predict"),
    ("v2/models/plants/infer", {"inputs": [{"name": "input", "dtype": "FP32"}]}, r"'input' has no datatype; expected"),
]


@pytest.mark.parametrize(("path", "body", "said"), KEYS, ids=[str(body)[:40] for _, body, _ in KEYS])
def test_a_wrong_key_is_told_the_right_one(place: Place, path: str, body: dict[str, Any], said: str) -> None:
    reply = place.http.post(f"/{path}", json=body)
    assert reply.status_code == 400
    assert re.search(said, reply.json().get("detail") or reply.json()["error"])


def test_the_form_that_curl_sends_is_told_of_json(place: Place) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    reply = place.http.post("/v1/models/plants/predict", content=b'{"inputs": [[0, 0, 0, 0]]}', headers=form)
    assert reply.status_code == 415
    assert "expected application/json" in reply.json()["detail"]
    assert "--json" in reply.json()["detail"]


@pytest.mark.parametrize(("options", "status", "said"), WRONG, ids=[str(options)[:40] for options, _, _ in WRONG])
def test_options_that_are_wrong(place: Place, options: dict[str, Any], status: int, said: str) -> None:
    reply = place.http.post("/v1/models/plants/predict", json={"inputs": [[0.0] * 4], **options})
    told = reply.json()
    assert reply.headers["content-type"] == "application/problem+json"
    assert (reply.status_code, told["status"]) == (status, status), told
    assert re.match(said, told["detail"]), told["detail"]
    assert len(told["detail"]) < 400
    assert told["detail"].endswith(".")


def test_the_draws_of_a_request_have_a_limit(place: Place) -> None:
    body = {"inputs": np.zeros((120, 1, 8, 8)).tolist(), "samples": 1000, "return": ["samples"]}
    reply = place.http.post("/v1/models/digits/predict", json=body)
    assert reply.status_code == 413
    assert "1,200,000 numbers; at most 1,048,576" in reply.json()["detail"]


def test_pictures_for_a_model_that_takes_none(place: Place) -> None:
    file = io.BytesIO()
    Pillow.new("L", (8, 8)).save(file, "PNG")
    for request in (
        {"content": file.getvalue(), "headers": {"content-type": "image/png"}},
        {"json": {"images": [base64.b64encode(file.getvalue()).decode()]}},
        {"files": {"file": ("x.png", file.getvalue())}},
    ):
        reply = place.http.post("/v1/models/plants/predict", **request)
        assert reply.status_code == 415
        assert reply.json()["detail"] == "this model takes tensors of shape (B, 4), not pictures."


def test_no_reply_tells_where_things_lie(place: Place) -> None:
    paths = [
        "/v1/models",
        "/v2",
        "/v2/models/digits",
        "/openapi.json",
        "/metrics",
        "/readyz",
        "/nothing",
        "/v2/nothing",
    ]
    paths += [f"/v1/models/{name}" for name in MODELS]
    texts = [place.http.get(path).text for path in paths]
    texts += [place.http.post("/v2/repository/index").text]
    texts += [place.http.post("/v2/repository/models/%2e%2e%2fplants/load").text]
    places = [
        place for place in map(str, (sys.prefix, Path.cwd(), Path.home(), tempfile.gettempdir())) if len(place) > 1
    ]
    for text in texts:
        assert not any(word in text for word in (".safetensors", "Traceback", "site-packages", *places))


def test_every_field_can_be_asked_for(place: Place) -> None:
    """`return` knows the fields of both kinds of models, and no others."""
    fields = {
        key
        for name in ("plants", "prices")
        for key in place.post(name, json={"inputs": [[0.0] * 4], "return": ["probabilities", "samples"]})[
            "predictions"
        ][0]
    }
    assert fields == set(RETURNS)
