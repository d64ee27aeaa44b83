"""Settings under which a small model is calibrated and evaluated in a fraction of the time."""

import pytest

from dubito.training import beside, calibrate
from dubito.training.data import spoil
from dubito.training.evaluation import evaluate, predicting

REQUESTS = 4


def few(patch: pytest.MonkeyPatch) -> None:
    """Fewer requests, resamples and spoiled inputs: most of the time of a small training or evaluation.

    For tests that ask neither how well a calibration keeps its promises nor how exact a standard error is.
    """
    patch.setattr(calibrate, "CALIBRATION_REQUESTS", REQUESTS)
    patch.setattr(spoil, "SPOILED", 50)
    patch.setattr(beside, "RESAMPLED", 10)
    patch.setattr(beside, "REQUESTS", REQUESTS)
    patch.setattr(evaluate, "REQUESTS", REQUESTS)
    for asks in (predicting.predict_grid, predicting.predict_auto, predicting.ChosenPredictive.predict):
        assert asks.__kwdefaults__ is not None
        patch.setitem(asks.__kwdefaults__, "requests", REQUESTS)
