"""New connections that come together: first bytes are read a little in each turn, of those that sent little first."""

import asyncio
import time
from itertools import pairwise

from dubito.service.web.starts import OPENING, Openings


class Opened:
    def __init__(self, name: str, seconds: float, order: list[str]) -> None:
        self.name, self.seconds, self.order = name, seconds, order

    def open(self) -> None:
        time.sleep(self.seconds)
        self.order.append(self.name)


def test_one_that_sent_little_does_not_wait_for_all_that_sent_much() -> None:
    order: list[str] = []
    turns: list[int] = []

    async def body() -> None:
        loop, openings = asyncio.get_running_loop(), Openings()
        for i in range(6):
            openings.put(loop, Opened(f"large {i}", 2 * OPENING, order), 100_000_000)
        assert order == ["large 0"]  # at once, since nobody waited; the others have their turns
        openings.put(loop, Opened("small", 0.0, order), 100)
        while len(order) < 7:
            turns.append(len(order))
            await asyncio.sleep(0)

    asyncio.run(body())
    assert order.index("small") == 1
    assert order[2:] == [f"large {i}" for i in range(1, 6)]  # in the order in which they came
    assert all(b - a <= 2 for a, b in pairwise(turns))  # no turn reads them all


def test_all_are_read_in_the_order_in_which_they_came() -> None:
    order: list[str] = []

    async def body() -> None:
        openings = Openings()
        for i in range(3):
            openings.put(asyncio.get_running_loop(), Opened(str(i), 0.0, order), 10)
        while len(order) < 3:  # at once, unless the machine stands still
            await asyncio.sleep(0)

    asyncio.run(body())
    assert order == ["0", "1", "2"]
