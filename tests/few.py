"""Settings under which a small model is calibrated and evaluated in a fraction of the time."""

import pytest

from dubito.training import beside, calibrate, evaluate


def few(patch: pytest.MonkeyPatch) -> None:
    """Fewer requests, resamples, spoiled and shifted inputs: most of the time of a small training or evaluation.

    For tests that ask neither how well a calibration keeps its promises nor how exact a standard error is.
    """
    patch.setattr(calibrate, "ASKED", 4)
    patch.setattr(calibrate, "SPOILED", 50)
    patch.setattr(beside, "RESAMPLED", 10)
    patch.setattr(beside, "REQUESTS", 1)
    patch.setattr(evaluate, "REQUESTS", 4)
    patch.setattr(evaluate, "SHIFTED", 20)
    for asks in (evaluate.ask, evaluate.ask_settled, evaluate.Way.ask):
        patch.setitem(asks.__kwdefaults__, "requests", 4)
