"""API keys, rate limits and the security headers of replies."""

import hashlib
import hmac
import time

from dubito.service.problems import Problem, TooManyRequests
from dubito.service.settings import Settings
from dubito.service.web.http import Headers

OPEN = frozenset({"/", "/docs", "/edge", "/openapi.json", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"})
MOST_CALLERS = 10_000
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


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class Guard:
    """Checks keys and rates; health and the console's own files need no key."""

    def __init__(self, settings: Settings) -> None:
        self.keys, self.rate, self.burst = settings.api_keys, settings.rate_per_second, settings.burst
        self.left: dict[str, tuple[float, float]] = {}  # token bucket by caller: requests left, and at what time

    def admit(self, path: str, headers: Headers, address: str) -> str:
        """Owner of the key, or the address. Raises 401 without a valid key, 429 above the rate limit."""
        if path in OPEN or path.startswith("/console/"):
            return address
        caller = address
        if self.keys:
            key = headers.get(b"x-api-key") or headers.get(b"authorization", b"").removeprefix(b"Bearer ")
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
        now = time.monotonic()
        left, before = self.left.pop(caller, (float(self.burst), now))
        left = min(float(self.burst), left + rate * (now - before))
        self.left[caller] = (max(0.0, left - 1) if left >= 1 else left, now)  # last: the first is the longest idle
        if len(self.left) > MOST_CALLERS:
            del self.left[next(iter(self.left))]
        if left < 1:
            wait = (1 - left) / rate
            detail = f"more than {rate:g} requests a second came; try again in {wait:.1f} s."
            raise TooManyRequests(detail, wait, "rate")
