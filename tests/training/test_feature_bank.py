"""The bank that calibration makes, the measure that it chooses, and what the commands say of both."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from dubito.cli import app
from dubito.models import bayesianize, load, save
from dubito.models.errors import DubitoError
from dubito.models.manifest import NEW_MEASURES, Card, Input
from dubito.models.names import Measure
from dubito.models.predictions.answers import scores
from dubito.models.predictions.model import Model
from dubito.training.calibrate import CalibrationError, calibrate, choose_measure, try_bank
from dubito.training.config import Calibrate
from dubito.training.data.data import Examples
from dubito.training.data.spoil import spoil, to_spoil
from dubito.training.evaluation.predicting import GRID, ChosenPredictive
from dubito.training.feature_bank import centres, find_layer, make_bank
from dubito.training.metrics import auroc, placements
from tests.few import few
from tests.small_models import mlp, stored

D = 16


def blobs(n: int, seed: int) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=rng)
    means = 2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(5))
    return Examples(means[y] + 0.3 * torch.randn(n, 6, generator=rng), y)


def model_of(path: Path, method: str = "ffg-u", **options: object) -> Model:
    torch.manual_seed(2)
    net = mlp(6, 24, D, 3)
    return stored(bayesianize(net, method, **options), path, input=Input(shape=(6,)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(tmp_path_factory.mktemp("made") / "m.safetensors", inducing=4, sigma_max=0.6, spread=0.3)


def test_centres_are_the_means_of_separate_clusters() -> None:
    rng = torch.Generator().manual_seed(0)
    means = 20 * torch.randn(6, 8, generator=rng)
    x = means.repeat(50, 1) + 0.1 * torch.randn(300, 8, generator=rng)
    for seed in range(4):
        found = centres(x, 6, seed)
        assert torch.equal(found, centres(x, 6, seed))
        nearest = torch.cdist(x, found).argmin(1)
        for j in nearest.unique().tolist():  # each is the mean of the inputs that are nearest to it
            assert torch.allclose(found[j], x[nearest == j].mean(0), atol=1e-4)
    assert centres(x, 500, 0) is x
    # more points leave less: the mean squared distance falls
    left = [float(torch.cdist(x, centres(x, N, 0)).amin(1).square().mean()) for N in (2, 6, 60)]
    assert left[0] > left[1] > left[2]


def test_no_point_is_left_without_inputs() -> None:
    """Of equal inputs, points that begin at the same place are moved to where inputs are far from all points."""
    x = torch.cat([torch.zeros(95, 3), torch.eye(3), 5 * torch.ones(2, 3)])
    found = centres(x, 5, 0)
    assert found.isfinite().all()
    assert float(torch.cdist(x, found).amin(1).max()) < 0.5


def test_placements_have_the_mean_and_the_standard_error_of_the_auroc() -> None:
    """The standard error of a paired difference, against 400 draws of the examples again: within a quarter of it."""
    rng = torch.Generator().manual_seed(0)
    n = 300
    inside = torch.randn(n, generator=rng).round(decimals=1)
    outside = 1.2 + torch.randn(n, generator=rng).round(decimals=1)
    noisy = [x + 0.7 * torch.randn(n, generator=rng) for x in (inside, outside)]
    a, b = torch.stack(placements(inside, outside)), torch.stack(placements(*noisy))
    for shares, pair in ((a, (inside, outside)), (b, noisy)):
        assert torch.allclose(shares.mean(1), torch.tensor(auroc(*pair), dtype=torch.double))
    error = float(((a - b).var(1) / n).sum().sqrt())
    again = []
    for _ in range(400):
        i, j = (torch.randint(n, (n,), generator=rng) for _ in range(2))
        again.append(auroc(inside[i], outside[j]) - auroc(noisy[0][i], noisy[1][j]))
    assert abs(error / float(np.std(again)) - 1) < 0.25  # 400 draws: a relative error of 0.035


@pytest.mark.usefixtures("choice_by_one_request")
def test_another_measure_than_entropy_is_chosen_only_where_it_is_clearly_better(model: Model) -> None:
    held, train = blobs(400, 1), blobs(600, 2)
    banked = try_bank(model.to("cpu"), train, Calibrate(), 0)
    chosen, found = choose_measure(banked, held, 0)
    rng = torch.Generator().manual_seed(0)
    x = to_spoil(held.x, rng)
    predictive = ChosenPredictive.of(banked, 20, "sampling")
    inside = scores(predictive.predict(banked, x, 0))
    outside = [scores(predictive.predict(banked, spoiled, 0)) for spoiled in spoil(x, rng)]
    pairs = {m: [(inside[m].numpy(), far[m].numpy()) for far in outside] for m in inside}
    by_hand = {m: np.mean([_auroc(*pair) for pair in each]) for m, each in pairs.items()}
    assert found.keys() == by_hand.keys() >= {"entropy", "energy", "knn"}
    for m, value in by_hand.items():
        assert abs(found[m] - value) < 1e-6
    # entropy, unless another beats it by two standard errors: DeLong's, by counting every pair of examples
    beats = {m: [(far > near[:, None]) + 0.5 * (far == near[:, None]) for near, far in pairs[m]] for m in pairs}
    won = {m: np.mean(kinds, 0) for m, kinds in beats.items()}
    expected: Measure = "entropy"
    for m in sorted(set(won) - {"entropy"}, key=lambda m: (m in NEW_MEASURES, -by_hand[m])):
        gain = won[m] - won[expected]
        error = np.sqrt(sum(gain.mean(axis).var(ddof=1) / len(held.x) for axis in (0, 1)))
        expected = m if gain.mean() > 2 * error else expected
    assert chosen == expected
    # a measure that is asked for is taken, whatever it is worth
    assert choose_measure(banked, held, 0, given="max_probability") == ("max_probability", found)
    with pytest.raises(CalibrationError, match="measure is 'epistemic_variance'; this model has entropy"):
        choose_measure(banked, held, 0, given="epistemic_variance")


def _auroc(inside: np.ndarray, outside: np.ndarray) -> float:
    above = (outside[:, None] > inside).mean() + 0.5 * (outside[:, None] == inside).mean()
    return float(above)


@pytest.mark.usefixtures("choice_by_one_request")
def test_calibration_keeps_the_bank_that_it_goes_by(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dubito.training.calibrate.CALIBRATION_REQUESTS", 20)
    held, train = blobs(300, 1), blobs(500, 2)
    made = calibrate(model, held, Calibrate(measure="knn", bank=32), train=train)
    assert model.network.feature_bank is None  # a copy was changed
    bank, promised = made.network.feature_bank, made.card.calibration
    assert bank is not None
    assert promised is not None
    assert (bank.entry.points, bank.entry.features) == (32, D)
    assert promised.measure == "knn"
    assert set(promised.thresholds["knn"]) == {0, *GRID}
    assert promised.auto is not None
    assert "knn" in promised.auto.thresholds
    path = tmp_path / "knn.safetensors"
    assert save(made, path).format == 3
    again = load(path)
    flagged = [
        float(
            (scores(again.predict(blobs(2000, 9).x, K, 4).summary)["knn"] > promised.thresholds["knn"][K])
            .float()
            .mean()
        )
        for K in (1, 8)
    ]
    assert all(abs(share - 0.05) < 5 * (0.05 * 0.95 * (1 / 300 + 1 / 2000)) ** 0.5 for share in flagged)
    few(monkeypatch)
    # on other data the bank stays; a measure that needs none drops it
    kept = calibrate(again, held, Calibrate(measure="knn"))
    assert kept.network.feature_bank is not None
    assert torch.equal(kept.network.feature_bank.levels, bank.levels)
    dropped = calibrate(again, held, Calibrate(measure="energy"))
    assert dropped.network.feature_bank is None
    assert dropped.card.calibration is not None
    assert set(dropped.card.calibration.thresholds) == {"entropy", "mutual_information", "max_probability", "energy"}
    assert save(dropped, path).feature_bank is None


def test_members_have_points_of_their_own(tmp_path: Path) -> None:
    model = model_of(tmp_path / "m.safetensors", "ensemble-u", members=3, inducing=4, spread=0.5)
    bank = make_bank(model, blobs(200, 2), 30, 0)
    assert bank is not None
    assert (bank.entry.members, bank.entry.points) == (3, 10)
    assert not torch.equal(bank.levels[0], bank.levels[1])


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x[:, None]).mean(-1)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("few_here")
def test_a_network_without_such_a_layer_has_no_bank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.safetensors"
    net = Pooled()
    save(bayesianize(net, "ffg-u", inducing=2), path, card=Card(input=Input(shape=(6,))))
    model = load(path, net)
    assert find_layer(model, torch.randn(1, 6)) is None
    made = calibrate(model, blobs(60, 1), Calibrate(), train=blobs(50, 2))
    assert "knn is not among the OOD measures" in " ".join(capsys.readouterr().err.split())
    assert made.card.calibration is not None
    assert "knn" not in made.card.calibration.measures
    with pytest.raises(CalibrationError, match="not made by one linear layer"):
        calibrate(model, blobs(60, 1), Calibrate(measure="knn"), train=blobs(50, 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Calibrate(measure="knn"), "calibrate on the data that the model was trained on"),
        (Calibrate(measure="knn", bank=0), "bank is 0"),
    ],
)
def test_a_bank_that_cannot_be_made_is_an_error(settings: Calibrate, said: str, model: Model) -> None:
    with pytest.raises(DubitoError, match=said):
        calibrate(model, blobs(60, 1), settings)


@pytest.mark.usefixtures("few_here")
def test_the_commands_know_both_measures(model: Model, tmp_path: Path) -> None:
    data, plain, out = tmp_path / "d.npz", tmp_path / "plain.safetensors", tmp_path / "out.safetensors"
    held = blobs(200, 1)
    np.savez(data, x=held.x.numpy(), y=held.y.numpy())
    save(model, plain)
    run = CliRunner()
    command = ["calibrate", str(plain), "--data", f"npz:{data}", "--out", str(out), "--measure"]
    found = run.invoke(app, [*command, "energy", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["calibration"]["measure"] == "energy"
    told = " ".join(run.invoke(app, ["inspect", str(out)]).stdout.split())
    assert "calibrated: OOD by energy at 5% false positives" in told
    assert "AUROC of held-out inputs against spoiled copies of them: entropy 0." in told
    assert "bank:" not in told
    assert "no bank of training features" in str(run.invoke(app, [*command, "knn"]).exception)
    assert "--measure is msp; expected entropy, mutual_information" in str(run.invoke(app, [*command, "msp"]).exception)
    save(calibrate(model, held, Calibrate(measure="knn", bank=20), train=blobs(300, 2)), out)
    told = " ".join(run.invoke(app, ["inspect", str(out)]).stdout.split())
    assert "bank: 20 points that stand for the 16 training features before layer 5; 400 bytes" in told
    evaluated = run.invoke(app, ["evaluate", str(out), "--data", f"npz:{data}", "--ood", f"npz:{data}"])
    assert evaluated.exit_code == 0, evaluated.output
    assert "kNN distance *" in evaluated.stdout
