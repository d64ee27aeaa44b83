"""Connections and requests that come together: a little is read and few begin in each turn, by address and rank."""

import asyncio
import socket
import time
from itertools import pairwise

import pytest

from dubito.service.settings import Settings
from dubito.service.web.acceptor import BEGINS, Acceptor
from dubito.service.web.first_bytes import SEVERAL, is_whole, lateness
from dubito.service.web.limits import ConnectionLimits
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
            openings.put(loop, "a", Opened(f"large {i}", 2 * OPENING, order), 100.0)
        assert order == ["large 0"]  # at once, since nobody waited; the others have their turns
        openings.put(loop, "a", Opened("small", 0.0, order), 0.0001)
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
            openings.put(asyncio.get_running_loop(), "a", Opened(str(i), 0.0, order), 0.0)
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
            openings.put(loop, "flood", Opened(f"flood {i}", OPENING, order), 0.0)
        openings.put(loop, "honest", Opened("honest", 0.0, order), 1.0)
        while "honest" not in order:
            await asyncio.sleep(0)

    asyncio.run(body())
    assert order.index("honest") <= 2


REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\nhonest"
TWO = b"GET / HTTP/1.1\r\n\r\nPOST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"


def test_a_connection_with_one_request_does_not_wait_for_a_flood_with_several() -> None:
    """All of one address: connections that are open already send a request and half of another, all at once."""
    made: list[bytes] = []
    turns: list[int] = []

    def make(first: bytes, ticket: int) -> asyncio.Protocol:
        made.append(first)
        return asyncio.Protocol()

    async def body() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        acceptor = Acceptor(listener, 512, ConnectionLimits(Settings()), make)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(200)]
        while len(made) + len(acceptor.arrivals) < 200:
            await asyncio.sleep(0)
        silent = len(acceptor.arrivals)  # the first ones got a protocol at once
        for client in clients:
            client.sendall(REQUEST if client is clients[100] else TWO)
        while acceptor.arrivals or acceptor.tasks:
            turns.append(len(made))
            await asyncio.sleep(0)
        assert silent > 150
        assert len(made) == 200
        before = made[200 - silent :].index(REQUEST)
        assert before < silent / 4  # those that began while others were read
        assert sum(1 for a, b in pairwise(turns) if b - a > 3 * BEGINS) == 0
        await acceptor.close()
        for client in clients:
            client.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("data", "whole", "several"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", True, False),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\nG", True, True),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", False, False),
        (REQUEST, True, False),
        (REQUEST[:-1], False, False),
        (REQUEST + b"\r\n", True, True),
        (REQUEST.replace(b"Content-Length:", b"content-length: \t"), True, False),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n", True, False),  # a parser must say
        (b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n", True, False),
        (b"", False, False),
    ],
)
def test_the_first_bytes_say_whether_they_are_one_request_or_several(data: bytes, whole: bool, several: bool) -> None:
    assert is_whole(data) == whole
    assert (lateness(data) >= SEVERAL) == several
