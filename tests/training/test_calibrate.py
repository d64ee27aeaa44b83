"""Calibration keeps its promises: flags and prediction sets are as frequent as asked, and overlap is refused."""

import json
import math
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from dubito.cli import app
from dubito.models import bayesianize, load, save
from dubito.models.errors import DubitoError
from dubito.models.manifest import Card, Input, Provenance, Regression
from dubito.models.posteriors.inducing import Inducing
from dubito.models.predictions.answers import answers, scores
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified
from dubito.training.calibrate import (
    CALIBRATION_REQUESTS,
    MANY,
    OWN_DRAWS,
    CalibrationError,
    best_temperature,
    calibrate,
    check_held_out,
    choose_measure,
    divided,
    outer_quantile,
)
from dubito.training.config import Calibrate, Fit
from dubito.training.data.data import Examples
from dubito.training.data.spoil import spoil
from dubito.training.evaluation.evaluate import evaluate
from dubito.training.evaluation.evaluate import measure as measure_model
from dubito.training.evaluation.predicting import GRID, REQUESTS, predict_auto, predict_grid
from dubito.training.fit.fit import FitRun
from dubito.training.recipe import _sample
from dubito.training.seeds import stream
from dubito.training.temperature import fit_temperature
from tests.examples import at_most
from tests.small_models import bayesian_mlp, mlp, stored

pytestmark = pytest.mark.usefixtures("choice_by_one_request")
CLASSES = 4
DECLARED = Input(shape=(5,))


def clusters(n: int, seed: int) -> Examples:
    """Overlapping Gaussian clusters: no network can be right about all of them."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=rng)
    centres = 1.2 * torch.randn(CLASSES, 5, generator=torch.Generator().manual_seed(99))
    return Examples(centres[y] + torch.randn(n, 5, generator=rng), y)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Few training examples and wide caps, so that the draws disagree."""
    torch.manual_seed(0)
    train = clusters(300, 1)
    net = mlp(5, 32, CLASSES)
    network = bayesianize(net, "ffg-u", inducing=8, start="prior", sigma_max=0.5)
    fit = Fit(epochs=10, likelihood_epochs=3, warmup_epochs=3, batch=64, lr=2e-2)
    run = FitRun(network, train, clusters(100, 2), DECLARED, fit, 0, torch.device("cpu"))
    while not run.done:
        run.epoch()
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    sample = tuple(train.fingerprints())
    return stored(run.finish(), path, input=DECLARED, provenance=Provenance(train_sample=sample))


@pytest.fixture(scope="module")
def calibrated(trained: Model, choice_by_one_request: None) -> Model:
    return calibrate(trained, clusters(HELD, 3))


SEEDS, HELD, FRESH = range(7, 10), at_most(700), at_most(500)


@pytest.fixture(scope="module")
def measured(calibrated: Model) -> list[dict[str, Any]]:
    """Figures of fresh data, by one seed after the other."""
    return [evaluate(calibrated, clusters(FRESH, 4), seed=seed).figures for seed in SEEDS]


@pytest.mark.draws
@pytest.mark.parametrize("K", [1, 2, 4, 8, 20, 64, "auto"])
def test_promises_hold_on_fresh_data(measured: list[dict[str, Any]], K: int | str) -> None:
    """Within 3 standard errors, calibration's own included: p(1 − p)/n of the examples, and what draws add to that.

    Examples that share their draws err together: what these measurements show of it, calibration has as well. Few draws
    err rarely and then much, so that one seed's requests say little of their own error.
    """
    n, fresh = HELD, FRESH
    rows = [f["auto"] if K == "auto" else next(r for r in f["curve"] if r["samples"] == K) for f in measured]
    for name, promised in (("coverage", 0.9), ("ood_rate", 0.05)):
        of_examples = promised * (1 - promised)
        of_draws = max(0.0, mean(row[f"{name}_se"] ** 2 for row in rows) - of_examples / fresh)
        error = math.sqrt(
            of_examples * (1 / fresh + 1 / n) + of_draws * (1 / len(rows) + REQUESTS / CALIBRATION_REQUESTS)
        )
        found = mean(row[name] for row in rows)
        assert abs(found - promised) < 3 * error, (name, found, error)


