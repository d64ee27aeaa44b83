"""`evaluate` against the same numbers worked out row by row from `model.predict` and `answers`; and its command."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_calibration_error,
)
from typer.testing import CliRunner, Result

from dubito.cli import app
from dubito.models import bayesianize, load, save
from dubito.models.errors import DubitoError
from dubito.models.manifest import Calibration, Card, Input, Part, Provenance, Regression, Sets
from dubito.models.predictions.answers import answers
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified
from dubito.training.calibrate import calibrated_on, divided, outer_quantile
from dubito.training.config import Calibrate
from dubito.training.data.data import DataError, DataSet, Examples, Parts, divide, enter, input_of
from dubito.training.data.sources import read_data
from dubito.training.evaluation import plots
from dubito.training.evaluation.evaluate import evaluate, measure, promises
from dubito.training.evaluation.shift import corrupt, families
from dubito.training.seeds import stream
from tests.few import GRID, REQUESTS
from tests.small_models import bayesian_mlp, mlp, stored

pytestmark = pytest.mark.usefixtures("two_requests")
RECIPE: dict[str, Any] = {"name": "digits", "validation": 0.05, "calibration": 0.1, "test": 0.2}
CALIBRATION = Calibration(
    false_positive_rate=0.05,
    coverage=0.9,
    measure="mutual_information",
    thresholds={
        "entropy": {0: 0.3, 1: 0.4},
        "mutual_information": {0: 9.0, 2: 0.1, 16: 0.15},
        "max_probability": {1: 0.3},
    },
    quantiles={0: 0.4, 1: 0.5, 4: 0.6, 32: 0.7},
)


@pytest.fixture(scope="module")
def digits() -> DataSet:
    return read_data("digits")


@pytest.fixture(scope="module")
def parts(digits: DataSet) -> Parts:
    return divide(digits, 0.05, 0.1, 0.2, seed=0)


@pytest.fixture(scope="module")
def file(parts: Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that knows its digits, with enough dropout to doubt some of them."""
    torch.manual_seed(0)
    net = mlp(64, 48, 10)
    declared = input_of(parts.train)
    optimiser, x = torch.optim.Adam(net.parameters(), 1e-2), enter(parts.train.x, declared)
    for _ in range(60):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(x), parts.train.y).backward()
        optimiser.step()
    card = Card(
        input=declared,
        labels=parts.labels,
        calibration=CALIBRATION,
        provenance=Provenance(recipe={"seed": 0, "data": RECIPE}, data_hash=parts.hash),
    )
    path = tmp_path_factory.mktemp("evaluate") / "digits.safetensors"
    save(bayesianize(net, "mc-dropout", rate=0.25), path, card=card)
    return path


