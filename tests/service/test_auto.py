"""`samples: "auto"` over HTTP: as good as many draws within its tolerance, for a fraction of the draws."""

from typing import Any

import httpx
import numpy as np

from benchmarks.auto import inputs
from dubito.models import load
from dubito.models.embedded import embedded

Fixture = Any  # the types of conftest.py


def test_auto_is_within_its_tolerance_of_many_draws(live: Fixture) -> None:
    """For some of the digits that the model was tested with, each answer from draws of its own; `benchmarks.auto`
    has the share of all of them beside 1,024 draws, which is promised to be 95 %. A probability of 256 draws has a
    standard error of at most 0.03, where draws are 0 or 1, and of 0.006 here."""
    x = inputs(load(embedded("digits")))["digits"][:6]

    def ask(samples: object, seed: int) -> list[dict[str, Any]]:
        body = {"inputs": x.tolist(), "samples": samples, "seed": seed, "timeout_ms": 300_000}
        reply = httpx.post(f"{live.url}/v1/models/digits/predict", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        rows: list[dict[str, Any]] = reply.json()["predictions"]
        return rows

    auto, whole = ask("auto", 1), ask(256, 2)
    leading = [row["class"] for row in auto]
    settled = [
        abs(mine["max_probability"] - theirs["probabilities"][c]) <= 0.05
        for mine, theirs, c in zip(auto, whole, leading, strict=True)
    ]
    drawn = [row["samples"] for row in auto]
    assert all(settled)
    assert min(drawn) == 8
    assert np.mean(drawn) < 20
