"""Limits on connections: how many, how long each may wait for its client, and how much may lie unsent."""

import asyncio
import math
import resource
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from itertools import count
from typing import Protocol

from dubito.service.settings import Settings

SWEEP = 0.1  # seconds between two looks at the deadlines
RESERVED = 128  # file descriptors that are left for files, pipes and libraries
REASONS = (  # for which connections are closed or refused; each is a label in the metrics
    "malformed",
    "header_bytes",
    "header_lines",
    "header_seconds",
    "chunks",
    "pipelined",
    "body_seconds",
    "idle_seconds",
    "write_seconds",
    "unsent_bytes",
    "max_connections",
    "connections_per_address",
)


class Waiting(Protocol):
    """A connection, as far as limits are concerned."""

    address: str  # "" where the number for each address is not limited
    deadline: float  # of what its client has to do next; infinite while the server is at work
    unsent: int  # bytes of the body that is being sent, where it waits for its client
    ticket: int  # by which it has its place in the order; 0 before it has one

    def expire(self) -> None:
        """Close it: its deadline has passed."""

    def evict(self, reason: str) -> None:
        """Close it to make room for others."""


class ConnectionLimits:
    """The connections of a server, ordered by how long each has waited for its client to complete a request."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.most = max(1, min(settings.max_connections, descriptors() - RESERVED))
        self.open: OrderedDict[int, Waiting] = OrderedDict()  # by their tickets
        self.tickets = count(1)
        self.by_address: Counter[str] = Counter()
        self.closed: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.bodies: dict[int, tuple[int, int]] = {}  # large bodies being sent, by identity: their senders, their bytes
        self.unsent = 0  # bytes of these bodies
        self.sending = asyncio.Lock()  # held for a turn of the event loop by the one that sends a piece of a large body
        self.cancelled = 0  # requests that had come whole and were not answered, because the server ended
        self.trusted = trust(settings.trusted_proxies)
        self.sweeping: asyncio.TimerHandle | None = None

    def address_of(self, host: str) -> str:
        """The address by which connections are counted; "" for a trusted proxy, behind which many clients are."""
        return "" if self.trusted(host) else counted(host)

    def enter(self, connection: Waiting) -> str:
        """Count a new connection, and close another one where there are too many.

        One that comes with a ticket takes the place of the one that had it before.

        Returns the limit for which the new one must be refused: all others are being answered. "" where it need not be.
        """
        if (before := self.open.get(connection.ticket)) is None:
            connection.ticket = next(self.tickets)
        else:  # whose client may have gone: then the new one does not know its address
            self._discount(before.address)
        self.by_address[connection.address] += 1
        self.open[connection.ticket] = connection
        if self.sweeping is None:
            self.sweeping = asyncio.get_running_loop().call_later(SWEEP, self._sweep)
        reason = ""
        if connection.address and self.by_address[connection.address] > self.settings.connections_per_address:
            reason = self._make_room(connection, "connections_per_address", lambda one: one.address)
        if not reason and len(self.open) > self.most:
            reason = self._make_room(connection, "max_connections", lambda one: "")
        return reason

    def _make_room(self, new: Waiting, reason: str, group: Callable[[Waiting], str]) -> str:
        """Close the connection of the same group that has waited longest; the reason, if there is none."""
        mine = group(new)
        for one in self.open.values():
            if one.deadline < math.inf and one is not new and group(one) == mine:
                self.leave(one)
                one.evict(reason)
                return ""
        return reason

    def leave(self, connection: Waiting) -> None:
        if self.open.get(connection.ticket) is connection:
            del self.open[connection.ticket]
            self._discount(connection.address)

    def _discount(self, address: str) -> None:
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]

    def answered(self, connection: Waiting) -> None:
        """A reply is complete: the connection goes to the end of the order."""
        if connection.ticket in self.open:
            self.open.move_to_end(connection.ticket)

    def hold(self, body: bytes) -> None:
        """A large body waits to be sent. One that several connections send, such as a static file, counts once.

        Where too much waits, a connection is closed: the longest waiting one of those that wait for their clients, else
        of all that are sending.
        """
        senders, size = self.bodies.get(id(body), (0, len(body)))
        self.bodies[id(body)] = (senders + 1, size)
        self.unsent += size if senders == 0 else 0
        if self.unsent > self.settings.unsent_bytes:
            sending = [one for one in self.open.values() if one.unsent]
            slow = [one for one in sending if one.deadline < math.inf] or sending
            if slow:
                slow[0].evict("unsent_bytes")

    def release(self, body: bytes) -> None:
        senders, size = self.bodies.pop(id(body))
        if senders > 1:
            self.bodies[id(body)] = (senders - 1, size)
        else:
            self.unsent -= size

    def _sweep(self) -> None:
        self.sweeping = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in [one for one in self.open.values() if one.deadline <= now]:
            connection.expire()
        if self.open:
            self.sweeping = loop.call_later(SWEEP, self._sweep)


def counted(host: str) -> str:
    """IPv6 networks of 64 bits count as one address, since their owner has all of it."""
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host.partition("%")[0])
    except ValueError:  # what a proxy says
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address.packed[:8] + bytes(8), 64)))


def trust(names: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether an address is one of the trusted proxies."""
    networks: list[IPv4Network | IPv6Network] = [ip_network(name) for name in names]

    @lru_cache(maxsize=1024)
    def trusted(host: str) -> bool:
        try:
            address = ip_address(host.partition("%")[0])
        except ValueError:  # a name, in a header
            return False
        return any(address in network for network in networks)

    return trusted if networks else lambda host: False


def descriptors() -> int:
    """Number of file descriptors that the process may have; its soft limit is raised to that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
