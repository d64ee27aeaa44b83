"""What tests of training share."""

from collections.abc import Iterator

import pytest

from dubito.training import beside, calibrate


@pytest.fixture(scope="module")
def few_requests() -> Iterator[None]:
    """Calibrates and compares by fewer requests and resamples, which take most of a small training's time.

    For tests that ask neither how well a calibration keeps its promises nor how exact a standard error is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "ASKED", 25)
        patch.setattr(beside, "RESAMPLED", 10)
        yield