def test_answers_use_the_thresholds_of_auto(calibrated: Model) -> None:
    auto = calibrated.card.calibration.auto  # type: ignore[union-attr]
    assert auto is not None
    test = clusters(500, 5)
    prediction = calibrated.predict(test.x, "auto", 0)
    rows = answers(prediction, calibrated.card)
    measure = calibrated.card.calibration.measure  # type: ignore[union-attr]
    assert prediction.settled is not None
    assert [row["samples"] for row in rows] == prediction.settled.samples.tolist()
    assert {row["ood"]["threshold"] for row in rows} == {auto.thresholds[measure]}
    for row in rows:
        assert row["ood"]["flag"] == (row["ood"]["score"] > auto.thresholds[measure])
        p = row["probabilities"]
        likelier = [sum(sorted(other for other in p if other > mine)) for mine in p]  # no two are equal
        assert row["prediction_set"] == [str(c) for c in range(CLASSES) if likelier[c] <= auto.quantile]
        assert row["label"] in row["prediction_set"]
    other = answers(calibrated.predict(test.x, "auto", 0, tolerance=0.2), calibrated.card)
    thresholds = calibrated.card.calibration.thresholds[measure]  # type: ignore[union-attr]
    assert all(row["ood"]["threshold"] in thresholds.values() for row in other)  # of the grid point at or below K