@pytest.fixture(scope="module")
def model(file: Path) -> Model:
    return load(file)


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A regression with two targets, far from unit scale."""
    torch.manual_seed(1)
    task = Regression(outputs=2, shift=(50.0, -3.0), scale=(20.0, 0.5))
    network = bayesian_mlp((3, 16, 2), "mc-dropout", rate=0.2, task=task)
    calibration = Calibration(
        false_positive_rate=0.1,
        coverage=0.8,
        measure="epistemic_variance",
        thresholds={"epistemic_variance": {0: 0.1, 4: 2.0}},
        quantiles={0: 0.5, 8: 1.2},
    )
    path = tmp_path_factory.mktemp("evaluate") / "curve.safetensors"
    return stored(network, path, input=Input(shape=(3,)), calibration=calibration)


def targets(n: int, seed: int = 0) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, 2, generator=rng) * torch.tensor([8.0, 0.2])
    return Examples(torch.randn(n, 3, generator=rng), torch.tensor([50.0, -3.0]) + noise)


def row_by_row(model: Model, examples: Examples, K: int, seed: int) -> list[dict[str, Any]]:
    """Every answer as its request would get it: request i has rows i, i + 20, … and a seed of its own."""
    assert model.card.input is not None
    rows: list[dict[str, Any]] = [{}] * len(examples)
    for i in range(min(REQUESTS, len(examples))):
        prediction = model.predict(enter(examples.x[i::REQUESTS], model.card.input), K, stream(seed, "request", i))
        rows[i::REQUESTS] = answers(prediction, model.card)
    for row, y in zip(rows, examples.y.tolist(), strict=True):
        row["y"] = y
    return rows


def mean(values: Any) -> float:
    return float(np.mean(list(values)))


def error_of(values: Any) -> float:
    """The standard error of 20 requests."""
    values = list(values)
    blocks = [np.mean(values[i::REQUESTS]) for i in range(REQUESTS)]
    return float(np.std(blocks, ddof=1) / math.sqrt(REQUESTS))


def quality_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    p, y = torch.tensor([row["probabilities"] for row in rows]), torch.tensor([row["y"] for row in rows])
    labels = "0123456789"
    return {
        "accuracy": mean(row["class"] == row["y"] for row in rows),
        "nll": mean(-math.log(row["probabilities"][row["y"]]) for row in rows),
        "ece": float(multiclass_calibration_error(p, y, 10, n_bins=15)),
        "brier": mean(sum((q - (c == row["y"])) ** 2 for c, q in enumerate(row["probabilities"])) for row in rows),
        "entropy": mean(row["entropy"] for row in rows),
        "mutual_information": mean(row["mutual_information"] for row in rows),
        "coverage": mean(labels[row["y"]] in row["prediction_set"] for row in rows),
        "set_size": mean(len(row["prediction_set"]) for row in rows),
        "ood_rate": mean(row["ood"]["flag"] for row in rows),
    }


# the plain numbers


@pytest.mark.parametrize("K", [0, 1, 3, 20])
def test_measure_is_what_requests_would_see(model: Model, parts: Parts, K: int) -> None:
    found = measure(model, parts.test, samples=K, seed=5)
    expected = quality_of(row_by_row(model, parts.test, K, 5))
    assert found == pytest.approx(expected, abs=1e-6)
    assert 0.7 < found["accuracy"] < 1
    assert 0 < found["ood_rate"] < 1
    assert 0 < found["coverage"] < 1


def test_temperature_applies(model: Model, parts: Parts) -> None:
    warm = model.with_card(calibration=CALIBRATION.model_copy(update={"temperature": 3.0}))
    found = measure(warm, parts.test)
    assert found == pytest.approx(quality_of(row_by_row(warm, parts.test, 20, 0)), abs=1e-6)
    assert found["entropy"] > 1.5 * measure(model, parts.test)["entropy"]


def test_what_is_not_calibrated_is_not_measured(model: Model, parts: Parts) -> None:
    found = measure(model.with_card(calibration=None), parts.test)
    assert found.keys() == {"accuracy", "nll", "ece", "brier", "entropy", "mutual_information"}
    late = CALIBRATION.model_copy(update={"quantiles": {32: 0.7}, "thresholds": {"mutual_information": {32: 0.1}}})
    assert measure(model.with_card(calibration=late), parts.test) == found
    assert {"coverage", "ood_rate"} < measure(model.with_card(calibration=late), parts.test, samples=32).keys()


def test_regression_in_the_targets_own_units(curve: Model) -> None:
    examples = targets(90)
    rows = row_by_row(curve, examples, 20, 0)

    def log_density(row: dict[str, Any]) -> float:
        spreads = zip(row["mean"], row["epistemic_variance"], row["aleatoric_variance"], row["y"], strict=True)
        return math.fsum(-math.log(2 * math.pi * (e + a)) / 2 - (y - m) ** 2 / (2 * (e + a)) for m, e, a, y in spreads)

    def inside(row: dict[str, Any]) -> bool:
        return all(low <= y <= high for (low, high), y in zip(row["interval"], row["y"], strict=True))

    squares = [(m - y) ** 2 for row in rows for m, y in zip(row["mean"], row["y"], strict=True)]
    found = measure(curve, examples)
    assert found == pytest.approx(
        {
            "rmse": math.sqrt(mean(squares)),
            "nll": mean(-log_density(row) for row in rows),
            "coverage": mean(inside(row) for row in rows),
            "width": mean(high - low for row in rows for low, high in row["interval"]),
            "ood_rate": mean(row["ood"]["flag"] for row in rows),
        },
        rel=1e-5,
    )
    assert 0 < found["coverage"] < 1
    assert 0 < found["ood_rate"] < 1


# the whole


def test_the_curve_nests_its_draws_and_says_its_errors(model: Model, parts: Parts) -> None:
    figures = evaluate(model, parts.test, seed=3).figures
    assert [row["samples"] for row in figures["curve"]] == list(GRID)
    for row in figures["curve"]:
        rows = row_by_row(model, parts.test, row["samples"], 3)
        expected = quality_of(rows) | {
            "coverage_se": error_of("0123456789"[r["y"]] in r["prediction_set"] for r in rows),
            "set_size_se": error_of(len(r["prediction_set"]) for r in rows),
            "ood_rate_se": error_of(r["ood"]["flag"] for r in rows),
        }
        assert {k: v for k, v in row.items() if k != "samples"} == pytest.approx(expected, abs=1e-6)
        if row["samples"] == 20:
            assert {k: v for k, v in figures.items() if k in expected} == pytest.approx(expected, abs=1e-6)
    assert sum(b["share"] for b in figures["reliability"]) == pytest.approx(1)
    assert figures["ece"] == pytest.approx(
        sum(abs(b["confidence"] - b["accuracy"]) * b["share"] for b in figures["reliability"])
    )


@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u", "ffg-w", "ensemble-w"])
def test_fewer_draws_are_the_first_of_more_whatever_the_posterior(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = bayesian_mlp((4, 8, 3), method, inducing=4, start="prior")
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(4,))))
    model = load(tmp_path / "m.safetensors")
    examples = Examples(torch.randn(30, 4), torch.randint(3, (30,)))
    for row in evaluate(model, examples, samples=5).figures["curve"]:
        expected = measure(model, examples, samples=int(row.pop("samples")))
        assert row == pytest.approx(expected, abs=1e-5)


def test_regression_has_a_curve_too(curve: Model) -> None:
    examples = targets(60)
    for row in evaluate(curve, examples).figures["curve"]:
        expected = measure(curve, examples, samples=row["samples"])
        assert {k: v for k, v in row.items() if k in expected} == pytest.approx(expected, rel=1e-5)


def test_a_deterministic_network_has_one_point(parts: Parts, tmp_path: Path) -> None:
    network = bayesian_mlp((64, 8, 10), "deterministic")
    save(network, tmp_path / "m.safetensors", card=Card(input=input_of(parts.train), calibration=CALIBRATION))
    figures = evaluate(load(tmp_path / "m.safetensors"), parts.test, samples=20).figures
    assert [row["samples"] for row in figures["curve"]] == [1]
    assert figures["samples"] == 1
    assert figures["mutual_information"] == 0


def test_the_posterior_mean_stands_beside_the_curve(model: Model, parts: Parts) -> None:
    figures = evaluate(model, parts.validation, samples=0).figures
    assert figures["samples"] == 0
    assert [row["samples"] for row in figures["curve"]] == list(GRID)
    assert {k: figures[k] for k in ("nll", "coverage", "ood_rate")} == pytest.approx(
        {k: v for k, v in measure(model, parts.validation, samples=0).items() if k in ("nll", "coverage", "ood_rate")}
    )


# outside and under shift


def noise(n: int, seed: int = 0) -> Examples:
    x = torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Examples(x, torch.full((n,), 99))  # labels of no meaning here


def score(row: dict[str, Any], measure: str) -> float:
    value: float = row[measure]
    return 1 - value if measure == "max_probability" else value


def test_detection_agrees_with_torchmetrics(model: Model, parts: Parts) -> None:
    outside = {"noise": noise(130), "blank": Examples(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.zeros(3))}
    figures = evaluate(model, parts.test, outside, seed=2).figures
    inside = row_by_row(model, parts.test, 20, 2)
    assert list(figures["ood"]) == ["noise", "blank"]
    for name, examples in outside.items():
        rows, found = row_by_row(model, examples, 20, 2), figures["ood"][name]
        for kind in ("entropy", "mutual_information", "max_probability"):
            scores = torch.tensor([score(r, kind) for r in inside + rows])
            truth = torch.tensor([0] * len(inside) + [1] * len(rows))
            scaled = scores / max(1.0, float(scores.max()))
            assert found["measures"][kind] == pytest.approx(
                {
                    "auroc": float(binary_auroc(scaled, truth)),
                    "aupr": float(binary_average_precision(scaled, truth)),
                },
                abs=1e-6,
            )
        assert found["measure"] == "mutual_information"
        assert (found["auroc"], found["aupr"]) == tuple(found["measures"]["mutual_information"].values())
        assert found["ood_rate"] == pytest.approx(mean(r["ood"]["flag"] for r in rows))
        assert found["examples"] == len(examples)
    assert figures["auroc"] == figures["ood"]["noise"]["auroc"]
    assert figures["measure"] == "mutual_information"


def test_the_default_measure_is_entropy_without_calibration_and_for_one_draw(model: Model, parts: Parts) -> None:
    bare = evaluate(model.with_card(calibration=None), parts.validation, {"noise": noise(40)}).figures
    assert bare["measure"] == "entropy"
    assert bare["auroc"] == bare["ood"]["noise"]["measures"]["entropy"]["auroc"]
    assert "ood_rate" not in bare["ood"]["noise"]
    assert evaluate(model, parts.validation, {"noise": noise(40)}, samples=1).figures["measure"] == "entropy"


def test_detection_for_regression(curve: Model) -> None:
    examples, far = targets(60), targets(50, 1)
    far = Examples(far.x + 6, far.y)
    figures = evaluate(curve, examples, {"far": far}).figures
    rows = row_by_row(curve, far, 20, 0)
    assert figures["measure"] == "epistemic_variance"
    assert figures["auroc"] > 0.9
    assert figures["ood"]["far"]["ood_rate"] == mean(row["ood"]["flag"] for row in rows)


def test_shift_is_measured_on_changed_pictures(model: Model, parts: Parts) -> None:
    figures = evaluate(model, parts.calibration, shift=True, samples=4, seed=1).figures["shift"]
    assert figures["examples"] == len(parts.calibration)
    assert figures["clean"] == measure(model, parts.calibration, samples=4, seed=1)
    assert list(figures["families"]) == ["rotation"]
    rows = figures["families"]["rotation"]
    assert [row["severity"] for row in rows] == list(families(1)["rotation"])
    for row in rows[::5]:
        turned = Examples(corrupt(parts.calibration.x, "rotation", row["severity"], 1), parts.calibration.y)
        assert {k: v for k, v in row.items() if k != "severity"} == measure(model, turned, samples=4, seed=1)
    assert rows[5]["accuracy"] < 0.5 < figures["clean"]["accuracy"]  # eleven seeds: at most 0.15, at least 0.83


def test_shift_takes_no_more_pictures_than_it_says(model: Model, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dubito.training.evaluation.evaluate.SHIFTED", 40)
    figures = evaluate(model, parts.validation, shift=True, samples=1).figures
    assert figures["examples"] == len(parts.validation) > 40
    assert figures["shift"]["examples"] == 40


def test_figures_are_plain_and_finite(model: Model, parts: Parts) -> None:
    evaluation = evaluate(model, parts.test[:1], {"noise": noise(1)}, shift=True, samples=2)
    assert json.loads(json.dumps(evaluation.figures, allow_nan=False)) == evaluation.figures
    assert "coverage" in evaluation.figures
    assert "coverage_se" not in evaluation.figures  # of a single request nothing can be said
    assert isinstance(evaluation.inside, Classified)
    assert len(evaluation.inside.entropy) == 1


# the error of the calibration itself


def test_the_error_of_a_promise_is_that_of_a_threshold_from_as_many_examples() -> None:
    """False alarms of 400 thresholds, each from 120 uniform scores. The tolerance is 3.4 standard errors of their
    standard deviation."""
    rng = torch.Generator().manual_seed(0)
    alarms = [1 - outer_quantile(torch.rand(120, generator=rng), 0.95) for _ in range(400)]
    told = promises(CALIBRATION, 120)
    assert told is not None
    assert told["examples"] == 120
    assert told["false_positive_rate_se"] == pytest.approx(float(np.std(alarms)), rel=0.12)
    assert told["coverage_se"] == pytest.approx(math.sqrt(0.9 * 0.1 / 120))


def test_how_many_examples_a_model_was_calibrated_on(model: Model, digits: DataSet, parts: Parts) -> None:
    own, n = model.with_card(metrics={"accuracy": 0.9}), len(parts.calibration)
    assert calibrated_on(own, digits) == n
    assert calibrated_on(model, digits) is None  # calibrated on other data, which leaves no metrics
    assert calibrated_on(own, DataSet(digits.train[:99], None, digits.labels)) is None
    assert calibrated_on(own.with_card(calibration=None), digits) is None
    tempered = CALIBRATION.model_copy(update={"temperature": 1.2})
    assert calibrated_on(own.with_card(calibration=tempered), digits) == n  # the validation part has enough for it
    few = own.card.provenance.model_copy(update={"recipe": {"seed": 0, "data": {**RECIPE, "validation": 0.005}}})
    some = divide(digits, 0.005, 0.1, 0.2, seed=0)
    settings = Calibrate(temperature=True)
    held, _ = divided(some.calibration, some.validation, settings, "classification", 0)
    assert len(held) < len(some.calibration)
    assert calibrated_on(own.with_card(calibration=tempered, provenance=few), digits) == len(held)
    by_class = tuple(Part(examples=m, coverage=0.9, quantiles=CALIBRATION.quantiles) for m in (40, 17))
    each = CALIBRATION.model_copy(update={"sets": Sets(), "classes": by_class})
    assert calibrated_on(model.with_card(calibration=each), digits) == 57


# what cannot be evaluated


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (Examples(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([3, 10])), "from 3 to 10; .* knows 0 to 9"),
        (Examples(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, 1)), "targets came as torch.float32"),
        (Examples(torch.zeros(2, 5), torch.zeros(2).long()), r"shape \(5,\); this model takes \(1, 8, 8\)"),
        (Examples(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0).long()), "there are no examples"),
    ],
)
def test_examples_that_do_not_fit(model: Model, examples: Examples, message: str) -> None:
    for attempt in (measure, evaluate):
        with pytest.raises(DataError, match=message):
            attempt(model, examples)


def test_other_misfits_are_named(model: Model, curve: Model, parts: Parts) -> None:
    with pytest.raises(DataError, match=r"^rows: .*this model takes \(1, 8, 8\)"):
        evaluate(model, parts.test, {"rows": Examples(torch.zeros(2, 5), torch.zeros(2).long())})
    with pytest.raises(DataError, match="--shift changes pictures"):
        evaluate(curve, targets(5), shift=True)
    with pytest.raises(DataError, match=r"shape \(5, 1\); this model predicts 2 numbers each"):
        evaluate(curve, Examples(torch.zeros(5, 3), torch.zeros(5, 1)))
    with pytest.raises(DataError, match="does not say what its inputs look like"):
        measure(model.with_card(input=None), parts.test)


# the command


Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: object) -> Result:
        return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["evaluate", *map(str, arguments)])

    return invoke


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose plots are empty: most of a report's time. `test_report.py` looks at them."""
    monkeypatch.setattr(plots, "_svg", lambda plot, title: "data:image/svg+xml;base64,")


