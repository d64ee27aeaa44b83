"""Two models on the same inputs: differences with standard errors, and the sentence that they come to."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dubito.models import bayesianize, load, save
from dubito.models.manifest import Card, Difference, Input
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.models.verdict import verdict
from dubito.training.beside import RESAMPLED, Answers, beside_plain, differences, figures_of
from dubito.training.calibrate import calibrate
from dubito.training.config import Calibrate
from dubito.training.data.data import DataSet, Examples, divide
from tests.small_models import mlp

N, C = 2000, 3


def classified(logits: Tensor) -> Classified:
    p = logits.softmax(-1)
    zero = torch.zeros(len(p))
    return Classified(probabilities=p, entropy=zero, expected_entropy=zero, mutual_information=zero)


def pair(better: float) -> tuple[Answers, Answers, Tensor]:
    """Two classifiers that see the truth through noise of their own; the first with so much more of it."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(C, (N,), generator=rng)
    truth = torch.nn.functional.one_hot(y, C).float()
    mine, other = (s * truth + torch.randn(N, C, generator=rng) for s in (1.5 + better, 1.5))
    far = [(torch.randn(N, generator=rng), torch.randn(400, generator=rng) + s) for s in (1 + better, 1.0)]
    return Answers(classified(mine), [far[0]]), Answers(classified(other), [far[1]]), y


def test_differences_have_the_standard_errors_of_paired_means() -> None:
    """Of accuracy, NLL and Brier score these are known: the standard deviation of the pairs' differences over √N."""
    mine, other, y = pair(better=0.5)
    found = differences(mine, other, y, seed=1)
    p, q = (a.inside.probabilities.double() for a in (mine, other))  # type: ignore[union-attr]
    rows = torch.arange(N)
    truth = torch.nn.functional.one_hot(y, C).double()
    pairs = {
        "accuracy": (p.argmax(-1) == y).double() - (q.argmax(-1) == y).double(),
        "nll": q[rows, y].log() - p[rows, y].log(),
        "brier": (p - truth).square().sum(-1) - (q - truth).square().sum(-1),
    }
    for name, d in pairs.items():
        assert found[name].value == pytest.approx(float(d.mean()), rel=1e-4)
        spread = 5 / math.sqrt(2 * RESAMPLED)  # of a standard deviation of so many
        assert found[name].se == pytest.approx(float(d.std()) / math.sqrt(N), rel=spread)
    assert found["auroc"].value > 2 * found["auroc"].se > 0
    assert set(found) == {"accuracy", "nll", "ece", "brier", "auroc"}


def test_a_model_does_not_differ_from_itself() -> None:
    mine, _, y = pair(better=0.0)
    assert all((d.value, d.se) == (0, 0) for d in differences(mine, mine, y, seed=0).values())


@pytest.mark.parametrize(
    "given", [None, *(pytest.param(m, marks=pytest.mark.slow) for m in ("knn", "mutual_information"))]
)
def test_the_plain_network_has_the_choice_of_measures_that_the_model_has(tmp_path: Path, given: Any) -> None:
    """A posterior without spread is its plain network, and so is its AUROC; by entropy alone it was far from it."""
    x = torch.randn(1000, 1) * torch.tensor([1.0, -1] * 4) + 0.1 * torch.randn(1000, 8)  # other orders are far away
    parts = divide(DataSet(Examples(x, (x[:, 0] > 0).long()), None, ("a", "b")), 0.1, 0.3, 0.2, seed=0)
    net = mlp(8, 16, 16, 2)
    network = bayesianize(net, "ffg-w", spread=1e-9)
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(8,))))
    settings = Calibrate(measure=given)
    model = calibrate(load(tmp_path / "m.safetensors"), parts.calibration, settings, train=parts.train)
    plain = bayesianize(net, "deterministic")
    own, beside = beside_plain(model, plain, parts, settings, tmp_path / "out.safetensors", 0)
    if given == "mutual_information":  # a plain network has none, and knn was not asked for
        assert beside.measure in ("entropy", "max_probability", "energy")
        return
    assert beside.measure == "knn"  # 0.79 to 0.85 for ten seeds, where entropy has 0.28 to 0.60
    assert beside.tempered["auroc"] > 0.7
    assert own["auroc"] == pytest.approx(beside.tempered["auroc"], abs=5 * beside.differences["auroc"].se + 0.01)


def test_of_regression() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.randn(N, 1, generator=rng)
    answers = [
        Answers(Regressed(y + s * torch.randn(N, 1, generator=rng), torch.zeros(N, 1), torch.full((N, 1), s**2)), [])
        for s in (0.5, 1.0)
    ]
    found = differences(answers[0], answers[1], y, seed=0)
    assert found["nll"].value == pytest.approx(math.log(0.5), abs=5 * found["nll"].se)
    assert found["rmse"].value == pytest.approx(-0.5, abs=5 * found["rmse"].se)
    assert figures_of(answers[0], y).keys() == {"rmse", "nll"}


SAID = {
    "better and worse": (
        {"accuracy": (-0.004, 0.001), "nll": (-0.02, 0.003), "ece": (0.001, 0.002)},
        "Against X, this model is better at NLL (-0.02 ± 0.003); worse at accuracy (-0.40 ± 0.10 points); "
        "no different at ECE.",
    ),
    "all better": ({"auroc": (0.05, 0.01)}, "Against X, this model is better at AUROC (+0.05 ± 0.01)."),
    "all worse": (
        {"nll": (0.5, 0.1), "brier": (0.1, 0.01)},
        "X is better at everything: NLL (+0.5 ± 0.1) and Brier score (+0.1 ± 0.01). Serve that one instead.",
    ),
    "nothing better": (
        {"nll": (0.5, 0.1), "ece": (0.0, 0.01)},
        "Against X, this model is worse at NLL (+0.5 ± 0.1); no different at ECE. It is better at nothing: consider "
        "serving the other one.",
    ),
    "no difference": ({"nll": (0.1, 0.1)}, "Against X, this model is no different: at NLL within two standard errors."),
    "nothing measured": ({}, ""),
}


@pytest.mark.parametrize("case", SAID)
def test_the_verdict(case: str) -> None:
    found, expected = SAID[case]
    assert verdict({name: Difference(value=v, se=se) for name, (v, se) in found.items()}, "X") == expected