def test_the_grid_and_what_is_on_it(trained: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of the calibration, from the answers that it was found on."""
    requests, held = 5, clusters(HELD, 3)
    monkeypatch.setattr("dubito.training.calibrate.CALIBRATION_REQUESTS", requests)
    calibrated = calibrate(trained, held)
    calibration = calibrated.card.calibration
    assert calibration is not None
    assert set(calibration.quantiles) == {0, *GRID}
    bare = calibrated.with_card(calibration=None)
    for K, summary in predict_grid(bare, held.x, list(GRID), 1 << 40, requests=requests).items():
        for measure, values in scores(summary).items():
            ranked = np.sort(values.double().numpy())
            assert calibration.thresholds[measure][K] == ranked[math.ceil(0.95 * (HELD + 1)) - 1]
        assert isinstance(summary, Classified)
        p = summary.probabilities.double().numpy()
        likelier = p > np.take_along_axis(p, held.y.numpy()[:, None], 1)
        strange = np.sort((p * likelier).sum(1))  # APS
        assert calibration.quantiles[K] == pytest.approx(strange[math.ceil(0.9 * (HELD + 1)) - 1], abs=1e-12)
    settled = predict_auto(bare, held.x, 1 << 40, requests=requests)
    assert settled is not None
    assert calibration.auto is not None
    for measure, values in scores(settled[0]).items():
        assert (
            calibration.auto.thresholds[measure] == np.sort(values.double().numpy())[math.ceil(0.95 * (HELD + 1)) - 1]
        )


@pytest.mark.parametrize(("n", "share"), [(19, 0.95), (20, 0.9), (199, 0.9), (1000, 0.95), (9, 0.9)])
def test_one_more_value_stays_within_the_outer_quantile_as_often_as_asked(n: int, share: float) -> None:
    """Of n + 1 exchangeable values the last is equally likely to have each rank, so the chance is exactly a ratio."""
    values = torch.arange(1.0, n + 1)
    q = outer_quantile(values[torch.randperm(n)], share)
    chance = q / (n + 1)  # ranks 1 … q of n + 1 stay within
    assert share <= chance + 1e-12
    assert chance - share < 1 / (n + 1)


@pytest.fixture
def by_few_draws(monkeypatch: pytest.MonkeyPatch) -> int:
    """Draws by which a temperature is found."""
    monkeypatch.setattr("dubito.training.calibrate.CHOOSING", K := 4)
    return K


def test_the_best_temperature_is_the_most_probable(trained: Model, by_few_draws: int) -> None:
    """By the likelihood of 1,000 examples and the prior of log T, N(0, 0.5²)."""
    held = clusters(1000, 6)
    T = best_temperature(trained, held, 0)
    outputs = trained.predict(held.x, by_few_draws, stream(0, "temperature", 0), keep_outputs=True).outputs
    assert outputs is not None

    def surprise(T: float) -> float:
        p = np.exp(outputs.double().numpy() / T)
        p = (p / p.sum(-1, keepdims=True)).mean(0)
        return float(-np.log(p[np.arange(1000), held.y.numpy()]).sum()) + (math.log(T) / 0.5) ** 2 / 2

    grid = np.exp(np.linspace(math.log(0.1), math.log(3), 400))
    best = float(grid[np.argmin([surprise(t) for t in grid])])
    assert abs(math.log(T / best)) < 0.01  # the grid has steps of 0.0085


def test_a_few_examples_that_are_all_right_do_not_take_the_temperature_to_zero(trained: Model) -> None:
    held = clusters(200, 6)
    summary = trained.predict(held.x, 20, 0).summary
    assert isinstance(summary, Classified)
    right = (summary.probabilities.argmax(-1) == held.y).nonzero()[:, 0][:20]
    assert 0.3 < best_temperature(trained, held[right], 0) < 1  # the NLL alone: 0.1, the least that is tried


@pytest.mark.parametrize("far", [0, 1, 3])
def test_a_few_inputs_far_outside_do_not_decide_the_temperature(far: int) -> None:
    """Logits that are sure by half too much, and some that are wrong by thousands; against a grid, in numpy, over the
    others. By the likelihood alone one of these takes T to 10."""
    rng = np.random.default_rng(5)
    logits = 2.0 * rng.standard_normal((1000, 10))
    y = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # drawn by softmax(logits)
    logits *= 1.5

    def nll(T: float) -> float:
        log_p = logits / T - np.log(np.exp(logits / T).sum(-1, keepdims=True))
        return float(-log_p[np.arange(1000), y].sum() + (np.log(T) / 0.5) ** 2 / 2)

    expected = min(np.geomspace(1, 2.5, 400), key=nll)
    assert 1.3 < expected < 1.7
    wrong = np.zeros((far, 10))
    wrong[:, 0] = 5000.0
    both = torch.tensor(np.concatenate([logits, wrong]))
    found = fit_temperature([(both[None], torch.tensor(np.concatenate([y, np.ones(far, y.dtype)])))])
    assert found == pytest.approx(expected, rel=0.02)  # half of its standard error


@pytest.mark.draws
def test_sets_cover_as_promised_although_the_temperature_has_seen_the_same_examples() -> None:
    """Mean coverage of many calibrations of logits that are sure by half too much, within 3 standard errors."""
    rng, n = torch.Generator().manual_seed(0), MANY

    def drawn(n: int) -> tuple[Tensor, Tensor]:
        logits = 2 * torch.randn(n, 10, generator=rng)
        y = torch.multinomial(logits.softmax(-1), 1, generator=rng)[:, 0]
        return 1.5 * logits, y

    fresh, fresh_y = drawn(8000)
    covered = []
    for _ in range(at_most(20)):
        logits, y = drawn(2 * n)  # validation part, calibration part
        T = fit_temperature([(logits[None], y)])
        strange = 1 - (logits[n:] / T).softmax(-1).gather(1, y[n:, None])[:, 0]
        p = (fresh / T).softmax(-1).gather(1, fresh_y[:, None])[:, 0]
        covered.append(float((1 - p <= outer_quantile(strange, 0.9)).double().mean()))
    error = math.sqrt(0.09 / 8000 + np.var(covered) / len(covered))
    assert abs(mean(covered) - 0.9) < 3 * error


@pytest.mark.usefixtures("few_here", "by_few_draws")
def test_a_large_calibration_part_counts_for_the_temperature(trained: Model) -> None:
    validation, held = clusters(100, 6), clusters(MANY, 3)
    settings = Calibrate(temperature=True)
    for some, expected in ((held[: MANY - 1], validation), (held, validation + held)):
        card = calibrate(trained, some, settings, validation=validation).card
        assert card.calibration is not None
        assert card.calibration.temperature == best_temperature(trained, expected, OWN_DRAWS)


@pytest.mark.usefixtures("few_here")
def test_a_temperature_is_fitted_where_asked(trained: Model, calibrated: Model) -> None:
    held = clusters(2000, 3)
    warm = calibrate(trained, held, Calibrate(temperature=True))
    assert warm.card.calibration is not None
    assert warm.card.calibration.temperature != 1.0
    assert calibrated.card.calibration is not None
    assert calibrated.card.calibration.temperature == 1.0
    plain, fitted = (nll_of(m, clusters(4000, 8)) for m in (calibrated, warm))
    assert fitted <= plain + 0.002


def nll_of(model: Model, test: Examples) -> float:
    return measure_model(model, test)["nll"]


def test_the_measure_is_the_one_that_tells_spoiled_inputs_apart(trained: Model, calibrated: Model) -> None:
    held = clusters(800, 3)
    rng = torch.Generator().manual_seed(0)
    inside = scores(trained.predict(held.x, 64, 0).summary)
    total: dict[str, float] = {}
    for x in spoil(held.x, rng):
        for measure, values in scores(trained.predict(x, 64, 0).summary).items():
            above = (values[:, None] > inside[measure]).double() + 0.5 * (values[:, None] == inside[measure])
            total[measure] = total.get(measure, 0) + float(above.mean())
    chosen, _ = choose_measure(trained, held, 0)
    assert total[chosen] >= max(total.values()) - 0.05 * 4
    assert calibrated.card.calibration is not None
    assert calibrated.card.calibration.measure in total


@pytest.mark.parametrize("kind", ["pictures", "vectors"])
def test_spoiled_inputs_keep_the_values_and_lose_the_structure(kind: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 200, (50, 1, 8, 8), dtype=torch.uint8) if kind == "pictures" else torch.randn(50, 7)
    before = x.clone()
    copies = list(spoil(x, rng))
    assert len(copies) == (5 if kind == "pictures" else 4)
    assert torch.equal(x, before)
    for spoiled in copies:
        assert (spoiled.shape, spoiled.dtype) == (x.shape, x.dtype)
        assert (spoiled.flatten(1).amax(0) <= x.flatten(1).amax()).all()
        assert not torch.equal(spoiled, x)
    assert torch.equal(copies[0].flatten(1).sort().values, x.flatten(1).sort().values)
    other = 2 * copies[-1].double() - x.double()  # the last is the mean of two inputs, rounded down for whole numbers
    assert all((other[:, None] - x.double()).abs().flatten(2).amax(2).min(1).values <= 1)


def test_data_that_overlaps_the_training_part_is_refused(trained: Model) -> None:
    check_held_out(trained, clusters(500, 3))
    mixed = clusters(500, 3)
    few, many = (
        Examples(torch.cat([mixed.x, clusters(300, 1).x[:n]]), torch.cat([mixed.y, mixed.y[:n]])) for n in (5, 6)
    )
    check_held_out(trained, few)  # not more than 1 %: rows of categories recur by chance
    with pytest.raises(CalibrationError, match=r"overlap the training part: 6 of them \(examples 500, 501, 502"):
        check_held_out(trained, many)


def test_training_inputs_among_very_many_others_are_recognised_by_the_share_of_them(trained: Model) -> None:
    """The artifact remembers few: beside 40,000 others they are less than 1 % of all."""
    seen, others = clusters(300, 1), clusters(40_000, 4)
    both = Examples(torch.cat([others.x, seen.x]), torch.cat([others.y, seen.y]))
    check_held_out(trained, others)
    with pytest.raises(CalibrationError, match=r"overlap the training part: 300 of them"):
        check_held_out(trained, both)


def test_rows_of_few_categories_are_not_remembered() -> None:
    """New rows are like those of the training part by nature: of 400 of 2,480 kinds, some hundred and fifty are."""
    rng = torch.Generator().manual_seed(0)

    def rows(n: int) -> Examples:
        kinds = torch.randint(0, 2480, (n,), generator=rng)
        return Examples(torch.stack([kinds % 31, kinds // 31], 1).float(), torch.zeros(n, dtype=torch.int64))

    train, new = rows(400), rows(300)
    assert len(set(train.fingerprints()) & set(new.fingerprints())) > 20
    assert _sample(train, 0) == []
    x = torch.randn(400, 2, generator=rng)
    x[:4] = x[4:8]  # a few copies say nothing of new rows
    assert len(_sample(Examples(x, torch.zeros(400, dtype=torch.int64)), 0)) == 392


@pytest.mark.usefixtures("few_here")
@pytest.mark.parametrize(
    ("n", "settings", "least"),
    [(19, Calibrate(), 20), (98, Calibrate(coverage=0.99), 99), (40, Calibrate(false_positive_rate=0.02), 49)],
)
def test_too_few_examples_are_refused(trained: Model, n: int, settings: Calibrate, least: int) -> None:
    with pytest.raises(CalibrationError, match=f"{n} examples are too few.*at least {least}"):
        calibrate(trained, clusters(n, 3), settings)
    calibrate(trained, clusters(least, 3), settings)


@pytest.mark.usefixtures("few_here")
def test_what_was_known_before_is_left_alone_and_not_believed(trained: Model) -> None:
    """Metrics hold for the directions, thresholds and temperature that they were measured under."""
    for layer in trained.network.layers.values():
        assert isinstance(layer.posterior, Inducing)
        layer.posterior.noise, layer.posterior.directions = "factored", None
    measured = trained.with_card(metrics={"coverage": 0.9})
    made = calibrate(measured, clusters(200, 3))
    assert made.card.metrics == {}
    assert measured.card.metrics == {"coverage": 0.9}
    assert any(name.endswith("directions") for name in made.network.state_dict())
    assert not any(name.endswith("directions") for name in measured.network.state_dict())


@pytest.mark.usefixtures("few_here")
def test_a_plain_network_can_be_calibrated(tmp_path: Path) -> None:
    network = bayesian_mlp((5, 8, CLASSES), "deterministic")
    save(network, tmp_path / "m.safetensors", card=Card(input=DECLARED))
    made = calibrate(load(tmp_path / "m.safetensors"), clusters(200, 3))
    assert made.card.calibration is not None
    assert made.card.calibration.auto is None
    assert made.card.calibration.measure != "mutual_information"


def test_regression_intervals_cover_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dubito.training.calibrate.CALIBRATION_REQUESTS", 8)

    def line(n: int, seed: int) -> Examples:
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 5, generator=rng)
        noise = torch.randn(n, 2, generator=rng) * torch.tensor([1.0, 5.0])
        return Examples(x, torch.stack([x.sum(1), 10 * x[:, 0]], 1) + noise)

    torch.manual_seed(0)
    task = Regression(outputs=2, shift=(0.0, 0.0), scale=(2.0, 10.0))
    network = bayesian_mlp((5, 16, 2), "ffg-u", inducing=8, start="prior", task=task)
    run = FitRun(network, line(500, 1), line(100, 2), DECLARED, Fit(epochs=10, lr=1e-2, kl=0.1), 0, torch.device("cpu"))
    while not run.done:
        run.epoch()
    save(run.finish(), tmp_path / "m.safetensors", card=Card(input=DECLARED))
    n = 500
    made = calibrate(load(tmp_path / "m.safetensors"), line(n, 3), Calibrate(coverage=0.8))
    assert made.card.calibration is not None
    assert made.card.calibration.measure == "epistemic_variance"
    test = line(n, 4)
    for K in (1, 20):
        rows = answers(made.predict(test.x, K, 5), made.card)
        both = [
            all(low <= v <= high for v, (low, high) in zip(y, row["interval"], strict=True))
            for y, row in zip(test.y.tolist(), rows, strict=True)
        ]
        assert abs(np.mean(both) - 0.8) < 4 * math.sqrt(0.16 * (1 / n + 1 / n))
    with pytest.raises(CalibrationError, match="temperature belongs to classification"):
        calibrate(made, line(100, 3), Calibrate(temperature=True))


# the command


def as_npz(path: Path, examples: Examples) -> Path:
    np.savez(path, x=examples.x.numpy(), y=examples.y.numpy())
    return path


@pytest.mark.usefixtures("few_here")
def test_the_command_calibrates_and_keeps_the_rest(trained: Model, tmp_path: Path) -> None:
    save(trained, tmp_path / "m.safetensors", precision="float16")
    data = as_npz(tmp_path / "held.npz", clusters(400, 3))
    command = ["calibrate", str(tmp_path / "m.safetensors"), "--data", f"npz:{data}", "--coverage", "0.8"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "c.safetensors"), "--json"])
    assert done.exit_code == 0, done.output
    made = load(tmp_path / "c.safetensors")
    assert made.card.calibration is not None
    assert made.card.calibration.coverage == 0.8
    assert made.manifest.precision == "float16"
    assert json.loads(done.stdout)["calibration"]["coverage"] == 0.8
    before: dict[str, Tensor] = load(tmp_path / "m.safetensors").network.state_dict()
    after = made.network.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())


@pytest.mark.usefixtures("few_here")
def test_the_command_refuses_what_it_should(trained: Model, tmp_path: Path) -> None:
    save(trained, tmp_path / "m.safetensors")
    seen = as_npz(tmp_path / "seen.npz", clusters(300, 1))
    command = ["calibrate", str(tmp_path / "m.safetensors"), "--out", str(tmp_path / "c.safetensors"), "--data"]
    for more, message in [
        ([f"npz:{seen}"], "overlap the training part: 300 of them"),
        ([f"npz:{seen}", "--coverage", "1.5"], "--coverage is 1.5; expected a share"),
        (["digits"], "this model"),
    ]:
        done = CliRunner().invoke(app, [*command, *more])
        assert isinstance(done.exception, DubitoError), done.output
        assert message in str(done.exception)
        assert not (tmp_path / "c.safetensors").exists()


@pytest.mark.parametrize(("n", "advised"), [(10, False), (30, True)])
def test_too_few_examples_are_counted_with_those_of_the_temperature(n: int, advised: bool) -> None:
    """Without it there would be enough, or too few all the same."""
    few = Examples(torch.randn(n, 3), torch.zeros(n, dtype=torch.long))
    with pytest.raises(CalibrationError, match=f"^{n} examples are too few to calibrate on") as raised:
        divided(few, None, Calibrate(temperature=True), "classification", 0)
    assert ("--no-temperature" in str(raised.value)) == advised
