"""The client against real servers: what comes back is what the model itself would have said."""

import asyncio
import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dubito.models import load
from dubito.models.embedded import embedded
from dubito.models.errors import InputError
from dubito.models.images import prepare
from dubito.models.predictions.answers import answers
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import Prediction
from dubito.service.client import AsyncClient, Client, ServiceError
from dubito.service.client import PredictReply as Received
from dubito.service.web.security import hash_key
from tests.service.conftest import Live, Serve

SUMMED = ("probabilities", "entropy", "expected_entropy", "mutual_information", "max_probability")


@pytest.fixture(scope="module")
def model() -> Model:
    return load(embedded("digits"))


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with Client(live.url) as client:
        yield client


@pytest.fixture(scope="module")
def x(model: Model) -> NDArray[np.float32]:
    """Digits, and noise that is none, so that both verdicts are among the answers."""
    with np.load(str(files("dubito.training").joinpath("digits.npz"))) as file:
        pixels = torch.from_numpy(file["x"][:6])
    declared = model.card.input
    assert declared is not None
    digits = np.stack([prepare(one, declared).numpy() for one in pixels])
    noise = np.random.default_rng(0).standard_normal((6, 1, 8, 8), dtype=np.float32)
    return np.concatenate([digits, noise])


def same(received: Received, expected: Prediction, model: Model) -> None:
    """To 1e-5, and in every class, set and flag."""
    rows = answers(expected, model.card)
    for name in SUMMED:
        np.testing.assert_allclose(received[name], [row[name] for row in rows], atol=1e-5)
    assert received["class"].tolist() == [row["class"] for row in rows]
    labels = model.card.labels
    assert labels is not None
    sets = [[label for label, fits in zip(labels, row, strict=True) if fits] for row in received["prediction_set"]]
    assert sets == [row["prediction_set"] for row in rows]
    assert received["ood"].tolist() == [row["ood"]["flag"] for row in rows]
    np.testing.assert_allclose(received["ood_score"], [row["ood"]["score"] for row in rows], atol=1e-5)
    np.testing.assert_allclose(received["ood_threshold"], [row["ood"]["threshold"] for row in rows], atol=1e-5)


def test_a_seeded_prediction_is_the_models_own(client: Client, model: Model, x: NDArray[np.float32]) -> None:
    found = client.predict("digits", x, samples=20, seed=7)
    same(found, model.predict(torch.from_numpy(x), 20, 7), model)
    assert (found.model, found.version, found.seed) == ("digits", "1", 7)
    assert found["samples"].tolist() == [20] * len(x)
    assert found["probabilities"].dtype == np.float32
    assert {True, False} == set(found["ood"].tolist())
    found["probabilities"][0] = 0.0  # arrays are the caller's own


def test_auto_draws_as_many_as_each_input_needs(client: Client, model: Model, x: NDArray[np.float32]) -> None:
    found = client.predict("digits", x, samples="auto", seed=3, tolerance=0.02, max_samples=64)
    expected = model.predict(torch.from_numpy(x), "auto", 3, tolerance=0.02, max_samples=64)
    same(found, expected, model)
    assert expected.settled is not None
    assert found["samples"].tolist() == expected.settled.samples.tolist()


def test_draws_come_where_they_are_asked_for(client: Client, model: Model, x: NDArray[np.float32]) -> None:
    found = client.predict("digits", x, samples=5, seed=1, draws=True)
    outputs = model.predict(torch.from_numpy(x), 5, 1, keep_outputs=True).outputs
    assert outputs is not None
    drawn = outputs.softmax(-1).transpose(0, 1)
    np.testing.assert_allclose(found["sample_outputs"], drawn, atol=1e-5)
    np.testing.assert_allclose(found["sample_outputs"].mean(1), found["probabilities"], atol=1e-5)
    plain = client.predict("digits", x, samples=5, seed=1)
    assert set(found) == {*plain, "sample_outputs"}


def test_pixels_are_prepared_by_the_server(client: Client, model: Model) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    declared = model.card.input
    assert declared is not None
    prepared = torch.stack([prepare(torch.from_numpy(one), declared) for one in pixels])
    same(client.predict("digits", pixels, samples=20, seed=0), model.predict(prepared, 20, 0), model)


@pytest.mark.parametrize("dtype", [">f4", "<f8", "<f2", "<i8"])
def test_other_numbers_are_taken_as_they_are_meant(client: Client, dtype: str) -> None:
    whole = np.random.default_rng(2).integers(-2, 3, (2, 1, 8, 8))
    found = client.predict("digits", whole.astype(dtype), seed=0)
    expected = client.predict("digits", whole.astype(np.float32), seed=0)
    np.testing.assert_array_equal(found["probabilities"], expected["probabilities"])


def test_one_input_and_a_list_of_lists(client: Client, x: NDArray[np.float32]) -> None:
    one, listed = client.predict("digits", x[0], seed=0), client.predict("digits", x[:1].tolist(), seed=0)
    np.testing.assert_array_equal(one["probabilities"], listed["probabilities"])


def test_what_the_server_says_of_itself(client: Client) -> None:
    assert client.ready()
    assert [one["name"] for one in client.models()] == ["digits"]
    assert client.model("digits")["input"]["shape"] == [1, 8, 8]