def refused(result: Result) -> str:
    assert isinstance(result.exception, DubitoError), result.output
    assert result.output == ""
    return str(result.exception)


def test_the_command_uses_the_test_part_of_the_models_own_set(run: Run, file: Path, model: Model, parts: Parts) -> None:
    answer = run(file, "--data", "digits", "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert (found["data"], found["part"], found["examples"]) == ("digits", "test", len(parts.test))
    expected = measure(model, parts.test)
    assert {k: found[k] for k in expected} == pytest.approx(expected, abs=1e-6)


def test_the_command_takes_parts_outsiders_draws_and_seeds(
    run: Run, file: Path, model: Model, parts: Parts, tmp_path: Path
) -> None:
    x = noise(30).x.numpy()
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(30) + 0.5)  # regression targets, which do not matter
    np.savez(tmp_path / "b.npz", x=x[:20], y=np.arange(20), x_test=x[20:], y_test=np.arange(10))
    outside = [f"npz:{tmp_path / name}.npz" for name in "ab"]
    arguments = [a for name in outside for a in ("--ood", name)]
    answer = run(
        file, "--data", "digits", "--part", "calibration", *arguments, "--samples", 3, "--seed", 9, "--json", "--shift"
    )
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert (found["part"], found["samples"], found["seed"]) == ("calibration", 3, 9)
    assert found["accuracy"] == measure(model, parts.calibration, samples=3, seed=9)["accuracy"]
    assert {name: row["examples"] for name, row in found["ood"].items()} == dict(zip(outside, (30, 10), strict=True))
    assert found["shift"]["examples"] == len(parts.calibration)


