"""How long queued work is expected to take."""

import math
from contextlib import nullcontext
from pathlib import Path

import pytest

from dubito.models import load
from dubito.service.engine.engine import PACED, Engine
from dubito.service.engine.pace import MOST_RUNS, Pace, least_seconds


def test_nothing_is_known_at_first() -> None:
    assert Pace().of(1000, 10) == 0.0


def test_what_a_batch_and_what_its_work_costs_are_told_apart() -> None:
    pace = Pace()
    for work in (20, 640, 40, 320, 20, 20):
        pace.add(work, 0.05 + 0.002 * work)
    assert pace.of(2000, 500) == pytest.approx(4 * 0.05 + 2000 * 0.002)


def test_batches_of_one_size_are_counted_as_batches() -> None:
    pace = Pace()
    for _ in range(5):
        pace.add(512, 0.25)
    assert pace.of(2048, 512) == pytest.approx(1.0)


def test_an_old_speed_is_forgotten() -> None:
    pace = Pace()
    for scale in (10.0, 1.0):
        for i in range(200):
            pace.add(10 + i % 7, scale * (10 + i % 7))
    assert pace.of(100, 1000) == pytest.approx(100.0, rel=0.01)


def test_larger_batches_that_took_less_give_no_negative_cost() -> None:
    pace = Pace()
    pace.add(1000, 0.1)
    pace.add(10, 0.3)
    assert pace.of(1000, 1000) == pytest.approx(0.2, rel=0.05)


def test_where_work_seems_to_cost_nothing_a_batch_has_what_was_seen_or_what_fits_the_seconds() -> None:
    assert Pace().work_in(1.0) == math.inf
    slow, flat = Pace([(20, 3.0)]), Pace([(20, 0.002), (80, 0.002)])
    assert slow.work_in(0.005) == pytest.approx(20)
    assert flat.work_in(0.02) == pytest.approx(10 * flat.work / flat.n)
    assert 20 < flat.work / flat.n < 80


def test_what_a_draw_takes_beside_its_rows() -> None:
    """Seconds of a batch of K draws: 3 + K (0.5 + 0.1 rows)."""
    K = 20
    pace = Pace([(K * rows, 3 + K * (0.5 + 0.1 * rows)) for rows in (1, 4, 16)])
    assert pace.a == pytest.approx(3 + K * 0.5)
    rows = pace.rows_of_a_draw(0.5 + 0.1 * 4, 4)
    assert rows == pytest.approx(5)
    apart = pace.without(K * rows)
    assert (apart.a, apart.b) == pytest.approx((3, 0.1))
    assert apart.work_in(13) == pytest.approx(100)  # of which a draw of one row is 6
    assert Pace().rows_of_a_draw(1.0, 1) == 0.0  # nothing is known


@pytest.mark.parametrize(
    ("took", "least", "runs"),
    [
        ([5.0, 5.5], 5.0, 2),
        ([60.0, 5.0, 5.0], 5.0, 3),  # the machine stood still
        ([60.0, 55.0], 55.0, 2),  # twice: nobody can know
        ([9.0, 40.0, 5.0, 7.0], 5.0, 4),
        ([2.0**-i for i in range(MOST_RUNS)], 2.0 ** (1 - MOST_RUNS), MOST_RUNS),  # no two agree
        ([400.0, 300.0], 300.0, 2),  # takes long: two are enough
    ],
)
def test_what_is_timed_is_the_least_of_runs_that_agree(took: list[float], least: float, runs: int) -> None:
    now, made = 0.0, 0

    def run() -> None:
        nonlocal now, made
        now += took[made] / 1000
        made += 1

    assert least_seconds(run, lambda: now) == pytest.approx(least / 1000)
    assert made == runs


@pytest.mark.parametrize("buckets", [(1,), (1, 4)])
def test_few_buckets_are_enough_to_know_the_pace(small_digits: Path, buckets: tuple[int, ...]) -> None:
    """What a row takes beside others does not show in one of them."""
    engine = Engine(load(small_digits), buckets)
    engine.warm(20, nullcontext(), (0.005, 0.02, 0.1))
    assert max(work for work, _ in engine.timed) == 20 * PACED
    assert all(map(math.isfinite, (*engine.slices, *engine.long_passes, engine.finest)))
