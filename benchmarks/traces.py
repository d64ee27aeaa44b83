"""Server CPU of one request at concurrency 16 with traces off, on for one request in a hundred, and on for all.

The requests, network and counting are those of `benchmarks.http_overhead`, OIP binary over HTTP; spans go as JSON to a
file (OpenTelemetry's console exporter). The servers take turns. `--python` adds servers of other checkouts, by their
interpreters: that of a commit without traces shows what "off" costs.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks._measure import machine
from benchmarks._server import Server, running
from benchmarks._tiny import SHAPE
from benchmarks.http_overhead import Rival, compare, measure, write_artifact
from dubito.service.client import infer_body
from dubito.service.load import post

OTEL = {"OTEL_TRACES_EXPORTER": "console", "OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}
SHARES = {"off": None, "on, 1 % sampled": "0.01", "on, all sampled": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500, help="in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", action="append", default=[], help="interpreter of another checkout")
    args = parser.parse_args()
    console, x = Console(), np.random.default_rng(0).standard_normal((1, *SHAPE), dtype=np.float32)
    binary, headers = infer_body(x, {})
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        artifact = write_artifact(Path(folder) / "tiny.safetensors")
        rivals: list[Rival] = []
        for name, share in {**dict.fromkeys(args.python), **SHARES}.items():
            server = start(stack, artifact, Path(folder) / f"{len(rivals)}.log", name, share)
            rivals.append(Rival(name, server, post(server.url, "/v2/models/tiny/infer", binary, headers), ours=True))
        measure(rivals, args.requests, args.rounds, 16)
        console.print(compare(rivals, 16))
    console.print(machine())


def start(stack: ExitStack, artifact: Path, log: Path, name: str, share: str | None) -> Server:
    command = ["dubito", "serve", str(artifact), "--set", "samples=1", "--set", "log_level=warning"]
    if share is None:
        return stack.enter_context(running(command, log, "/readyz", sys.executable if name == "off" else name))
    command += ["--set", "traces=true"]
    return stack.enter_context(running(command, log, "/readyz", **OTEL, OTEL_TRACES_SAMPLER_ARG=share))


if __name__ == "__main__":
    main()