def test_the_table_fits_a_terminal_and_says_it_all(run: Run, file: Path, parts: Parts, tmp_path: Path) -> None:
    np.savez(tmp_path / "noise.npz", x=noise(30).x.numpy(), y=np.zeros(30, dtype=int))
    outside = f"npz:{tmp_path / 'noise.npz'}"
    answer = run(file, "--data", "digits", "--part", "validation", "--ood", outside, "--shift", "--device", "cpu")
    assert answer.exit_code == 0, answer.output
    assert answer.stderr == ""
    lines = answer.stdout.splitlines()
    said = f"on digits, validation: {len(parts.validation)} examples, K = 20, seed 0"
    assert said in re.sub(r"\s+", " ", " ".join(lines[:3]))  # wherever the path before it made lines break
    for word in (
        "accuracy",
        "NLL",
        "ECE",
        "Brier",
        "coverage",
        "AUROC",
        "rotation",
        "180",
        "64",
        "auto",
        "±",
        "90%",
        "5%",
    ):
        assert word in answer.stdout
    assert max(map(len, lines)) <= 80


def test_the_command_says_how_far_off_thresholds_from_few_examples_may_be(
    run: Run, model: Model, parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model.with_card(metrics={"accuracy": 0.9}), own := tmp_path / "own.safetensors")
    n = len(parts.calibration)
    line = f"calibrated on {n} examples: what is promised has a standard error of its own, 2.50% (coverage) and 1.82%"
    shown = run(own, "--data", "digits", "--part", "validation").stdout
    assert line in re.sub(r"\s+", " ", shown)
    told = json.loads(run(own, "--data", "digits", "--part", "validation", "--json").stdout)["calibration"]
    assert told["examples"] == n
    assert told["coverage_se"] == pytest.approx(0.025, abs=5e-5)
    assert told["false_positive_rate_se"] == pytest.approx(0.0182, abs=5e-5)
    monkeypatch.setattr("dubito.training.evaluation.table.FEW", n)
    assert "calibrated on" not in run(own, "--data", "digits", "--part", "validation").stdout


