"""Subnetwork Laplace over HTTP: in closed form and by draws, each with its own thresholds, by the same engine."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dubito.models import bayesianize, load, save
from dubito.models.manifest import Calibration, Card, Closed, Input, Regression
from dubito.models.network.linearised import Subnetwork
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.service.client import Client, ServiceError
from tests.small_models import mlp

Fixture = Any  # the types of conftest.py
S = 12


def write(path: Path, regression: bool = False) -> Path:
    """A small linearised network with thresholds that say where they come from."""
    torch.manual_seed(0)
    task = Regression(outputs=2, shift=(1.0, -2.0), scale=(2.0, 0.5)) if regression else None
    net = mlp(4, 16, 2 if regression else 3)
    network = bayesianize(net, "deterministic", task=task)
    root = torch.randn(S, S)
    index = torch.randperm(sum(p.numel() for p in net.parameters()))[:S].sort().values
    entry = SubnetworkEntry(size=S, select="random", prior_precision=0.1, examples=10)
    network.subnetwork = Subnetwork.of(index, torch.linalg.cholesky(root @ root.T / S + 0.1 * torch.eye(S)), entry)
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="epistemic_variance" if regression else "mutual_information",
        thresholds={"epistemic_variance": {0: 0.4}}
        if regression
        else {"mutual_information": {0: 0.3, 8: 0.2}, "entropy": {0: 0.6}},
        quantiles={0: 0.8},
        closed=Closed(measure="epistemic_variance", thresholds={"epistemic_variance": 0.1}, quantile=1.1)
        if regression
        else Closed(measure="entropy", thresholds={"entropy": 0.9}, quantile=0.75),
        method="probit",
    )
    labels = None if regression else ("ant", "bee", "cat")
    save(network, path, card=Card(input=Input(shape=(4,)), labels=labels, calibration=calibration))
    return path


@pytest.fixture(scope="module")
def place(serve: Fixture, tmp_path_factory: pytest.TempPathFactory, make_artifact: Fixture) -> Fixture:
    folder = tmp_path_factory.mktemp("laplace")
    write(folder / "classes.safetensors")
    write(folder / "values.safetensors", regression=True)
    make_artifact(folder / "inducing.safetensors")
    live = serve(*(folder / f"{name}.safetensors" for name in ("classes", "values", "inducing")))
    return live, folder


def ask(place: Fixture, name: str, x: torch.Tensor, **options: object) -> dict[str, Any]:
    reply = httpx.post(f"{place[0].url}/v1/models/{name}/predict", json={"inputs": x.tolist(), **options}, timeout=60)
    told: dict[str, Any] = reply.json()
    return told


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def test_by_default_as_calibrated(place: Fixture) -> None:
    told, model = ask(place, "classes", X), load(place[1] / "classes.safetensors")
    assert (told["method"], told["samples"]) == ("probit", 0)
    expected = model.predict(X, method="probit").summary
    assert isinstance(expected, Classified)
    for row, p, H in zip(told["predictions"], expected.probabilities.tolist(), expected.entropy.tolist(), strict=True):
        assert row["probabilities"] == pytest.approx(p, abs=1e-5)
        assert row["entropy"] == pytest.approx(H, abs=1e-5)
        assert row["mutual_information"] is None
        assert row["expected_entropy"] is None
        assert row["prediction_set"] == [c for c, q in zip(("ant", "bee", "cat"), p, strict=True) if 1 - q <= 0.75]
        assert (row["ood"]["measure"], row["ood"]["threshold"], row["ood"]["samples"]) == ("entropy", 0.9, 0)
        assert row["ood"]["flag"] == (H > 0.9)


def test_by_draws(place: Fixture) -> None:
    model = load(place[1] / "classes.safetensors")
    expected = model.predict(X, 8, 3).summary
    assert isinstance(expected, Classified)
    for options in ({"samples": 8, "seed": 3}, {"samples": 8, "seed": 3, "method": "sampling"}):
        told = ask(place, "classes", X, **options)
        assert (told["method"], told["samples"]) == ("sampling", 8)
        for row, p, mi in zip(
            told["predictions"], expected.probabilities.tolist(), expected.mutual_information.tolist(), strict=True
        ):
            assert row["probabilities"] == pytest.approx(p, abs=1e-5)
            assert row["mutual_information"] == pytest.approx(mi, abs=1e-5)
            assert (row["ood"]["measure"], row["ood"]["threshold"]) == ("mutual_information", 0.2)
    assert ask(place, "classes", X, method="sampling")["samples"] == 20
    assert ask(place, "classes", X, samples="auto")["method"] == "sampling"
    drawn = ask(place, "classes", X, samples=4, **{"return": ["samples", "probabilities"]})
    assert np.shape([row["samples"] for row in drawn["predictions"]]) == (5, 4, 3)
    mean = ask(place, "classes", X, samples=0)
    with torch.no_grad():
        plain = model.network.net(X).softmax(-1)
    assert [row["probabilities"] for row in mean["predictions"]] == [pytest.approx(p, abs=1e-5) for p in plain.tolist()]


def test_values_in_closed_form(place: Fixture) -> None:
    told, model = ask(place, "values", X), load(place[1] / "values.safetensors")
    expected = model.predict(X).summary
    assert isinstance(expected, Regressed)
    assert told["method"] == "probit"
    for row, mean, variance in zip(
        told["predictions"], expected.mean.tolist(), expected.epistemic_variance.tolist(), strict=True
    ):
        assert row["mean"] == pytest.approx(mean, abs=1e-4)
        assert row["epistemic_variance"] == pytest.approx(variance, rel=1e-3)
        assert row["ood"]["threshold"] == 0.1


def test_what_does_not_go_together(place: Fixture) -> None:
    for name, options, said in (
        ("classes", {"method": "probit", "samples": 5}, "takes no draws"),
        ("classes", {"method": "probit", "return": ["samples"]}, "takes no draws"),
        ("classes", {"method": "guess"}, "expected 'probit' or 'sampling'"),
        ("inducing", {"method": "probit"}, "has no closed form"),
    ):
        told = ask(place, name, X, **options)
        assert told["status"] == 400
        assert said in told["detail"]
    assert ask(place, "inducing", X, method="sampling")["method"] == "sampling"


def test_the_protocol_and_the_client(place: Fixture) -> None:
    with Client(place[0].url) as client:
        closed = client.predict("classes", X.numpy())
        assert np.isnan(closed["mutual_information"]).all()
        assert (closed["samples"] == 0).all()
        same = client.predict("classes", X.numpy(), method="probit")
        assert np.array_equal(same["probabilities"], closed["probabilities"])
        drawn = client.predict("classes", X.numpy(), method="sampling", seed=1)
        assert (drawn["samples"] == 20).all()
        assert np.isfinite(drawn["mutual_information"]).all()
        assert client.predict("classes", X.numpy(), samples=3, draws=True)["sample_outputs"].shape == (5, 3, 3)
        with pytest.raises(ServiceError, match="takes no draws"):
            client.predict("classes", X.numpy(), method="probit", draws=True)
        known = client.model("classes")
        assert (known["methods"], known["method"]) == (["subnetwork-laplace"], "probit")
        assert client.model("inducing")["method"] == "sampling"


def test_many_at_once_get_what_each_gets_alone(place: Fixture) -> None:
    from concurrent.futures import ThreadPoolExecutor

    alone = [ask(place, "classes", X[i : i + 1])["predictions"][0]["probabilities"] for i in range(5)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: ask(place, "classes", X[i % 5 : i % 5 + 1], method="probit"), range(20)))
    for i, told in enumerate(found):
        assert told["predictions"][0]["probabilities"] == pytest.approx(alone[i % 5], abs=1e-6)
