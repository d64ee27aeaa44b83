"""API keys, rate limits and the security headers of replies."""

import hashlib
import hmac
import re
from contextlib import suppress
from ipaddress import ip_address

from dubito.service.problems import Problem, TooManyRequests
from dubito.service.rates import OwnRates, Rates
from dubito.service.settings import Settings
from dubito.service.web.http import Headers
from dubito.service.web.limits import counted

OPEN = frozenset({"/", "/docs", "/edge", "/openapi.json", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
}
# only for the page that runs models in the browser: WebAssembly needs 'wasm-unsafe-eval'
EDGE = HEADERS | {
    "content-security-policy": f"{HEADERS['content-security-policy']}; script-src 'self' 'wasm-unsafe-eval'"
}


# percent-encoded in a path: characters that need no encoding, separators and control characters. A proxy that compares
# paths as they are written would let them pass where it should not
ODD = re.compile(rb"%(?:2[def]|5[cf]|7[ef]|3[0-9]|4[1-9a-f]|5[0-9a]|6[1-9a-f]|7[0-9a]|[01][0-9a-f])", re.IGNORECASE)


def check_target(raw_path: bytes, headers: Headers) -> None:
    """Raise 404 for a path that is not written as usual, 400 for a request to speak another protocol."""
    if b"%" in raw_path and ODD.search(raw_path):
        raise Problem(404, "there is nothing at this path: it has an encoded slash, or a character encoded needlessly.")
    if b"upgrade" in headers and headers[b"upgrade"].strip().lower() == b"websocket":
        raise Problem(400, "this server speaks HTTP/1.1 only: it has no WebSockets.", {"Connection": "close"})


def check_page(headers: Headers, settings: Settings) -> None:
    """Raise 403 where a request that changes what is served may come from a foreign page in somebody's browser.

    Origin and Sec-Fetch-Site tell a foreign page. A name in Host that is not known here may be one that a foreign page
    has pointed at this server's address (DNS rebinding); with keys that is of no use, since pages do not know them.
    """
    host = headers.get(b"host", b"").decode("latin-1").strip().lower()
    origin = headers.get(b"origin")
    if origin is not None:
        name = origin.decode("latin-1").strip().lower()
        if name in settings.cors_origins:
            return
        if name.partition("://")[2] != host:
            raise Problem(403, f"the request comes from a page of {name[:100]!r}; cors_origins names those that may.")
    elif headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise Problem(403, "the request comes from a page of another site; cors_origins names those that may.")
    if not settings.api_keys and host and not _known(host, settings):
        raise Problem(
            403, f"the Host header is {host[:100]!r}; expected localhost, an address, or one of allowed_hosts."
        )


def _known(host: str, settings: Settings) -> bool:
    """Whether no page can have chosen this name: an address, localhost, or a name in the settings."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost") or name in settings.allowed_hosts:
        return True
    with suppress(ValueError):
        ip_address(name)
        return True
    return False


def _bearer(value: bytes) -> bytes:
    """The token of an Authorization header; its scheme is written in any case."""
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Guard:
    """Checks keys and rates; health and the console's own files need no key."""

    def __init__(self, settings: Settings, rates: Rates | None = None) -> None:
        self.keys, self.rate, self.burst = settings.api_keys, settings.rate_per_second, settings.burst
        self.rates: Rates = OwnRates() if rates is None else rates

    def admit(self, path: str, headers: Headers, address: str) -> str:
        """Owner of the key, or the address, of which an IPv6 network of 64 bits counts as one. Raises 401 without a
        valid key, 429 above the rate limit."""
        caller = counted(address)
        if path in OPEN or path.startswith("/console/"):
            return caller
        if self.keys:
            key = headers.get(b"x-api-key") or _bearer(headers.get(b"authorization", b""))
            owner = self._owner(key.decode("latin-1"))
            if owner is None:
                raise Problem(
                    401,
                    "no API key came, or none that is known here; expected one as X-API-Key or Authorization: Bearer.",
                    {"WWW-Authenticate": "Bearer"},
                    "key",
                )
            caller = owner
        if self.rate is not None:
            self._count(caller, self.rate)
        return caller

    def _owner(self, key: str) -> str | None:
        """Name of the key's owner; all hashes are compared, each in constant time."""
        mine, owner = hash_key(key), None
        for name, stored in self.keys.items():
            if hmac.compare_digest(mine, stored):
                owner = name
        return owner

    def _count(self, caller: str, rate: float) -> None:
        left = self.rates.left(caller, rate, float(self.burst))
        if left < 1:
            wait = (1 - left) / rate
            detail = f"more than {rate:g} requests a second came; try again in {wait:.1f} s."
            raise TooManyRequests(detail, wait, "rate")
