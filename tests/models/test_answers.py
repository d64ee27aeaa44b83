"""Predictions in words: the fields of the contract, and what calibration decides."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dubito.models import load, predict, save
from dubito.models.manifest import Calibration, Card
from dubito.models.predictions.answers import answers, joined_columns
from dubito.models.predictions.prediction import Prediction
from dubito.models.predictions.uncertainty import Regressed
from tests.models.test_uncertainty import summarise
from tests.small_models import bayesian_mlp


def calibrated(**changes: Any) -> Calibration:
    grid = {0: 1.05, 1: 1.0, 4: 0.9, 16: 0.8}
    stated: dict[str, Any] = {
        "false_positive_rate": 0.05,
        "coverage": 0.9,
        "measure": "mutual_information",
        "thresholds": {"mutual_information": {0: 9.0, 1: 9.0, 4: 0.04, 16: 0.03}, "entropy": grid},
        "quantiles": {0: 0.5, 4: 0.6, 16: 0.7},
    }
    return Calibration(**{**stated, **changes})


# two draws, three inputs, three classes: sure, torn between the draws, and unsure in each
P = [[[0.9, 0.05, 0.05], [0.8, 0.1, 0.1], [0.34, 0.33, 0.33]], [[0.9, 0.05, 0.05], [0.1, 0.8, 0.1], [0.34, 0.33, 0.33]]]
FIELDS = {
    "label",
    "class",
    "probabilities",
    "max_probability",
    "entropy",
    "expected_entropy",
    "mutual_information",
    "prediction_set",
    "ood",
}


def asked(card: Card, K: int) -> list[dict[str, Any]]:
    """The rows for the draws above, as if they were K: the summary does not depend on it, what is calibrated does."""
    return answers(Prediction(summarise(torch.tensor(P, dtype=torch.float64).log()), K, 0, None), card)


def test_an_answer_has_the_fields_of_the_contract() -> None:
    card = Card(labels=("cat", "dog", "owl"), calibration=calibrated())
    rows = asked(card, 20)
    assert json.loads(json.dumps(rows)) == rows
    mean = np.mean(P, axis=0)

    def entropy(p: Any) -> Any:
        return -np.sum(p * np.log(p), axis=-1)

    for i, row in enumerate(rows):
        assert row.keys() == FIELDS
        assert row["probabilities"] == pytest.approx(mean[i], abs=1e-6)
        assert row["class"] == int(mean[i].argmax())
        assert row["label"] == ("cat", "dog", "owl")[row["class"]]
        assert row["max_probability"] == max(row["probabilities"])
        assert row["entropy"] == pytest.approx(entropy(mean[i]), abs=1e-6)
        assert row["expected_entropy"] == pytest.approx(entropy(np.array(P)[:, i]).mean(), abs=1e-6)
        assert row["mutual_information"] == pytest.approx(row["entropy"] - row["expected_entropy"], abs=1e-6)
        assert row["ood"].keys() == {"flag", "score", "threshold", "measure", "samples"}
    assert [row["ood"]["flag"] for row in rows] == [False, True, False]
    assert rows[1]["ood"] == {
        "flag": True,
        "score": rows[1]["mutual_information"],
        "threshold": 0.03,
        "measure": "mutual_information",
        "samples": 16,
    }
    assert [row["prediction_set"] for row in rows] == [["cat"], ["cat", "dog"], ["cat", "dog", "owl"]]


@pytest.mark.parametrize(
    ("K", "samples", "threshold"), [(1000, 16, 0.03), (16, 16, 0.03), (15, 4, 0.04), (4, 4, 0.04), (3, 1, 9.0)]
)
def test_the_grid_point_at_or_below_K_is_used(K: int, samples: int, threshold: float) -> None:
    for row in asked(Card(calibration=calibrated()), K):
        assert (row["ood"]["samples"], row["ood"]["threshold"]) == (samples, threshold)
        assert row["ood"]["measure"] == "mutual_information"
        assert row["ood"]["flag"] == (row["mutual_information"] > threshold)


@pytest.mark.parametrize(("K", "threshold"), [(1, 1.0), (0, 1.05)])
def test_one_function_is_judged_by_its_entropy(K: int, threshold: float) -> None:
    rows = asked(Card(calibration=calibrated()), K)
    for row in rows:
        assert row["ood"]["measure"] == "entropy"
        assert (row["ood"]["samples"], row["ood"]["threshold"]) == (K, threshold)
        assert row["ood"]["score"] == row["entropy"]
    assert [row["ood"]["flag"] for row in rows] == [False, False, True]


def test_other_measures_need_no_fallback() -> None:
    card = Card(calibration=calibrated(measure="max_probability", thresholds={"max_probability": {0: 0.4, 2: 0.6}}))
    for K, flags in ((1, [False, True, True]), (2, [False, False, True])):
        rows = asked(card, K)
        assert [row["ood"]["flag"] for row in rows] == flags
        assert {row["ood"]["measure"] for row in rows} == {"max_probability"}
        assert rows[0]["ood"]["score"] == pytest.approx(0.1)


def test_prediction_sets_may_be_empty_and_follow_K() -> None:
    rows = asked(Card(calibration=calibrated(quantiles={0: 0.05, 4: 0.15, 16: 1.0})), 3)
    assert [row["prediction_set"] for row in rows] == [[], [], []]
    rows = asked(Card(calibration=calibrated(quantiles={0: 0.05, 4: 0.15, 16: 1.0})), 5)
    assert [row["prediction_set"] for row in rows] == [["0"], [], []]
    rows = asked(Card(calibration=calibrated(quantiles={0: 0.05, 4: 0.15, 16: 1.0})), 16)
    assert [row["prediction_set"] for row in rows] == [["0", "1", "2"]] * 3


def test_a_class_at_the_quantile_fits() -> None:
    score = 1 - asked(Card(), 4)[0]["max_probability"]
    for quantile, fitting in ((score, ["0"]), (score - 1e-9, [])):
        assert asked(Card(calibration=calibrated(quantiles={0: quantile})), 4)[0]["prediction_set"] == fitting


def test_what_is_not_calibrated_is_none() -> None:
    for row in asked(Card(), 20):
        assert row.keys() == FIELDS
        assert row["prediction_set"] is None
        assert row["ood"] is None
        assert row["label"] == str(row["class"])
    above = calibrated(thresholds={"mutual_information": {8: 0.1}}, quantiles={8: 0.5})
    for K in (0, 1, 7):  # the grid starts above K, or has no entropy for K = 1
        for row in asked(Card(calibration=above), K):
            assert (row["prediction_set"], row["ood"]) == (None, None)
    assert asked(Card(calibration=above), 8)[0]["ood"]["samples"] == 8


def test_answers_of_a_regression() -> None:
    summary = Regressed(
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[0.0, 0.0], [0.75, 0.0]]),
        torch.tensor([[0.25, 4.0], [0.25, 4.0]]),
    )
    rows = answers(Prediction(summary, 20, 0, None), Card())
    assert all(row["interval"] is None and row["ood"] is None for row in rows)
    calibration = calibrated(
        measure="epistemic_variance", thresholds={"epistemic_variance": {0: 5.0, 16: 1.0}}, quantiles={0: 1.0, 16: 2.0}
    )
    rows = answers(Prediction(summary, 20, 0, None), Card(calibration=calibration))
    assert json.loads(json.dumps(rows)) == rows
    assert all(row.keys() == {"mean", "epistemic_variance", "aleatoric_variance", "interval", "ood"} for row in rows)
    assert rows[1]["mean"] == [3.0, 4.0]
    assert rows[1]["epistemic_variance"] == [0.75, 0.0]
    assert rows[1]["aleatoric_variance"] == [0.25, 4.0]
    assert rows[0]["interval"] == [[0.0, 2.0], [-2.0, 6.0]]  # 2 standard deviations to each side
    assert rows[1]["interval"] == [[1.0, 5.0], [0.0, 8.0]]
    assert [row["ood"]["flag"] for row in rows] == [False, True]  # by the mean of 3 and 0
    assert rows[1]["ood"] == {
        "flag": True,
        "score": 1.5,
        "threshold": 1.0,
        "measure": "epistemic_variance",
        "samples": 16,
    }


def test_a_loaded_model_answers_by_its_card(tmp_path: Path) -> None:
    """From the file to the rows: temperature, K as really drawn, labels."""
    torch.manual_seed(0)
    network, x = bayesian_mlp((6, 5, 4), "ffg-u", inducing=3), torch.randn(7, 6)
    card = Card(labels=tuple("abcd"), calibration=calibrated(temperature=2.0))
    save(network, tmp_path / "model", card=card)
    model = load(tmp_path / "model")
    logits = predict(network, network.factors(), x, 20, 3, keep_outputs=True).outputs
    assert logits is not None
    rows = answers(model.predict(x, 20, 3), model.card)
    for row, p in zip(rows, (logits.double() / 2).softmax(-1).mean(0), strict=True):
        assert row["probabilities"] == pytest.approx(p.tolist(), abs=1e-6)
        assert row["label"] == "abcd"[int(p.argmax())]
        assert row["ood"]["samples"] == 16
    assert {row["ood"]["measure"] for row in answers(model.predict(x, 0), model.card)} == {"entropy"}


def test_a_calibration_for_auto_must_know_its_own_measure() -> None:
    auto = {"tolerance": 0.05, "max_samples": 128, "thresholds": {"entropy": 1.0}, "quantile": 0.5}
    assert calibrated(measure="entropy", auto=auto).auto is not None
    with pytest.raises(ValueError, match="'mutual_information' has no threshold for samples"):
        calibrated(auto=auto)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parts_of_which_one_has_no_rule_are_joined(order: tuple[int, ...]) -> None:
    """As with "auto", where one part has settled by fewer draws than any threshold was fitted for."""
    bare = {"class": np.array([0, 2]), "samples": np.array([8, 8])}
    ruled = {
        "class": np.array([1]),
        "samples": np.array([16]),
        "prediction_set": np.array([[False, True, True]]),
        "ood": np.array([True]),
        "ood_score": np.array([0.5], np.float32),
    }
    parts = [(bare, ruled)[i] for i in order]
    found = joined_columns(parts)
    rows = [row for i in order for row in ((0, 1), (2,))[i]]
    assert found["class"].tolist() == [[0, 2, 1][row] for row in rows]
    assert found["prediction_set"].tolist() == [[False, row == 2, row == 2] for row in rows]
    assert found["ood"].tolist() == [row == 2 for row in rows]
    np.testing.assert_array_equal(found["ood_score"], [0.5 if row == 2 else np.nan for row in rows])
    assert (found["ood"].dtype.kind, found["ood_score"].dtype.itemsize) == ("b", 4)
