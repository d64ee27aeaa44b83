"""How many examples hypothesis tries, and how many draws a margin of standard errors is for."""

import os


def at_most(n: int) -> int:
    """So many, or TEST_EXAMPLES times as many: `make test-slow` tries more."""
    return n * int(os.environ.get("TEST_EXAMPLES", "1"))
