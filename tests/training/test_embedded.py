"""The model that comes with the package is what `dubito train digits` makes, and as good as it says."""

import pytest
from torch import Tensor

from dubito.models import load
from dubito.models.answers import answers
from dubito.models.embedded import embedded
from dubito.models.model import Model
from dubito.training.config import Recipe, read_recipe
from dubito.training.data import enter, part_of
from dubito.training.evaluate import measure
from dubito.training.shift import corrupt
from dubito.training.sources import read_data


@pytest.fixture(scope="module")
def model() -> Model:
    return load(embedded())


def test_it_is_small_and_calibrated(model: Model) -> None:
    assert embedded().stat().st_size <= 300_000
    calibration = model.card.calibration
    assert calibration is not None
    assert calibration.auto is not None
    assert {0, 1, 8, 20, 64} <= set(calibration.quantiles)


def test_it_comes_from_the_shipped_recipe(model: Model) -> None:
    provenance = model.card.provenance
    assert Recipe.model_validate(provenance.recipe) == read_recipe("digits")  # keys that came later have their defaults
    assert provenance.data_hash == read_data("digits").hash()


def test_it_is_as_good_as_it_says(model: Model) -> None:
    name, test = part_of(read_data("digits"), model.card)
    assert (name, len(test)) == ("test", 359)
    found = measure(model, test)
    assert found["accuracy"] >= 0.97
    for key, value in model.card.metrics.items():
        assert found[key] == pytest.approx(value, abs=1e-4), key  # the same draws, on whatever kind of CPU


def test_it_flags_what_is_no_digit(model: Model) -> None:
    _, test = part_of(read_data("digits"), model.card)
    declared = model.card.input
    assert declared is not None

    def flagged(x: Tensor) -> float:
        rows = answers(model.predict(enter(x, declared), 20, 0), model.card)
        return float(sum(row["ood"]["flag"] for row in rows)) / len(rows)

    inside, turned = flagged(test.x), flagged(corrupt(test.x, "rotation", 90.0))
    assert inside < 0.12
    assert turned > 3 * inside
