"""Prediction sets: scores against brute force, rules of classes and groups, and never an empty set."""

import json
from fractions import Fraction
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dubito.models import load, save
from dubito.models.artifact import artifact
from dubito.models.errors import ArtifactError, InputError
from dubito.models.manifest import Calibration, Card, Part, Sets
from dubito.models.predictions.answers import Rule, answers, columns_of
from dubito.models.predictions.prediction import Prediction
from dubito.models.predictions.sets import class_scores
from dubito.models.predictions.uncertainty import Classified
from tests.small_models import bayesian_mlp

RULES = [Sets(score="probability"), Sets(), Sets(score="raps", lam=0.125, k_reg=2)]
NAMES = [sets.score for sets in RULES]
Array = NDArray[Any]


def dyadic(rows: int, C: int, seed: int) -> Array:
    """Probabilities in sixteenths: sums of them are exact, and many are equal, or zero."""
    rng = np.random.default_rng(seed)
    return (np.stack([rng.multinomial(16, rng.dirichlet(np.ones(C))) for _ in range(rows)]) / 16).astype(np.float32)


def classified(p: Array) -> Classified:
    nothing = torch.zeros(len(p))
    return Classified(torch.from_numpy(p.astype(np.float32)), nothing, nothing, nothing)


def by_brute_force(p: Array, sets: Sets) -> list[Fraction]:
    """Of all orders of the classes the one that no other precedes; then each score by its definition."""
    C = len(p)
    falling = [o for o in permutations(range(C)) if all(p[a] >= p[b] for a, b in pairwise(o))]
    order = min(falling)  # of equal probabilities, the smaller class first
    found = []
    for c in range(C):
        rank = order.index(c) + 1
        if sets.score == "probability":
            score = 0 if rank == 1 else 1 - Fraction(float(p[c]))
        else:
            score = sum((Fraction(float(p[likelier])) for likelier in order[: rank - 1]), Fraction(0))
            score += Fraction(sets.lam) * max(0, rank - sets.k_reg)
        found.append(Fraction(score))
    return found


@pytest.mark.parametrize("sets", RULES, ids=NAMES)
def test_scores_are_those_of_brute_force(sets: Sets) -> None:
    for C in (2, 3, 5):
        p = dyadic(60, C, C)
        found = class_scores(p, sets)
        for row, scores in zip(p, found, strict=True):
            assert [Fraction(s) for s in scores.tolist()] == by_brute_force(row, sets)


def test_the_score_of_format_1_is_one_minus_the_probability() -> None:
    p = dyadic(50, 4, 0)
    assert (class_scores(p, None) == 1 - p).all()


@pytest.mark.parametrize("sets", RULES, ids=NAMES)
def test_no_set_is_empty_whatever_the_quantile(sets: Sets) -> None:
    rng = np.random.default_rng(1)
    p = np.concatenate([dyadic(200, 7, 2), rng.dirichlet(np.full(7, 0.05), 200), np.full((1, 7), 1 / 7), np.eye(7)])
    for quantile in (0.0, 1e-300, 0.3, 1.0, 9.0):
        fits = columns_of(classified(p), [Rule(None, quantile, sets)] * len(p))["prediction_set"]
        assert fits[np.arange(len(p)), p.argmax(1)].all()
        if quantile == 0:
            assert fits.sum() == len(p)  # nothing but the most probable class
        if quantile == 9:
            assert fits.all()


def calibration(**more: Any) -> Calibration:
    stated: dict[str, Any] = {
        "false_positive_rate": 0.05,
        "coverage": 0.9,
        "measure": "entropy",
        "thresholds": {"entropy": {0: 1.0}},
        "quantiles": {0: 0.6},
        "sets": Sets(),
    }
    return Calibration(**{**stated, **more})


def part(quantile: float, examples: int = 99) -> Part:
    return Part(examples=examples, coverage=0.9, quantiles={0: quantile})


P = np.array([[0.7, 0.2, 0.1], [0.1, 0.5, 0.4], [0.4, 0.4, 0.2]])


