"""Global inducing points over HTTP: a bank by default, seeds that give the same answer, and the console's facts."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from dubito.models import bayesianize, load, save
from dubito.models.manifest import Card, Input, Regression
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Regressed
from dubito.service.engine.bank import bytes_of_draws, drawn
from tests.small_models import mlp

Fixture = Any  # the types of conftest.py
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def write(path: Path, method: str, **options: Any) -> Model:
    torch.manual_seed(0)
    examples = (torch.randn(20, 4), torch.randn(20, 1))
    network = bayesianize(mlp(4, 8, 8, 1), method, inducing=6, examples=examples, task=Regression(), **options)
    save(network, path, card=Card(input=Input(shape=(4,))))
    return load(path)


def test_weights_are_drawn_ahead_and_seeds_give_them_again(serve: Fixture, tmp_path: Path) -> None:
    model = write(tmp_path / "points.safetensors", "gi", prior="scale")
    live = serve(tmp_path / "points.safetensors", "--set", "bank_sets=2", "--set", "samples=8")
    about = httpx.get(f"{live.url}/v1/models/points", timeout=60).json()
    assert about["methods"] == ["gi"]

    def ask(**options: Any) -> Any:
        return httpx.post(f"{live.url}/v1/models/points/predict", json={"inputs": X.tolist(), **options}).json()

    replies = [ask(samples=8) for _ in range(10)]
    assert len({reply["seed"] for reply in replies}) <= 2  # those of the bank
    told = httpx.get(f"{live.url}/metrics").text
    (size,) = [float(row.split()[-1]) for row in told.splitlines() if 'dubito_model_bytes{kind="bank"' in row]
    assert size == 2 * 8 * bytes_of_draws(drawn(model, 1, 0))
    for reply, seed in ((replies[0], replies[0]["seed"]), (ask(samples=8, seed=3), 3), (ask(samples=0), None)):
        expected = model.predict(X, reply["samples"], seed).summary
        assert isinstance(expected, Regressed)
        means, spreads = ([row[name] for row in reply["predictions"]] for name in ("mean", "epistemic_variance"))
        np.testing.assert_allclose(np.ravel(means), expected.mean.flatten().tolist(), atol=1e-5)
        np.testing.assert_allclose(np.ravel(spreads), expected.epistemic_variance.flatten().tolist(), atol=1e-5)
        assert np.min(spreads) > 0 or seed is None


def test_other_kinds_of_points_answer_as_the_library_does(serve: Fixture, tmp_path: Path) -> None:
    models = {name: write(tmp_path / f"{name}.safetensors", name) for name in ("li", "fac-gi", "rand-gi")}
    live = serve(*(tmp_path / f"{name}.safetensors" for name in models))
    asked = {"inputs": X.tolist(), "samples": 6, "seed": 1}
    for name, model in models.items():
        reply = httpx.post(f"{live.url}/v1/models/{name}/predict", json=asked, timeout=60).json()
        expected = model.predict(X, 6, 1).summary
        assert isinstance(expected, Regressed)
        means = [row["mean"] for row in reply["predictions"]]
        np.testing.assert_allclose(np.ravel(means), expected.mean.flatten().tolist(), atol=1e-5, err_msg=name)
