"""What every worker of pytest has imported before it is forked: all tests, their assertions rewritten."""

import os
from contextlib import redirect_stdout

import pytest


class ImportsAlone:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        """No tests of what a module defines: each worker makes its own."""
        return []


with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
    pytest.main(["--collect-only", "-qq"], plugins=[ImportsAlone()])
