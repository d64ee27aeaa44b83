"""Calibrated prediction sets keep their promises: for all inputs, for each class and for each group."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typer.testing import CliRunner

from dubito.cli import app
from dubito.models import bayesianize, save
from dubito.models.errors import DubitoError
from dubito.models.manifest import Input, Provenance, Sets
from dubito.models.predictions.answers import Rule, columns_of
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified, known_in
from dubito.training.calibrate import CalibrationError, calibrate, outer_quantile, strangeness, too_small
from dubito.training.config import Calibrate
from dubito.training.data.data import DataError, Examples
from dubito.training.data.sources import read_data
from dubito.training.evaluation.evaluate import evaluate
from tests.small_models import mlp, stored

pytestmark = pytest.mark.usefixtures("few_requests")  # a network without draws answers all requests alike
RULES = [Sets(score="probability"), Sets(), Sets(score="raps", lam=0.125, k_reg=2)]
NAMES = [sets.score for sets in RULES]
CLASSES = 3


def pool(n: int, C: int, sharpness: float, seed: int) -> tuple[Classified, torch.Tensor]:
    """Probabilities that are too sure of themselves, or too little, and labels by the truth."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((n, C))
    truth = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    told = np.exp(sharpness * logits)
    y = (truth.cumsum(1) < rng.random((n, 1))).sum(1)
    p = torch.from_numpy(told / told.sum(1, keepdims=True)).float()
    return Classified(p, *[torch.zeros(n)] * 3), torch.from_numpy(y)


@pytest.mark.parametrize(("C", "sharpness", "coverage"), [(3, 2.0, 0.9), (8, 0.5, 0.8), (8, 2.0, 0.95)])
@pytest.mark.parametrize("sets", RULES, ids=NAMES)
def test_coverage_is_kept_over_random_divisions(sets: Sets, C: int, sharpness: float, coverage: float) -> None:
    """Over all divisions of any data, scores that differ cover ⌈(n + 1)·coverage⌉/(n + 1) of the rest on average.

    The most probable class's zeros are equal, but here it is right less often than is asked for, so that the quantile
    lies among scores that differ. Sets are made as answers make them.
    """
    summary, y = pool(600, C, sharpness, 3)
    score = strangeness(summary, y, sets)
    assert (score == 0).double().mean() < coverage - 0.02
    rng, n, found = np.random.default_rng(4), 52, []
    for _ in range(150):
        order = rng.permutation(len(y))
        rest = Classified(**{name: values[order[n:]] for name, values in known_in(summary).items()})
        rule = Rule(None, outer_quantile(score[order[:n]], coverage), sets)
        fits = columns_of(rest, [rule] * len(rest.probabilities))["prediction_set"]
        assert fits.any(1).all()
        found.append(fits[np.arange(len(fits)), y[order[n:]]].mean())
    exact = math.ceil((n + 1) * coverage - 1e-9) / (n + 1)
    assert abs(np.mean(found) - exact) < 4 * np.std(found) / math.sqrt(len(found))


def test_a_network_that_is_right_often_enough_gets_single_classes() -> None:
    summary, y = pool(2000, 3, 1.0, 5)
    right = float((summary.probabilities.argmax(1) == y).double().mean())
    for sets in RULES:
        assert outer_quantile(strangeness(summary, y, sets), right - 0.01) == 0
        assert outer_quantile(strangeness(summary, y, sets), right + 0.01) > 0


# a linear network that knows the log-odds of three overlapping clusters, of which the third is rare


CENTRES = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]])


def clusters(n: int, seed: int, *, groups: bool = False) -> Examples:
    """The group is how noisy the example is."""
    rng = np.random.default_rng(seed)
    y = rng.choice(CLASSES, n, p=[0.55, 0.4, 0.05])
    noisy = rng.random(n) < 0.3
    x = CENTRES[y].numpy() + np.where(noisy, 2.2, 1.0)[:, None] * rng.standard_normal((n, 2))
    group = np.where(noisy, "noisy", "calm") if groups else None
    return Examples(torch.from_numpy(x).float(), torch.from_numpy(y), group)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(0)
    net = mlp(2, CLASSES)
    (linear,) = (m for m in net.modules() if isinstance(m, torch.nn.Linear))
    with torch.no_grad():
        linear.weight.copy_(0.6 * CENTRES)
        linear.bias.copy_(torch.tensor([0.0, -0.3, -1.5]))
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return stored(bayesianize(net, "deterministic"), path, input=Input(shape=(2,)), labels=("ant", "bee", "cat"))