@pytest.mark.usefixtures("without_plots")
def test_two_models_on_the_same_inputs(run: Run, file: Path, model: Model, parts: Parts, tmp_path: Path) -> None:
    """Beside data from outside, which is named as the other model is not."""
    rival = bayesian_mlp((64, 8, 10), "deterministic")
    save(rival, tmp_path / "rival.safetensors", card=Card(input=model.card.input, labels=parts.labels))
    np.savez(tmp_path / "noise.npz", x=noise(30).x.numpy(), y=np.zeros(30, dtype=int))
    outside = f"npz:{tmp_path / 'noise.npz'}"
    arguments = (file, "--data", "digits", "--part", "validation", "--ood", outside, "--samples", 4)
    answer = run(*arguments, "--against", tmp_path / "rival.safetensors", "--report", tmp_path / "page", "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    against = found["against"]
    other = measure(load(tmp_path / "rival.safetensors"), parts.validation)
    for name in ("accuracy", "nll", "ece", "brier"):
        assert against["mine"][name] == pytest.approx(found[name], rel=1e-6)
        assert against["other"][name] == pytest.approx(other[name], rel=1e-6)
        assert against["differences"][name]["value"] == pytest.approx(found[name] - other[name], abs=1e-9)
        assert against["differences"][name]["se"] > 0
    assert against["mine"]["auroc"] == pytest.approx(found["auroc"], rel=1e-6)
    assert against["auroc_against"] == [outside]
    assert "this model is better at accuracy" in against["verdict"]  # of a network that was not trained
    assert against["verdict"] in (tmp_path / "page" / "index.html").read_text()
    assert "better at accuracy" in " ".join(run(*arguments, "--against", tmp_path / "rival.safetensors").stdout.split())


def test_models_of_two_kinds_are_not_compared(run: Run, file: Path, curve: Model, tmp_path: Path) -> None:
    save(curve, tmp_path / "curve.safetensors")
    said = refused(run(file, "--data", "digits", "--against", tmp_path / "curve.safetensors"))
    assert "is a model of regression" in said


def test_an_uncalibrated_model_says_so(run: Run, model: Model, tmp_path: Path) -> None:
    save(model.with_card(calibration=None), tmp_path / "bare.safetensors")
    assert "not calibrated" in run(tmp_path / "bare.safetensors", "--data", "digits", "--part", "validation").stdout


@pytest.mark.usefixtures("without_plots")
def test_a_regression_on_the_terminal(run: Run, curve: Model, tmp_path: Path) -> None:
    examples = targets(40)
    save(curve, tmp_path / "curve.safetensors")
    np.savez(tmp_path / "set.npz", x=examples.x.numpy(), y=examples.y.numpy())
    answer = run(tmp_path / "curve.safetensors", "--data", f"npz:{tmp_path / 'set.npz'}", "--report", tmp_path / "page")
    assert answer.exit_code == 0, answer.output
    for word in ("RMSE", "interval width", "all: 40 examples", "wrote"):
        assert word in answer.stdout
    assert (tmp_path / "page" / "index.html").read_text().startswith("<!doctype html>")


def test_the_command_refuses_in_one_line(run: Run, file: Path, tmp_path: Path) -> None:
    assert "there are: train, validation" in refused(run(file, "--data", "digits", "--part", "tset"))
    assert "no data set 'digit'" in refused(run(file, "--data", "digit"))
    assert "expected auto, cpu or cuda" in refused(run(file, "--data", "digits", "--device", "gpu"))
    assert "--data-root" in refused(run(file, "--data", "mnist"))
    (tmp_path / "taken").write_text("")
    assert "cannot write a report" in refused(run(file, "--data", "digits", "--report", tmp_path / "taken"))
    if not torch.cuda.is_available():
        assert "no GPU" in refused(run(file, "--data", "digits", "--device", "cuda"))
