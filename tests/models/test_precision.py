"""Smaller numbers in the file, the same answers: accuracy and calibration of a trained network by precision."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.models import load, save
from dubito.models.manifest import Precision
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified
from tests.small_models import bayesian_mlp

K = 64
TOLERANCE = 0.3  # points, of accuracy and of ECE: at least 3 standard deviations of what other draws would change
# which of a display's seven bars each digit lights: top, both upper, middle, both lower, bottom
DIGITS = ("1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011")
# rows and columns of the bars on 8 × 8 pixels
BARS = (
    (slice(1, 2), slice(2, 6)),
    (slice(1, 4), slice(2, 3)),
    (slice(1, 4), slice(5, 6)),
    (slice(3, 4), slice(2, 6)),
    (slice(3, 7), slice(2, 3)),
    (slice(3, 7), slice(5, 6)),
    (slice(6, 7), slice(2, 6)),
)


def glyphs(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Digits with bars of uneven brightness, buried in noise: (n, 64) and (n,)."""
    rng = torch.Generator().manual_seed(seed)
    lit = torch.tensor([[int(bar) for bar in digit] for digit in DIGITS])
    y = torch.randint(10, (n,), generator=rng)
    brightness = lit[y] * (0.6 + 0.4 * torch.rand(n, 7, generator=rng))
    x = torch.zeros(n, 8, 8)
    for bar, (rows, columns) in enumerate(BARS):
        x[:, rows, columns] = torch.maximum(x[:, rows, columns], brightness[:, bar, None, None])
    return (x + 0.22 * torch.randn(n, 8, 8, generator=rng)).flatten(1), y


def train(x: Tensor, y: Tensor) -> BayesianNetwork:
    """FFG-U by the ELBO from the prior, the weight of the KL rising over the first half."""
    torch.manual_seed(0)
    network = bayesian_mlp((64, 64, 10), "ffg-u", inducing=24, start="prior")
    adam = torch.optim.Adam(network.parameters(), lr=3e-2)
    steps = 200
    for step in range(steps):
        rows = torch.randint(len(x), (250,))
        loss = F.cross_entropy(network(x[rows]), y[rows]) + min(1, 2 * step / steps) * network.kl() / len(x)
        adam.zero_grad()
        loss.backward()
        adam.step()
    return network


def scores(model: Model, x: Tensor, y: Tensor, seed: int) -> tuple[float, float]:
    """Accuracy and ECE (15 bins) in points."""
    summary = model.predict(x, K, seed, max_rows=1 << 17).summary
    assert isinstance(summary, Classified)
    confidence, guess = summary.probabilities.max(1)
    right = (guess == y).double()
    bins = (confidence * 15).ceil().long().clamp(1, 15)
    gap = torch.zeros(16, dtype=torch.float64).index_add(0, bins, confidence.double() - right)
    return 100 * float(right.mean()), 100 * float(gap.abs().sum()) / len(y)


@dataclass(frozen=True)
class Trained:
    network: BayesianNetwork
    x: Tensor
    y: Tensor
    full: tuple[float, float]  # accuracy and ECE in float32
    spread: tuple[float, float]  # what other draws change: their standard deviations over seeds


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    network = train(*glyphs(60_000, seed=0))
    x, y = glyphs(3_000, seed=1)
    path = tmp_path_factory.mktemp("float32") / "model"
    save(network, path)
    accuracies, errors = zip(*(scores(load(path), x, y, seed) for seed in range(4)), strict=True)
    spread = statistics.stdev(accuracies), statistics.stdev(errors)
    return Trained(network, x, y, (accuracies[0], errors[0]), spread)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [p for p in get_args(Precision) if p != "float32"])
def test_accuracy_and_calibration_survive(precision: Precision, trained: Trained, tmp_path: Path) -> None:
    """With the float32 model's own draws, so that all that differs is the rounding of what is stored."""
    save(trained.network, tmp_path / "model", precision=precision)
    found = scores(load(tmp_path / "model"), trained.x, trained.y, seed=0)
    print()
    for name, before, after, spread in zip(("accuracy", "ECE"), trained.full, found, trained.spread, strict=True):
        print(f"{name}: float32 {before:.2f}, {precision} {after:.2f}; from seed to seed ± {spread:.3f} points")
        assert 3 * spread <= TOLERANCE
        assert abs(after - before) <= TOLERANCE
    assert 90 < trained.full[0] < 97  # neither lost nor trivial
