"""What tests of training share."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dubito.training import beside, calibrate
from dubito.training.evaluation import predicting
from tests.few import few

# `torch.manual_seed` writes down the stack for every kind of device that is not in use; other versions may not
for absent in (torch.cuda, torch.xpu, torch.mtia):
    pytest.MonkeyPatch().setattr(absent, "traceback", SimpleNamespace(format_stack=list), raising=False)


def fewer(patch: pytest.MonkeyPatch) -> None:
    """`few`, with one request for what does not ask for a standard error over requests."""
    few(patch)
    patch.setattr(calibrate, "CALIBRATION_REQUESTS", 1)
    patch.setattr(beside, "REQUESTS", 1)
    choose_by_one(patch)


def choose_by_one(patch: pytest.MonkeyPatch) -> None:
    """One request for what a measure, a temperature or constants are chosen by, and for the figures of a card."""
    defaults = predicting.ChosenPredictive.predict.__kwdefaults__
    assert defaults is not None
    patch.setitem(defaults, "requests", 1)


@pytest.fixture(scope="module")
def two_requests() -> Iterator[None]:
    """For a file that asks what requests do."""
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        yield


@pytest.fixture(scope="module")
def few_requests() -> Iterator[None]:
    """For a file."""
    with pytest.MonkeyPatch.context() as patch:
        fewer(patch)
        yield


@pytest.fixture(scope="module")
def choice_by_one_request() -> Iterator[None]:
    """For a file whose tests ask how well calibrations keep their promises."""
    with pytest.MonkeyPatch.context() as patch:
        choose_by_one(patch)
        yield


@pytest.fixture
def few_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test."""
    fewer(monkeypatch)
