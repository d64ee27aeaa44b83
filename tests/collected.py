"""What every worker of pytest has imported before it is forked: all tests, their assertions rewritten."""

import os
from contextlib import redirect_stdout

import pytest

with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
    pytest.main(["--collect-only", "-qq"])
