"""Memory does not grow with K: measured in processes of their own, by the code of the benchmark."""

import pytest

from benchmarks.memory import peak


@pytest.mark.slow
def test_twenty_samples_of_a_resnet50_stay_under_twice_one_deterministic_pass() -> None:
    assert peak("ours", 20, 32) < 2 * peak("plain", 1, 32)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    small = {"name": "resnet18-cifar"}
    few, many = peak("ours", 8, 4, **small), peak("ours", 24, 4, **small)  # one pass of 32 rows, and three
    assert many < 1.3 * few + 20e6, (few, many)
    assert peak("ours", 3, 32, **small) < 2 * peak("plain", 1, 32, **small)
