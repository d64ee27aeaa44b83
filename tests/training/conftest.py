"""What tests of training share."""

from collections.abc import Iterator

import pytest

from tests.few import few


@pytest.fixture(scope="module")
def few_requests() -> Iterator[None]:
    """For a file."""
    with pytest.MonkeyPatch.context() as patch:
        few(patch)
        yield


@pytest.fixture
def few_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test."""
    few(monkeypatch)
