"""An exported CIFAR ResNet-18 on two CPU cores under onnxruntime, against K passes of the deterministic one.

The rival is torch's own ONNX export of the plain network; its time is that of K passes of one session, its memory that
of K sessions, one for each network of an ensemble, passing in turn. Ours is the edge runtime with the file that
`dubito export` writes, for λ = 0 and λ > 0 (factored law in every layer), draws included. Memory is the peak of a
process that does nothing else, less that of one which has imported onnxruntime alone.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine, take_turns
from dubito.deploy.edge.export import export, save
from dubito.deploy.edge.runtime import EdgeModel
from dubito.models import bayesianize, build, load
from dubito.models import save as save_artifact

SETTLE = 2  # runs until the threads of the session before have stopped spinning
ALONE = """
import re, sys
import numpy as np, onnxruntime
sys.path.insert(0, sys.argv[5])
kind, path, B, K, _, threads = sys.argv[1:7]
x = np.random.default_rng(0).standard_normal((int(B), 3, 32, 32)).astype(np.float32)
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
if kind == "ours":
    from runtime import EdgeModel
    model = EdgeModel(path, int(threads))
    for _ in range(2):
        model.predict(x, 0)
else:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(threads)
    sessions = [onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for _ in range(int(K))]
    for _ in range(2):
        for session in sessions:
            session.run(None, {session.get_inputs()[0].name: x})
print(peak() - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="resnet18-cifar", help="one that takes 3 × 32 × 32")
    parser.add_argument("--samples", type=int, default=8, help="K")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], help="B")
    parser.add_argument("--inducing", type=int, default=64, help="M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        paths = _files(Path(folder), args.architecture, args.samples, args.inducing)
        _measure(paths, args)


def _files(folder: Path, architecture: str, K: int, M: int) -> dict[str, Path]:
    torch.manual_seed(0)
    net = build(architecture).eval()
    plain = folder / "plain.onnx"
    program = torch.onnx.export(
        net,
        (torch.zeros(2, 3, 32, 32),),
        dynamo=True,
        opset_version=18,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        verbose=False,
    )
    assert program is not None
    plain.write_bytes(program.model_proto.SerializeToString())
    files = {"deterministic": plain}
    for name, lam_max in (("λ = 0", 0.0), ("λ > 0", None)):
        artifact = folder / "model.safetensors"
        save_artifact(bayesianize(net, "ffg-u", inducing=M, start="prior", lam_max=lam_max), artifact)
        files[name] = folder / f"{len(files)}.onnx"
        save(export(load(artifact), samples=K), files[name])
    return files


def _measure(paths: dict[str, Path], args: argparse.Namespace) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = args.threads
    session = onnxruntime.InferenceSession(paths["deterministic"], options, providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0].name
    ours = {name: EdgeModel(path, args.threads) for name, path in paths.items() if name != "deterministic"}
    console = Console()
    for B in args.batches:
        x = np.random.default_rng(0).standard_normal((B, 3, 32, 32)).astype(np.float32)
        rivals: dict[str, Callable[[], object]] = {
            "deterministic": lambda x=x: [session.run(None, {entry: x}) for _ in range(args.samples)]  # type: ignore[misc]
        }
        rivals |= {name: lambda model=model, x=x: model.predict(x, 0) for name, model in ours.items()}  # type: ignore[misc]
        times = take_turns(rivals, args.rounds, SETTLE)
        memory = {name: _peak(name, path, B, args) for name, path in paths.items()}
        table = Table(title=f"{args.architecture}, M = {args.inducing}, batch {B}, K = {args.samples}, onnxruntime")
        for column in ("", "file, MB", "median seconds", "ratio", "peak memory, MB", "ratio"):
            table.add_column(column, justify="right" if column else "left")
        for name, path in paths.items():
            label = f"{args.samples} deterministic passes" if name == "deterministic" else name
            table.add_row(
                label,
                f"{path.stat().st_size / 1e6:.1f}",
                f"{times[name]:.3f}",
                f"{times[name] / times['deterministic']:.3f}",
                f"{memory[name] / 1e6:.0f}",
                f"{memory[name] / memory['deterministic']:.3f}",
            )
        console.print(table)
        console.print(f"λ > 0 over λ = 0: {times['λ > 0'] / times['λ = 0']:.3f}")
    console.print(f"{machine()}, onnxruntime {onnxruntime.__version__}, {args.threads} threads of it")


def _peak(name: str, path: Path, B: int, args: argparse.Namespace) -> int:
    """Bytes that a process of its own needs for the model and its passes."""
    kind = "theirs" if name == "deterministic" else "ours"
    folder = Path(__file__).parents[1] / "deploy/edge"
    words = [kind, path, B, args.samples, folder, args.threads]
    command = [sys.executable, "-c", ALONE, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024


if __name__ == "__main__":
    main()
