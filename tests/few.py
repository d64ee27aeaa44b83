"""Settings under which a small model is calibrated and evaluated in a fraction of the time."""

from functools import cache

import pytest

from dubito.training import beside, calibrate, choice, estimate
from dubito.training.data import spoil
from dubito.training.evaluation import evaluate, predicting

REQUESTS = 2
GRID = (1, 4, 20)
timed = cache(choice.timed)  # once for all tests of a process


def few(patch: pytest.MonkeyPatch) -> None:
    """Fewer requests, draws, resamples and spoiled inputs: most of the time of a small training or evaluation. How fast
    the machine is is measured once, and how long a step takes by one step.

    For tests that ask neither how well a calibration keeps its promises nor how exact a standard error is.
    """
    patch.setattr(calibrate, "CALIBRATION_REQUESTS", REQUESTS)
    patch.setattr(spoil, "SPOILED", 20)
    for room in (calibrate, evaluate, predicting):
        patch.setattr(room, "GRID", GRID)
    patch.setattr(choice, "timed", timed)
    patch.setattr(estimate, "WARM_UP", {"cpu": 0, "cuda": 12})
    patch.setattr(estimate, "TIMES", 1)
    patch.setattr(beside, "RESAMPLED", 10)
    patch.setattr(beside, "REQUESTS", REQUESTS)
    patch.setattr(evaluate, "REQUESTS", REQUESTS)
    for asks in (predicting.predict_grid, predicting.predict_auto, predicting.ChosenPredictive.predict):
        assert asks.__kwdefaults__ is not None
        patch.setitem(asks.__kwdefaults__, "requests", REQUESTS)
