"""What tests of training share."""

from collections.abc import Iterator

import pytest

from dubito.training import beside, calibrate, evaluate


@pytest.fixture(scope="module")
def few_requests() -> Iterator[None]:
    """Calibrates and compares by fewer requests and resamples, which take most of a small training's time.

    For tests that ask neither how well a calibration keeps its promises nor how exact a standard error is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "ASKED", 4)
        patch.setattr(beside, "RESAMPLED", 10)
        patch.setattr(beside, "REQUESTS", 1)
        patch.setattr(evaluate, "REQUESTS", 4)
        for asks in (evaluate.ask, evaluate.ask_settled, evaluate.Way.ask):
            patch.setitem(asks.__kwdefaults__, "requests", 4)
        yield
