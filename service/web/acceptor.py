"""Accepts connections at little cost: some in each turn of the event loop and, where many come, with a protocol only
for those that speak, and only for a few of them in a turn.

The servers of event loops accept all connections that wait at once, with a transport and a protocol for each, so that a
flood of them would keep requests waiting.
"""

import asyncio
import math
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from dubito.service.web.first_bytes import is_surely_whole, is_whole, lateness
from dubito.service.web.limits import ConnectionLimits
from dubito.service.web.starts import InTurns

ACCEPTS, READS, BEGINS = 16, 16, 2  # connections that are accepted, read from, and get a protocol in a turn of the loop
FEW, WINDOW = 4, 0.01  # connections that get a protocol at once, in so many seconds
READ = 1 << 14  # bytes that are read before there is a protocol
PAUSE = 0.05  # seconds without accepting, where the process has no more file descriptors
LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

Make = Callable[[bytes, int], asyncio.Protocol]  # a protocol whose client has sent these bytes, and its ticket, or 0


class Acceptor:
    """A listening socket, and its connections that have no protocol yet."""

    def __init__(
        self,
        listener: socket.socket,
        backlog: int,
        limits: ConnectionLimits,
        make: Make,
        at_a_time: int = ACCEPTS,
    ) -> None:
        self.listener, self.limits, self.make, self.at_a_time = listener, limits, make, at_a_time
        self.loop = asyncio.get_running_loop()
        self.silent: list[tuple[socket.socket, str]] = []  # of this turn, with the hosts: their clients may have gone
        self.arrivals: set[Newcomer] = set()
        self.ready: InTurns[Newcomer] = InTurns()  # to get a protocol; of an address, first those that sent one request
        self.selector = selectors.DefaultSelector()  # of those that wait: a fifth of what the event loop would take
        self.tasks: set[asyncio.Task[None]] = set()  # that make protocols
        self.until, self.came = 0.0, 0  # end of a window of time, and connections that came in it
        self.open = True
        listener.setblocking(False)
        listener.listen(backlog)
        self.loop.add_reader(listener, self._accept)
        self.loop.add_reader(self.selector, self._read)

    def _accept(self) -> None:
        for _ in range(self.at_a_time):
            try:
                plain, (host, *_) = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self.loop.remove_reader(self.listener)
                self.loop.call_later(PAUSE, self._go_on)
                return
            plain.setblocking(False)
            self._admit(plain, host, again=True)

    def _admit(self, plain: socket.socket, host: str, *, again: bool) -> None:
        """Close a connection whose client has gone; let in one that has sent something, others at the second look."""
        if (first := _receive(plain)) == b"":
            plain.close()
            return
        if first is None and again:
            if not self.silent:
                self.loop.call_soon(self._look_again)
            self.silent.append((plain, host))
            return
        address = self.limits.address_of(host)
        if self._few() and not self.crowded(address):
            self.begin(plain, first or b"", None)
            return
        arrival = Newcomer(self, plain, address)
        self.arrivals.add(arrival)
        if self.limits.enter(arrival):
            arrival.data = first or b""
            arrival.begin()  # which is refused then, with a reply
        else:
            arrival.take(first)

    def _look_again(self) -> None:
        silent, self.silent = self.silent, []
        for plain, host in silent:
            self._admit(plain, host, again=False)

    def _few(self) -> bool:
        """Count a connection; whether they come so slowly that each gets a protocol at once."""
        if (now := self.loop.time()) > self.until:
            self.until, self.came = now + WINDOW, 0
        self.came += 1
        return self.came <= FEW

    def _go_on(self) -> None:
        if self.open:
            self.loop.add_reader(self.listener, self._accept)

    def _read(self) -> None:
        for key, _ in self.selector.select(0)[:READS]:
            key.data.read()

    def crowded(self, address: str) -> bool:
        """Whether an address has so many connections that only whole requests of it get a protocol."""
        return address != "" and 2 * self.limits.by_address[address] > self.limits.settings.connections_per_address

    def begin(self, plain: socket.socket, first: bytes, arrival: "Newcomer | None") -> None:
        task = self.loop.create_task(self._begin(plain, first, arrival))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def begin_in_turn(self, arrival: "Newcomer") -> None:
        if not self.ready:
            self.loop.call_soon(self._begin_some)
        self.ready.put(arrival.address, self.loop.time() + lateness(arrival.data), arrival)

    def _begin_some(self) -> None:
        for _ in range(BEGINS):
            if self.ready:
                self.ready.pop().begin()
        if self.ready:
            self.loop.call_soon(self._begin_some)

    async def _begin(self, plain: socket.socket, first: bytes, arrival: "Newcomer | None") -> None:
        ticket = 0 if arrival is None else arrival.ticket
        try:
            await self.loop.connect_accepted_socket(lambda: self.make(first, ticket), plain)
        except OSError:  # its client has gone
            plain.close()
        finally:
            if arrival is not None:
                self.limits.leave(arrival)  # unless the protocol has its place

    async def close(self) -> None:
        """Accept no more; those that were accepted get a protocol, and may still send a request."""
        self.open = False
        self.loop.remove_reader(self.listener)
        self.listener.close()
        self._look_again()
        for arrival in list(self.arrivals):
            arrival.begin()
        self.ready = InTurns()
        self.loop.remove_reader(self.selector)
        self.selector.close()
        if self.tasks:
            await asyncio.wait(self.tasks)


