"""Connections and requests that come together: a little is read and few begin in each turn, by address and rank."""

import asyncio
import time
from itertools import pairwise

from dubito.service.web.starts import LEAST, MOST, OPENING, InTurns, Openings, Starts


class Opened:
    def __init__(self, name: str, seconds: float, order: list[str]) -> None:
        self.name, self.seconds, self.order = name, seconds, order

    def open(self) -> None:
        time.sleep(self.seconds)
        self.order.append(self.name)


class Begun:
    def __init__(self, begun: list[str]) -> None:
        self.begun = begun

    def begin(self, exchange: str) -> None:
        self.begun.append(exchange)


def test_one_that_sent_little_does_not_wait_for_all_that_sent_much() -> None:
    order: list[str] = []
    turns: list[int] = []

    async def body() -> None:
        loop, openings = asyncio.get_running_loop(), Openings()
        for i in range(6):
            openings.put(loop, "a", Opened(f"large {i}", 2 * OPENING, order), 100_000_000)
        assert order == ["large 0"]  # at once, since nobody waited; the others have their turns
        openings.put(loop, "a", Opened("small", 0.0, order), 100)
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
            openings.put(asyncio.get_running_loop(), "a", Opened(str(i), 0.0, order), 10)
        while len(order) < 3:  # at once, unless the machine stands still
            await asyncio.sleep(0)

    asyncio.run(body())
    assert order == ["0", "1", "2"]


def test_addresses_take_turns() -> None:
    """Ranks are compared among what one address sent."""
    waiting: InTurns[str] = InTurns()
    for rank, name in ((3.0, "a3"), (1.0, "a1"), (2.0, "a2")):
        waiting.put("a", rank, name)
    waiting.put("b", 9.0, "b9")
    waiting.put("c", 5.0, "c5")
    assert [waiting.pop() for _ in range(2)] == ["a1", "b9"]
    waiting.put("b", 0.0, "b0")
    assert [waiting.pop() for _ in range(4)] == ["c5", "a2", "b0", "a3"]
    assert not waiting


def test_a_connection_that_asks_now_and_then_begins_before_those_that_always_ask() -> None:
    begun: list[str] = []
    connection = Begun(begun)

    async def body() -> None:
        starts, loop = Starts(), asyncio.get_running_loop()
        for i in range(60):
            starts.put(loop, "a", 10.0 - i / 100, connection, str(i))
        starts.put(loop, "a", 1.0, connection, "seldom")
        assert begun == [str(i) for i in range(MOST)]  # nobody waited for longer
        await asyncio.sleep(0)
        assert begun[MOST] == "seldom"
        assert LEAST <= len(begun) - MOST <= MOST
        while len(begun) < 61:
            await asyncio.sleep(0)
        # who was answered longest ago comes first
        assert begun[MOST + 1 :] == [str(i) for i in range(59, MOST - 1, -1)]
        starts.put(loop, "a", 11.0, connection, "last")  # nobody waits: at once
        assert begun[-1] == "last"

    asyncio.run(body())


def test_one_address_with_many_requests_does_not_keep_another_waiting() -> None:
    begun: list[str] = []
    connection = Begun(begun)

    async def body() -> None:
        loop, starts = asyncio.get_running_loop(), Starts()
        for i in range(700):
            starts.put(loop, "flood", 0.0, connection, f"flood {i}")
        starts.put(loop, "honest", 1e9, connection, "honest")
        while "honest" not in begun:
            await asyncio.sleep(0)

    asyncio.run(body())
    assert begun.index("honest") <= MOST + 1


def test_a_flood_of_connections_of_one_address_does_not_keep_another_waiting() -> None:
    order: list[str] = []

    async def body() -> None:
        loop, openings = asyncio.get_running_loop(), Openings()
        for i in range(50):
            openings.put(loop, "flood", Opened(f"flood {i}", OPENING, order), 10)
        openings.put(loop, "honest", Opened("honest", 0.0, order), 1_000_000)
        while "honest" not in order:
            await asyncio.sleep(0)

    asyncio.run(body())
    assert order.index("honest") <= 2
