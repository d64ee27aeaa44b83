"""Replies of many rows: the same as those of few, and written with turns for others between their parts."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from dubito.service.metrics import FEW, HistogramSeries
from dubito.service.web.oip import DRAWS as DRAWS_NAME
from dubito.service.web.replies import AT_ONCE, listed, numbers, rows_at_once
from tests.service.conftest import Live, Serve, write_artifact

ROWS, DRAWS = 700, 3


def turns_of(coroutine: Coroutine[Any, Any, Any]) -> tuple[Any, int]:
    """Its result, and how often another task had its turn meanwhile."""

    async def both() -> tuple[Any, int]:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        beside = asyncio.create_task(other())
        found = await coroutine
        beside.cancel()
        return found, turns

    return asyncio.run(both())


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.bool_])
@pytest.mark.parametrize("size", [0, 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE, 3 * AT_ONCE + 7])
def test_numbers_are_those_of_one_list(size: int, kind: type) -> None:
    array: NDArray[Any] = (np.random.default_rng(0).normal(size=size) * 9).astype(kind)
    data, turns = turns_of(numbers(array))
    told = orjson.loads(orjson.dumps({"data": data}, option=orjson.OPT_SERIALIZE_NUMPY))["data"]
    np.testing.assert_array_equal(np.array(told, kind), array)
    assert turns >= (0 if size <= AT_ONCE else -(-size // AT_ONCE) - 1)


def test_parts_become_one_list() -> None:
    rows = [{"a": i, "b": "],["} for i in range(10)]
    data, turns = turns_of(listed(orjson.dumps(rows[i : i + 3]) for i in range(0, 10, 3)))
    assert orjson.loads(orjson.dumps(data)) == rows
    assert turns >= 3
    assert rows_at_once(10**9) == 1


@pytest.fixture(scope="module", params=["tabular", "regression"])
def table(request: pytest.FixtureRequest, serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Live:
    return serve(write_artifact(tmp_path_factory.mktemp("t") / "table.safetensors", kind=request.param))


def ask(live: Live, path: str, **fields: Any) -> Any:
    reply = httpx.post(f"{live.url}{path}", json=fields, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("returns", [["probabilities"], ["samples"], []])
def test_many_rows_are_answered_as_few_are(table: Live, returns: list[str]) -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).tolist()
    own = {"samples": DRAWS, "seed": 5, "return": returns}
    many = ask(table, "/v1/models/table/predict", inputs=x, **own)
    few = ask(table, "/v1/models/table/predict", inputs=x[:2] + x[-2:], **own)
    assert list(many) == list(few)
    assert len(many["predictions"]) == ROWS
    for mine, theirs in zip(many["predictions"][:2] + many["predictions"][-2:], few["predictions"], strict=True):
        assert same(mine, theirs), (mine, theirs)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == pytest.approx(b, rel=1e-4, abs=1e-6) if isinstance(a, float) else a == b


def test_both_protocols_give_the_same_numbers(table: Live) -> None:
    x = np.random.default_rng(0).normal(size=(ROWS, 4))
    mine = ask(table, "/v1/models/table/predict", inputs=x.tolist(), samples=DRAWS, seed=5)["predictions"]
    spec = {"name": "input", "shape": [ROWS, 4], "datatype": "FP32", "data": x.reshape(-1).tolist()}
    parameters = {"samples": DRAWS, "seed": "5"}
    reply = ask(table, "/v2/models/table/infer", inputs=[spec], parameters=parameters)
    theirs = {one["name"]: np.array(one["data"]).reshape(one["shape"]) for one in reply["outputs"]}
    name = "probabilities" if "probabilities" in theirs else "mean"
    np.testing.assert_allclose([row[name] for row in mine], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def digits(serve: Serve, small_digits: Path) -> Live:
    return serve(small_digits)


@pytest.mark.parametrize("draws", [20, 1024])
def test_draws_of_a_row_are_those_of_the_other_protocol(digits: Live, draws: int) -> None:
    """1,024 draws of ten classes are more than one part."""
    x = np.random.default_rng(0).uniform(size=(2, 1, 8, 8))
    own = {"samples": draws, "seed": 5, "return": ["samples"], "timeout_ms": 60_000}
    mine = ask(digits, "/v1/models/digits/predict", inputs=x.tolist(), **own)["predictions"]
    spec = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}
    wanted = {"outputs": [{"name": DRAWS_NAME}], "parameters": {"samples": draws, "seed": "5", "timeout_ms": 60_000}}
    (theirs,) = ask(digits, "/v2/models/digits/infer", inputs=[spec], **wanted)["outputs"]
    found = np.array([row["samples"] for row in mine])
    assert found.shape == (2, draws, 10)
    np.testing.assert_allclose(found, np.array(theirs["data"]).reshape(theirs["shape"]), rtol=1e-4, atol=1e-6)
    assert list(mine[0])[-1] == "samples"


def test_many_values_are_counted_as_they_are_one_by_one() -> None:
    bounds = (0.1, 0.5, 2.0)
    values = np.concatenate([np.random.default_rng(0).uniform(0, 3, 200), bounds]).astype(np.float32)
    one, all_ = HistogramSeries(bounds), HistogramSeries(bounds)
    for value in values.tolist():
        one.observe(value)
    all_.observe_all(values)
    all_.observe_all(values[: FEW - 1])
    for value in values[: FEW - 1].tolist():
        one.observe(value)
    assert all_.counts == one.counts
    assert all_.sum == pytest.approx(one.sum)