class Newcomer:
    """One of many connections. Its client has not sent anything or, where its address is crowded, no whole request."""

    def __init__(self, acceptor: Acceptor, plain: socket.socket, address: str) -> None:
        self.acceptor, self.plain, self.address = acceptor, plain, address
        self.deadline = acceptor.loop.time() + acceptor.limits.settings.header_seconds
        self.kind = "header_seconds"  # limit that the deadline comes from
        self.unsent = self.ticket = 0
        self.data = b""
        self.waiting = False  # the acceptor reads when something comes

    def read(self) -> None:
        self.take(_receive(self.plain))

    def take(self, more: bytes | None) -> None:
        if more is None:
            self._wait()
            return
        self.data += more
        if not more:
            self._close()
        elif not self.acceptor.crowded(self.address) or len(self.data) >= READ or is_whole(self.data):
            self._stop_waiting()
            if is_surely_whole(self.data):  # others, such as chunked ones, may still wait for their clients
                self.deadline = math.inf
            self.acceptor.begin_in_turn(self)
        else:
            if self.kind == "header_seconds" and b"\r\n\r\n" in self.data:
                self.kind = "body_seconds"
                self.deadline = self.acceptor.loop.time() + self.acceptor.limits.settings.body_seconds
            self._wait()

    def _wait(self) -> None:
        if not self.waiting:
            self.waiting = True
            self.acceptor.selector.register(self.plain, selectors.EVENT_READ, self)

    def _stop_waiting(self) -> None:
        if self.waiting:
            self.waiting = False
            self.acceptor.selector.unregister(self.plain)

    def begin(self) -> None:
        """Hand the connection over to a protocol, unless it was closed. It keeps its place until the protocol has it:
        who came in between would be counted as one too many after that, and closed while it waits for its client."""
        if self in self.acceptor.arrivals:
            self._stop()
            self.acceptor.begin(self.plain, self.data, self)

    def expire(self) -> None:
        self.acceptor.limits.closed[self.kind] += 1
        if self.data:
            with suppress(OSError):
                self.plain.send(LATE)
        self._close()

    def evict(self, reason: str) -> None:
        self.acceptor.limits.closed[reason] += 1
        self._close()

    def _close(self) -> None:
        self._stop()
        self.acceptor.limits.leave(self)
        self.plain.close()

    def _stop(self) -> None:
        self.deadline = math.inf
        self._stop_waiting()
        self.acceptor.arrivals.discard(self)


def _receive(plain: socket.socket) -> bytes | None:
    """What the client has sent; nothing, if it has gone, and None, if it has not sent anything yet."""
    try:
        return plain.recv(READ)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""