def coverage_error(coverage: float, fresh: int, held: int) -> float:
    return math.sqrt(coverage * (1 - coverage) * (1 / fresh + 1 / held))


@pytest.mark.parametrize("score", ["probability", "aps", "raps"])
def test_each_class_is_covered_where_that_is_asked_for(model: Model, score: Any) -> None:
    held, test = clusters(3000, 1), clusters(8000, 2)
    settings = Calibrate(coverage=0.9, sets=score, per="class")
    each = calibrate(model, held, settings, validation=clusters(500, 3))
    of_all = calibrate(model, held, Calibrate(coverage=0.9, sets=score), validation=clusters(500, 3))
    figures = evaluate(each, test).figures
    assert [row["name"] for row in figures["parts"]] == ["ant", "bee", "cat"]
    for c, row in enumerate(figures["parts"]):
        n = int((held.y == c).sum())
        assert (row["promised"], row["calibrated_on"]) == (0.9, n)
        assert row["examples"] == int((test.y == c).sum())
        assert row["coverage"] > 0.9 - 3 * coverage_error(0.9, row["examples"], n)
    rare = evaluate(of_all, test[test.y == 2]).figures["coverage"]
    error = coverage_error(0.9, int((test.y == 2).sum()), len(held))
    assert rare < 0.9 - 3 * error  # which is what makes it worth asking for
    assert "parts" not in evaluate(of_all, test[:100]).figures


def test_each_group_is_covered_where_that_is_asked_for(model: Model) -> None:
    made = calibrate(model, clusters(6000, 1, groups=True), Calibrate(coverage=0.9, per="group"))
    calibration = made.card.calibration
    assert calibration is not None
    assert calibration.groups is not None
    assert list(calibration.groups) == ["calm", "noisy"]
    figures = evaluate(made, clusters(8000, 2, groups=True)).figures
    assert figures["calibration"]["per"] == "group"
    for row in figures["parts"]:
        assert row["coverage"] > 0.9 - 3 * coverage_error(0.9, row["examples"], row["calibrated_on"])
    calm, noisy = figures["parts"]
    assert noisy["set_size"] > calm["set_size"] + 0.1
    assert "parts" not in evaluate(made, clusters(100, 2)).figures  # they name no groups


def test_a_small_class_is_promised_what_its_examples_can(model: Model) -> None:
    """Of n examples the largest score is within n/(n + 1); without any, the quantile of all."""
    held = clusters(400, 1)
    rare = (held.y == 2).nonzero()[:, 0]
    few = held[torch.cat([(held.y < 2).nonzero()[:, 0], rare[:3]])]
    calibration = calibrate(model, few, Calibrate(coverage=0.9, per="class")).card.calibration
    assert calibration is not None
    assert calibration.classes is not None
    assert (calibration.classes[2].examples, calibration.classes[2].coverage) == (3, 0.75)
    scores = strangeness(evaluate(model, few).inside, few.y, Sets())
    assert calibration.classes[2].quantiles[1] == pytest.approx(float(scores[-3:].max()), abs=1e-6)
    assert too_small(calibration, ("ant", "bee", "cat")) == [
        "class cat has 3 calibration examples; 90% needs 9, so it is promised 75%"
    ]
    none = calibrate(model, held[(held.y < 2).nonzero()[:, 0]], Calibrate(coverage=0.9, per="class")).card.calibration
    assert none is not None
    assert none.classes is not None
    assert none.classes[2].quantiles == none.quantiles
    assert "promised nothing of its own" in too_small(none, None)[0]
    enough = calibrate(model, clusters(400, 1), Calibrate(coverage=0.9, per="class")).card.calibration
    assert enough is not None
    assert too_small(enough, None) == []


