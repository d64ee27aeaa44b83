"""Every metric against torchmetrics, or against its definition in plain loops; then the edges, by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    binary_roc,
    multiclass_accuracy,
    multiclass_calibration_error,
)
from torchmetrics.functional.regression import mean_squared_error

from dubito.training.metrics import (
    BINS,
    accuracy,
    aupr,
    auroc,
    brier,
    ece,
    gaussian_nll,
    nll,
    rejection,
    reliability,
    rmse,
    roc,
    standard_error,
)


def predicted(seed: int, N: int = 500, C: int = 7) -> tuple[Tensor, Tensor]:
    """Probabilities that know something of the classes, and are too sure of it."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(C, (N,), generator=rng)
    logits = 3 * torch.randn(N, C, generator=rng)
    logits[torch.arange(N), y] += 2
    return logits.softmax(-1), y


def scored(seed: int, levels: int) -> tuple[Tensor, Tensor]:
    """Scores inside and outside, of few levels, so that many tie."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (150,), generator=rng) / levels, torch.randint(
        levels + 3, (90,), generator=rng
    ) / levels


def truth(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """As torchmetrics wants them; it takes scores outside [0, 1] for logits, so they are brought into it."""
    scores = torch.cat([inside, outside])
    return scores / scores.max(), torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_classification_agrees_with_torchmetrics(seed: int) -> None:
    p, y = predicted(seed)
    assert accuracy(p, y) == pytest.approx(float(multiclass_accuracy(p, y, 7, average="micro")))
    assert ece(p, y) == pytest.approx(float(multiclass_calibration_error(p, y, 7, n_bins=BINS)), abs=1e-6)
    assert nll(p, y) == pytest.approx(float(torch.nn.functional.nll_loss(p.log(), y)), rel=1e-5)
    by_hand = [sum((float(p[i, c]) - (c == int(y[i]))) ** 2 for c in range(7)) for i in range(len(y))]
    assert brier(p, y) == pytest.approx(sum(by_hand) / len(by_hand))


@pytest.mark.parametrize("levels", [1, 5, 100_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_detection_agrees_with_torchmetrics(seed: int, levels: int) -> None:
    inside, outside = scored(seed, levels)
    scores, positive = truth(inside, outside)
    assert auroc(inside, outside) == pytest.approx(float(binary_auroc(scores, positive)), abs=1e-6)
    assert aupr(inside, outside) == pytest.approx(float(binary_average_precision(scores, positive)), abs=1e-6)
    theirs = binary_roc(scores, positive)
    for mine, other in zip(roc(inside, outside), theirs[:2], strict=True):
        assert mine.tolist() == pytest.approx(other.tolist(), abs=1e-6)


def test_auroc_is_the_chance_of_the_right_order() -> None:
    inside, outside = scored(3, 5)
    pairs = [(float(o > i) + float(o >= i)) / 2 for i in inside for o in outside]
    assert auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs))


def test_detection_by_hand() -> None:
    low, high, same = torch.tensor([0.1, 0.2]), torch.tensor([0.7, 0.9]), torch.full((3,), 0.5)
    assert (auroc(low, high), aupr(low, high)) == (1, 1)
    assert auroc(high, low) == 0
    assert aupr(high, low) == pytest.approx((1 / 3 + 2 / 4) / 2)  # found at ranks 3 and 4
    assert auroc(same, same[:1]) == 0.5
    assert aupr(same, same[:1]) == 0.25  # all taken at once: precision is the share of positives
    assert auroc(torch.tensor([0.5, 0.1]), torch.tensor([0.5])) == 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_confidences_at_the_edges_belong_to_the_bin_below(dtype: torch.dtype) -> None:
    def bins(p: Tensor) -> list[int]:
        return [i for i, bar in enumerate(reliability(p, torch.tensor([0]))) if bar.share]

    for b in range(1, BINS + 1):
        edge = torch.tensor([[b / BINS, 0]], dtype=dtype)
        assert bins(edge) == [b - 1], f"p = {b}/{BINS}"
        if b < BINS:
            assert bins(torch.nextafter(edge, torch.ones((), dtype=dtype))) == [b]


def test_reliability_by_hand() -> None:
    p = torch.tensor([[1.0, 0.0], [0.98, 0.02], [0.6, 0.4], [0.39, 0.61]])
    y = torch.tensor([0, 1, 0, 1])
    bars = reliability(p, y)
    assert len(bars) == BINS
    assert [bar.low for bar in bars[1:]] == [bar.high for bar in bars[:-1]]
    full = {round(bar.high * BINS): bar for bar in bars if bar.share}
    assert full.keys() == {9, 10, 15}  # 0.6 is the upper edge of the ninth
    assert (full[15].confidence, full[15].accuracy, full[15].share) == pytest.approx((0.99, 0.5, 0.5))
    assert (full[9].confidence, full[9].accuracy, full[9].share) == pytest.approx((0.6, 1, 0.25))
    empty = next(bar for bar in bars if not bar.share)
    assert (empty.confidence, empty.accuracy) == (0, 0)
    assert ece(p, y) == pytest.approx(0.5 * 0.49 + 0.25 * 0.4 + 0.25 * 0.39)


def test_certainty() -> None:
    p, y = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    assert accuracy(p, y) == 0.5
    assert ece(p, y) == 0.5
    assert brier(p, y) == 1
    assert nll(p, y) == pytest.approx(-math.log(torch.finfo(torch.float32).tiny) / 2)  # wrong and sure, but finite


def test_one_class() -> None:
    p, y = torch.ones(3, 1), torch.zeros(3).long()
    assert (accuracy(p, y), nll(p, y), brier(p, y), ece(p, y)) == (1, 0, 0, 0)


def test_rejection_against_sorting() -> None:
    rng = np.random.default_rng(0)
    right, score = torch.from_numpy(rng.random(50) < 0.7), torch.from_numpy(rng.random(50))
    rejected, kept = rejection(right, score)
    order = score.argsort(descending=True)
    for i in range(50):
        assert float(rejected[i]) == i / 50
        assert float(kept[i]) == pytest.approx(float(right[order[i:]].double().mean()))


def test_rejection_among_ties_keeps_the_groups_mean() -> None:
    right, score = torch.tensor([True, False, True, False]), torch.tensor([0.5, 0.5, 0.1, 0.5])
    assert rejection(right, score)[1].tolist() == pytest.approx([0.5, (1 + 2 / 3) / 3, (1 + 1 / 3) / 2, 1])
    same = torch.zeros(4)
    assert rejection(right, same)[1].tolist() == pytest.approx([0.5] * 4)


def test_regression_agrees_with_torch() -> None:
    rng = torch.Generator().manual_seed(0)
    mean, y = torch.randn(40, 3, generator=rng), torch.randn(40, 3, generator=rng)
    variance = torch.rand(40, 3, generator=rng) + 0.1
    assert rmse(mean, y) == pytest.approx(
        float(mean_squared_error(mean.flatten(), y.flatten(), squared=False)), rel=1e-5
    )
    theirs = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(-1).mean()
    assert gaussian_nll(mean, variance, y) == pytest.approx(float(theirs), rel=1e-5)
    assert gaussian_nll(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1)) == pytest.approx(
        math.log(2 * math.pi) / 2
    )


def test_the_standard_error_counts_blocks() -> None:
    """Rows that share a draw err together: their mean spreads as the draws do, however many rows there are."""
    rng = torch.Generator().manual_seed(0)
    blocks, rows, repeats = 20, 50, 4000
    shared = torch.randn(repeats, 1, blocks, generator=rng).expand(-1, rows, -1)
    own = torch.randn(repeats, rows, blocks, generator=rng)
    values = (shared + own).flatten(1)  # row i belongs to block i mod 20
    spread = float(values.mean(1).std())
    errors = torch.tensor([standard_error(row, blocks) for row in values[:400]])
    # the mean of 400 standard errors, each of 19 degrees of freedom; E[s] is a little below σ
    assert float(errors.mean()) == pytest.approx(spread, rel=0.05)
    assert spread == pytest.approx(math.sqrt((1 + 1 / rows) / blocks), rel=4 / math.sqrt(2 * repeats))


def test_the_standard_error_of_few_rows() -> None:
    assert standard_error(torch.tensor([1.0, 0.0, 1.0, 1.0]), 20) == pytest.approx(np.std([1, 0, 1, 1], ddof=1) / 2)
    assert math.isnan(standard_error(torch.tensor([1.0]), 20))
