"""The toy of [Ritter21, section 4.1]: a mean-field posterior over weights knows no doubt between two clusters."""

from functools import cache

import pytest

from benchmarks.toy import Answer, answer


@cache
def found(method: str, steps: int) -> Answer:
    return answer(method, steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "steps"), [("fcg-u", 1000), ("ensemble-u", 1000), ("ensemble-u", 150)])
def test_inducing_weights_doubt_between_the_clusters_where_mean_field_does_not(method: str, steps: int) -> None:
    """Seeds 0 to 10, 500 steps: RMSE up to 0.092 (ensemble-u) and 0.103 (ffg-w); both ratios of them are above 1.8.

    After 150 steps, RMSE up to 0.135 and 0.251, and ratios above 2.8. Of fcg-u, which takes longer, seed 1 was tried:
    RMSE 0.054, ratios of 1.6 and 1.9.
    """
    ours, mean_field = found(method, steps), found("ffg-w", steps)
    assert ours.rmse < (0.12 if steps >= 500 else 0.2)
    assert mean_field.rmse < (0.2 if steps >= 500 else 0.35)
    assert ours.between > 1.3 * mean_field.between
    assert ours.between / ours.near > 1.3 * mean_field.between / mean_field.near  # not because it is wider everywhere
