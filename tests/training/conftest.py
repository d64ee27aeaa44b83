"""What tests of training share."""

from collections.abc import Iterator

import pytest

from dubito.training import beside, calibrate
from dubito.training.evaluation import predicting
from tests.few import few


def fewer(patch: pytest.MonkeyPatch) -> None:
    """`few`, with one request for what does not ask for a standard error over requests."""
    few(patch)
    patch.setattr(calibrate, "CALIBRATION_REQUESTS", 1)
    patch.setattr(beside, "REQUESTS", 1)
    patch.setitem(predicting.ChosenPredictive.predict.__kwdefaults__, "requests", 1)


@pytest.fixture(scope="module")
def few_requests() -> Iterator[None]:
    """For a file."""
    with pytest.MonkeyPatch.context() as patch:
        fewer(patch)
        yield


@pytest.fixture
def few_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test."""
    fewer(monkeypatch)