def sets_of(calibration: Calibration | None, group: str | None = None) -> list[list[str]]:
    found = answers(Prediction(classified(P), 20, 0, None), Card(calibration=calibration), group)
    return [row["prediction_set"] for row in found]


def test_sets_of_classes_and_of_groups_have_quantiles_of_their_own() -> None:
    assert sets_of(calibration()) == [["0"], ["1", "2"], ["0", "1"]]
    each = calibration(classes=(part(0.0), part(0.75), part(0.95)))
    assert sets_of(each) == [["0", "1", "2"], ["1", "2"], ["0", "1", "2"]]  # by scores 0, 0.7, 0.9; 0.9, 0, 0.5; …
    groups = calibration(groups={"north": part(0.0), "south": part(2.0)})
    assert sets_of(groups) == sets_of(calibration())  # nobody said which
    assert sets_of(groups, "north") == [["0"], ["1"], ["0"]]
    assert sets_of(groups, "south") == [["0", "1", "2"]] * 3
    with pytest.raises(InputError, match=r"group is 'west'; this model was calibrated for: north, south\."):
        sets_of(groups, "west")
    with pytest.raises(InputError, match="was not calibrated by group"):
        sets_of(calibration(), "north")


def test_a_calibration_for_another_number_of_classes_is_refused() -> None:
    with pytest.raises(ArtifactError, match="tells 3 classes apart"):
        sets_of(calibration(classes=(part(0.0), part(0.5))))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quantiles": {0: -0.1}}, "below 0"),
        ({"groups": {"a": part(-1.0)}}, "below 0"),
        ({"groups": {"a": Part(examples=9, coverage=0.9, quantiles={1: 0.5})}}, "other answers"),
        ({"classes": (part(0.5),), "sets": None}, "needs `sets`"),
        ({"classes": (part(0.5),), "groups": {"a": part(0.5)}}, "no `groups` beside"),
        ({"sets": {"score": "aps", "lam": 0.1}}, "with aps they are 0 and 1"),
    ],
)
def test_a_calibration_that_makes_no_sense_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibration(**more)


# files


def stored(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found: dict[str, Any] = json.loads(header["__metadata__"]["dubito"])
    return found


def written(path: Path, told: Calibration | None) -> Path:
    torch.manual_seed(0)
    network = bayesian_mlp((2, 4, 3), "ffg-u", inducing=2)
    save(network, path, card=Card(calibration=told))
    return path


def test_a_file_of_format_1_keeps_its_format_and_its_rule(tmp_path: Path) -> None:
    """It may be saved again and read by older versions, which refuse keys that they do not know."""
    old = written(tmp_path / "old.safetensors", calibration(sets=None))
    for path in (old, tmp_path / "again.safetensors"):
        told = stored(path)
        assert told["format"] == 1
        assert not {"sets", "classes", "groups"} & told["card"]["calibration"].keys()
        model = load(path)
        assert model.manifest.format == 1
        assert sets_of(model.card.calibration) == [["0"], ["1", "2"], ["0", "1"]]  # 1 − p ≤ 0.6
        assert sets_of(calibration(sets=None, quantiles={0: 0.1})) == [[], [], []]
        save(model, tmp_path / "again.safetensors")
    assert stored(written(tmp_path / "plain.safetensors", None))["format"] == 1


def test_a_newer_rule_comes_back_and_is_refused_by_older_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = calibration(sets=Sets(score="raps", lam=0.01, k_reg=3), groups={"north": part(0.25, 7)})
    path = written(tmp_path / "new.safetensors", told)
    assert stored(path)["format"] == 2
    assert load(path).card.calibration == told
    monkeypatch.setattr(artifact, "FORMATS", (1,))  # as it was before
    with pytest.raises(ArtifactError) as refused:
        load(path)
    assert str(refused.value) == (
        f"{path}: its format is 2; this version of dubito reads format 1. Update dubito, or save it again."
    )