def test_constants_come_from_the_validation_part(model: Model) -> None:
    """Other validation examples give another temperature; the same ones with other calibration examples do not."""
    settings = Calibrate(temperature=True, sets="raps")

    def found(held: int, validation: int | None) -> tuple[float, Sets | None]:
        part = None if validation is None else clusters(300, validation)
        calibration = calibrate(model, clusters(500, held), settings, validation=part).card.calibration
        assert calibration is not None
        return calibration.temperature, calibration.sets

    assert found(1, 10) == found(2, 10)
    assert found(1, 10)[0] != found(1, 11)[0]
    assert found(1, None)[0] not in (found(1, 10)[0], 1.0)  # of some of the calibration examples
    with pytest.raises(CalibrationError, match=r"39 examples are too few.*at least 20, beside 20 for the temperature"):
        calibrate(model, clusters(39, 1), settings)


def test_what_cannot_be_divided_is_refused(model: Model) -> None:
    with pytest.raises(CalibrationError, match="name no groups"):
        calibrate(model, clusters(100, 1), Calibrate(per="group"))


def test_evaluate_states_coverage_by_size(model: Model) -> None:
    test = clusters(3000, 2)
    evaluation = evaluate(calibrate(model, clusters(500, 1), Calibrate(coverage=0.97)), test)
    f, inside = evaluation.figures, evaluation.inside
    assert isinstance(inside, Classified)
    assert sum(row["examples"] for row in f["sets"]) == 3000
    assert sum(row["share"] * row["coverage"] for row in f["sets"]) == pytest.approx(f["coverage"])
    sizes: dict[int, list[bool]] = {}
    calibration = evaluation.model.card.calibration
    assert calibration is not None
    for p, y in zip(inside.probabilities.double().tolist(), test.y.tolist(), strict=True):
        before = [sum(q for q in p if q > mine) for mine in p]  # no two are equal here
        fits = [b <= calibration.quantiles[1] for b in before]
        sizes.setdefault(sum(fits), []).append(fits[y])
    assert {(row["from"], row["to"]): (row["examples"], row["coverage"]) for row in f["sets"]} == {
        (size, size): (len(hits), pytest.approx(np.mean(hits))) for size, hits in sizes.items()
    }


# the commands


def as_npz(path: Path, examples: Examples, **more: NDArray[Any]) -> str:
    arrays: dict[str, Any] = {"x": examples.x.numpy(), "y": examples.y.numpy(), **more}
    if examples.group is not None:
        arrays["group"] = examples.group
    np.savez(path, **arrays)
    return f"npz:{path}"