def test_errors_are_the_servers_sentences(client: Client, x: NDArray[np.float32]) -> None:
    cases: list[tuple[Callable[[], object], int, str]] = [
        (lambda: client.predict("digits", x[:, :, :7]), 400, r"shape \(12, 1, 7, 8\); expected \(B, 1, 8, 8\)"),
        (lambda: client.predict("digits", x[:0]), 400, "at least one row"),
        (lambda: client.predict("digits", np.full((1, 1, 8, 8), 1e300)), 400, "input 0 holds NaN, infinity"),
        (lambda: client.predict("digits", x, samples=-1), 400, "samples is -1"),
        (lambda: client.predict("digits", x, samples="auto", draws=True), 400, "auto"),
        (lambda: client.predict("nobody", x), 404, "no such model"),
        (lambda: client.predict("../x", x), 404, "nothing at this path"),
        (lambda: client.model("nobody"), 404, "no such model"),
        (lambda: client.predict("digits", np.tile(x, (8, 1, 1, 1)), samples=1024, timeout_ms=1), 504, "no answer"),
    ]
    for ask, status, said in cases:
        with pytest.raises(ServiceError, match=said) as caught:
            ask()
        assert (caught.value.status, caught.value.retry_after) == (status, None)


def test_what_is_no_number_is_refused_here(client: Client) -> None:
    with pytest.raises(InputError, match=r"inputs hold <U1; expected numbers"):
        client.predict("digits", ["a"])


def test_keys_and_the_wait_after_too_many_requests(serve: Serve, x: NDArray[np.float32], small_digits: Path) -> None:
    flags = (f"api_keys=me={hash_key('secret')}", "rate_per_second=0.01", "burst=2")
    url = serve(small_digits, *(word for flag in flags for word in ("--set", flag))).url
    with Client(url) as client, pytest.raises(ServiceError, match="no API key") as caught:
        client.models()
    assert caught.value.status == 401
    with Client(url, key="secret") as client:
        for _ in range(2):
            client.predict("digits", x)
        with pytest.raises(ServiceError, match="try again in") as caught:
            client.predict("digits", x)
    assert caught.value.status == 429
    assert caught.value.retry_after is not None
    assert 1 < caught.value.retry_after <= 100


def test_regression_gives_its_own_arrays(serve: Serve, make_artifact: Callable[..., Path], tmp_path: Path) -> None:
    path = make_artifact(tmp_path / "house.safetensors", kind="regression")
    rows = np.random.default_rng(0).standard_normal((5, 4), dtype=np.float32)
    with Client(serve(path).url) as client:
        found = client.predict("house", rows, samples=8, seed=2, draws=True)
    own = load(path)
    expected = answers(own.predict(torch.from_numpy(rows), 8, 2), own.card)
    for name in ("mean", "epistemic_variance", "aleatoric_variance", "interval"):
        np.testing.assert_allclose(found[name], [row[name] for row in expected], atol=1e-5, rtol=1e-5)
    assert found["ood"].tolist() == [row["ood"]["flag"] for row in expected]
    assert found["sample_outputs"].shape == (5, 8, 2)
    np.testing.assert_allclose(found["sample_outputs"].mean(1), found["mean"], atol=1e-5)


def test_the_async_client_says_the_same(live: Live, client: Client, x: NDArray[np.float32]) -> None:
    async def ask() -> list[Received]:
        async with AsyncClient(live.url) as mine:
            assert await mine.ready()
            assert [one["name"] for one in await mine.models()] == ["digits"]
            assert (await mine.model("digits"))["name"] == "digits"
            with pytest.raises(ServiceError, match="no such model"):
                await mine.predict("nobody", x)
            asks = [mine.predict("digits", x, samples=4, seed=seed, draws=seed == 1) for seed in range(8)]
            return list(await asyncio.gather(*asks))

    for seed, found in enumerate(asyncio.run(ask())):
        expected = client.predict("digits", x, samples=4, seed=seed, draws=seed == 1)
        assert set(found) == set(expected)
        for name in found:
            np.testing.assert_allclose(found[name], expected[name], atol=1e-5)


def test_nobody_there() -> None:
    with Client("http://127.0.0.1:9") as client:
        assert not client.ready()
        with pytest.raises(ServiceError, match=r"cannot ask http://127\.0\.0\.1:9.*is the server running") as caught:
            client.models()
    assert caught.value.status is None

    async def ask() -> None:
        async with AsyncClient("http://127.0.0.1:9") as mine:
            assert not await mine.ready()
            with pytest.raises(ServiceError, match="is the server running"):
                await mine.models()

    asyncio.run(ask())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here", "http://", "http://here:port", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InputError, match="is no address"):
        Client(url)


class Other(http.server.BaseHTTPRequestHandler):
    """Somebody else's server: pages instead of tensors; 502 to whoever asks for one model."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(502 if self.path == "/v1/models/one" else 200)
        self.send_header("content-length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_somebody_elses_server() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with Client(f"http://127.0.0.1:{server.server_port}") as client:
                for ask in (client.models, lambda: client.model("x"), lambda: client.predict("x", [1.0])):
                    with pytest.raises(ServiceError, match="is a dubito server there"):
                        ask()
                with pytest.raises(ServiceError, match=r"answered 502 \(Bad Gateway\)"):
                    client.model("one")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("module", "heavy"), [("client", {"torch"}), ("web.decode", {"torch", "asyncio", "email"})])
def test_the_client_and_processes_that_decode_start_without_what_they_do_not_need(module: str, heavy: set[str]) -> None:
    code = f"import sys, dubito.service.{module}; print({heavy} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert said.stdout == "set()\n", said.stderr
