"""Runs before any test imports torch."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores: one thread each, in their subprocesses too
    os.environ["OMP_NUM_THREADS"] = "1"