def test_the_commands_calibrate_evaluate_and_predict_by_group(model: Model, tmp_path: Path) -> None:
    file, out = tmp_path / "m.safetensors", tmp_path / "c.safetensors"
    save(model, file)
    data = as_npz(tmp_path / "held.npz", clusters(300, 1, groups=True)[:300])
    run = CliRunner().invoke
    done = run(app, ["calibrate", str(file), "--data", data, "--per", "group", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "APS" in done.stdout
    assert "by group: calm, noisy" in done.stdout
    done = run(app, ["evaluate", str(out), "--data", data, "--report", str(tmp_path / "report")])
    assert done.exit_code == 0, done.output
    assert "coverage by size of the set" in done.stdout
    assert "coverage by group" in done.stdout
    page = (tmp_path / "report" / "index.html").read_text()
    assert ">set size</th>" in page
    assert "noisy" in page
    np.save(tmp_path / "x.npy", clusters(40, 2).x.numpy())
    sets = {}
    for group in ("calm", "noisy"):
        done = run(app, ["predict", str(out), str(tmp_path / "x.npy"), "--group", group, "--seed", "0", "--json"])
        assert done.exit_code == 0, done.output
        sets[group] = [len(row["prediction_set"]) for row in json.loads(done.stdout)["predictions"]]
    assert min(sets["calm"]) >= 1
    assert sum(sets["noisy"]) > sum(sets["calm"])
    done = run(app, ["predict", str(out), str(tmp_path / "x.npy"), "--group", "other"])
    assert isinstance(done.exception, DubitoError)
    assert "calibrated for: calm, noisy" in str(done.exception)


def as_csv(path: Path, examples: Examples) -> str:
    """Columns a, b, class, and the group where there is one."""
    named = [] if examples.group is None else ["how"]
    lines = [",".join(["a", "b", *named, "class"])]
    for i, (a, b) in enumerate(examples.x.tolist()):
        groups = [] if examples.group is None else [str(examples.group[i])]
        lines.append(",".join([repr(a), repr(b), *groups, ("ant", "bee", "cat")[examples.y[i]]]))
    path.write_text("\n".join(lines))
    return f"csv:{path}"


def test_a_table_without_the_column_of_groups(model: Model, tmp_path: Path) -> None:
    """It can be evaluated, without the coverage by group; --per group asks for the column."""
    file, out = tmp_path / "m.safetensors", tmp_path / "c.safetensors"
    save(model.with_card(provenance=Provenance(recipe={"data": {"name": "csv:table.csv", "group": "how"}})), file)
    grouped = as_csv(tmp_path / "grouped.csv", clusters(300, 1, groups=True))
    plain = as_csv(tmp_path / "plain.csv", clusters(300, 2))
    run = CliRunner().invoke
    done = run(app, ["calibrate", str(file), "--data", grouped, "--per", "group", "--out", str(out)])
    assert done.exit_code == 0, done.output
    shown = {}
    for data in (grouped, plain):
        done = run(app, ["evaluate", str(out), "--data", data, "--json"])
        assert done.exit_code == 0, done.output
        figures = json.loads(done.stdout)
        shown[data] = (figures["examples"], "parts" in figures, "coverage by group is left out" in done.stderr)
    assert shown == {grouped: (300, True, False), plain: (300, False, True)}
    done = run(app, ["calibrate", str(file), "--data", plain, "--per", "group", "--out", str(out)])
    assert str(done.exception) == f"{tmp_path}/plain.csv has no column 'how'; its columns are: a, b, class."
    assert run(app, ["calibrate", str(file), "--data", plain, "--out", str(out)]).exit_code == 0


def test_the_command_warns_of_small_classes_and_refuses_words(model: Model, tmp_path: Path) -> None:
    file, out = tmp_path / "m.safetensors", tmp_path / "c.safetensors"
    save(model, file)
    held = clusters(2000, 1)
    few = torch.cat([(held.y != 2).nonzero()[:56, 0], (held.y == 2).nonzero()[:4, 0]])
    data = as_npz(tmp_path / "held.npz", held[few])
    command = ["calibrate", str(file), "--data", data, "--out", str(out)]
    done = CliRunner().invoke(app, [*command, "--per", "class"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert "warning: class cat has 4 calibration examples; 90% needs 9, so it is promised 80%." in said
    for more, message in (
        (["--sets", "lac"], "--sets is lac; expected aps, raps or probability."),
        (["--per", "colour"], "--per is colour; expected class or group."),
        (["--per", "group"], "name no groups"),
    ):
        done = CliRunner().invoke(app, [*command, *more])
        assert isinstance(done.exception, DubitoError)
        assert message in str(done.exception)


def test_groups_of_an_npz_file(tmp_path: Path) -> None:
    examples = clusters(30, 1)
    numbered = as_npz(tmp_path / "a.npz", examples, group=np.arange(30) % 2)
    read = read_data(numbered).train
    assert read.group is not None
    assert read.group.tolist() == ["0", "1"] * 15
    assert read[torch.tensor([3, 4])].group.tolist() == ["1", "0"]  # type: ignore[union-attr]
    for wrong in (np.zeros(30), np.array(["a"] * 29), np.array(["x" * 101] * 30)):
        with pytest.raises(DataError, match="group"):
            read_data(as_npz(tmp_path / "b.npz", examples, group=wrong))
