"""Draws made ahead: their seeds give them again, they are replaced in time, and who names a seed gets that one."""

import re
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dubito.models import load
from dubito.models.embedded import embedded
from dubito.models.manifest import Manifest
from dubito.models.predictions.model import Model
from dubito.service.engine.bank import Bank, bytes_of_draws, drawn
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from tests.small_models import bayesian_mlp

X = np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)
METHODS: dict[str, dict[str, Any]] = {
    "ffg-u": {"inducing": 4},
    "fcg-u": {"inducing": 3},
    "ensemble-u": {"inducing": 4, "members": 3, "lam_max": 0.1},
    "ffg-w": {},
    "mc-dropout": {},
    "whvi": {},
    "gi": {"inducing": 4, "prior": "scale"},
    "fac-gi": {"inducing": 4},
}


def model_of(method: str) -> Model:
    torch.manual_seed(0)
    network = bayesian_mlp((5, 6, 3), method, **METHODS[method]).eval()
    card = load(embedded("digits")).card.model_copy(update={"input": None})
    return Model(network, Manifest.model_construct(card=card))


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_of_the_bank_gives_its_answer_again(method: str) -> None:
    model = model_of(method)
    bank = Bank(model, sets=2, samples=6, seconds=60)
    engine, plain = Engine(model, (1, 4), bank=bank), Engine(model, (1, 4))
    x = X[:, 0, 0, :5].copy()
    for K in (1, 4, 6):
        (a,) = engine.answer([PredictRequest(x, K, None, K, 0.5)])
        assert isinstance(a, PredictResult)
        assert a.seed in {one.seed for one in bank.sets}
        (b,) = plain.answer([PredictRequest(x, K, a.seed, K, 0.5)])
        assert isinstance(b, PredictResult)
        for name, column in a.columns.items():
            np.testing.assert_allclose(column, b.columns[name], atol=1e-5, err_msg=method)
    bank.close()


@pytest.fixture(scope="module")
def digits() -> Model:
    return load(embedded("digits"))


def test_more_than_was_made_ahead_and_named_seeds_are_drawn_anew(digits: Model) -> None:
    bank = Bank(digits, sets=2, samples=4, seconds=60)
    engine = Engine(digits, (1, 4), bank=bank)
    seeds = {one.seed for one in bank.sets}
    many, named, auto = (
        engine.answer([PredictRequest(X, 5, None, 5, 0.5)])[0],
        *engine.answer([PredictRequest(X, 4, 11, 4, 0.5), PredictRequest(X, "auto", None, 4, 0.5)]),
    )
    assert isinstance(many, PredictResult)
    assert isinstance(named, PredictResult)
    assert isinstance(auto, PredictResult)
    assert many.seed not in seeds
    assert named.seed == 11
    assert auto.seed in seeds
    bank.close()


def test_no_seed_is_in_use_for_longer_than_was_said(digits: Model) -> None:
    bank = Bank(digits, sets=2, samples=2, seconds=0.2)
    last: dict[int, float] = {}
    first: dict[int, float] = {}
    end = time.monotonic() + 30
    while len(first) <= 8 and time.monotonic() < end:
        before = time.monotonic()
        taken = bank.take(2)
        assert taken is not None
        first.setdefault(taken.seed, time.monotonic())
        last[taken.seed] = before
        time.sleep(0.002)
    assert len(first) > 8  # soon: each of two is replaced after 0.2 s at the latest
    assert max(last[seed] - first[seed] for seed in first) <= 0.2
    bank.close()


def test_what_nobody_uses_is_kept(digits: Model) -> None:
    bank = Bank(digits, sets=2, samples=2, seconds=0.05)
    seeds = [one.seed for one in bank.sets]
    time.sleep(0.3)
    assert [one.seed for one in bank.sets] == seeds
    bank.close()


def test_factored_layers_keep_what_their_samples_differ_in_only(digits: Model) -> None:
    bank = Bank(digits, sets=3, samples=5, seconds=60)
    expected = 0
    for name, layer in digits.network.layers.items():
        d_out, d_in = layer.geometry.shape
        factors = digits.factors.layers[name]
        B, noise = factors.B, factors.noise  # type: ignore[attr-defined]
        outside = 0 if B.shape[0] == B.shape[1] else d_out
        expected += 15 * 4 * (d_out * d_in if noise == "exact" else d_out * B.shape[1] + outside)
    assert bank.bytes == expected
    bank.close()


def test_a_server_with_a_bank(serve: Any, convolved_digits: Path) -> None:
    server = serve(convolved_digits, "--set", "sample_mode=bank", "--set", "bank_sets=2", "--set", "bank_samples=8")
    inputs = X.tolist()
    ask = {"inputs": inputs, "samples": 8}
    replies = [httpx.post(f"{server.url}/v1/models/digits/predict", json=ask).json() for _ in range(12)]
    seeds = {reply["seed"] for reply in replies}
    assert len(seeds) <= 2
    again = httpx.post(f"{server.url}/v1/models/digits/predict", json={**ask, "seed": replies[0]["seed"]}).json()
    mine, theirs = (np.array([row["probabilities"] for row in r["predictions"]]) for r in (replies[0], again))
    np.testing.assert_allclose(mine, theirs, atol=1e-5)
    told = httpx.get(f"{server.url}/metrics").text
    assert 'dubito_model_bytes{kind="bank",model="digits"}' in told
    sizes = dict(re.findall(r'dubito_device_memory_bytes{kind="(\w+)"} (\S+)', told))
    assert float(sizes["bank"]) == 2 * 8 * bytes_of_draws(drawn(load(convolved_digits), 1, 0))
