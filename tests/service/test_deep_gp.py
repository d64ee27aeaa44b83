"""Deep Gaussian processes over HTTP: draws ahead of the requests, seeds that give the same answer, the same as here."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from dubito.models import bayesianize, build, load, save
from dubito.models.manifest import Card, Input, Regression
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Regressed
from dubito.service.engine.bank import bytes_of_draws, drawn

Fixture = Any  # the types of conftest.py
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def write(path: Path, method: str) -> Model:
    torch.manual_seed(0)
    examples = (torch.randn(20, 4), torch.randn(20, 1))
    net = build("deep-gp", inputs=4, outputs=1, layers=3)
    network = bayesianize(net, method, start="prior", inducing=6, examples=examples, task=Regression())
    save(network, path, card=Card(input=Input(shape=(4,))))
    return load(path)


def test_functions_are_drawn_ahead_and_seeds_give_them_again(serve: Fixture, tmp_path: Path) -> None:
    models = {name: write(tmp_path / f"{name}.safetensors", name) for name in ("dgp", "dsvi")}
    files = [tmp_path / f"{name}.safetensors" for name in models]
    live = serve(*files, "--set", "bank_sets=2", "--set", "samples=8")
    assert httpx.get(f"{live.url}/v1/models/dgp", timeout=60).json()["methods"] == ["dgp"]

    def ask(name: str, **options: Any) -> Any:
        body = {"inputs": X.tolist(), **options}
        return httpx.post(f"{live.url}/v1/models/{name}/predict", json=body, timeout=60).json()

    ahead = [ask("dgp", samples=8) for _ in range(8)]
    assert len({reply["seed"] for reply in ahead}) <= 2  # those of the bank
    told = httpx.get(f"{live.url}/metrics").text
    (size,) = [
        float(row.split()[-1])
        for row in told.splitlines()
        if 'dubito_model_bytes{kind="bank"' in row and 'model="dgp"' in row
    ]
    assert size == 2 * 8 * bytes_of_draws(drawn(models["dgp"], 1, 0))
    for name, model in models.items():
        for reply in (ask(name, samples=8), ask(name, samples=8, seed=3), ask(name, samples=0)):
            expected = model.predict(X, reply["samples"], reply["seed"]).summary
            assert isinstance(expected, Regressed)
            for key, values in (("mean", expected.mean), ("epistemic_variance", expected.epistemic_variance)):
                got = [row[key] for row in reply["predictions"]]
                np.testing.assert_allclose(np.ravel(got), values.flatten().tolist(), atol=1e-5, err_msg=name)
