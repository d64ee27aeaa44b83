"""Classifiers of torchvision and timm as artifacts that carry their own network: what works for which.

    python -m benchmarks.networks [--only NAME ...] [--steps equal served ...] [--keep rows.jsonl]

Each network has random weights and two classes. It is saved traced, not by a name; loaded by a process that has neither
timm nor torchvision, whose outputs are compared to the bit; converted by every method; given a Laplace posterior over
its last layer; loaded by a running server, which is asked for a prediction; captured on a GPU, with draws of FFG-U, as
one CUDA graph, whose answers are compared with those without it; and exported to ONNX, whose outputs are compared with
the artifact's. Networks of timm are left out where timm is not installed, and the capture where there is no GPU.
Pictures are as small as a network allows. With --keep, rows are kept in a file, and what is there is not measured
again.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks._measure import keep_row, kept_rows, machine
from benchmarks._server import running
from dubito.models import bayesianize, load, save
from dubito.models.errors import DubitoError
from dubito.models.manifest import Card, Image, Input
from dubito.models.names import METHODS
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import count
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.resident import reside
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.training.config import Laplace
from dubito.training.data.data import Examples
from dubito.training.laplace import linearise

TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {  # name -> side of a picture, arguments
    "alexnet": (64, {}),
    "vgg11_bn": (32, {}),
    "squeezenet1_1": (64, {}),
    "googlenet": (64, {"aux_logits": False, "init_weights": True}),
    "inception_v3": (96, {"aux_logits": False, "init_weights": True}),
    "resnet18": (64, {}),
    "resnet50": (64, {}),
    "resnext50_32x4d": (64, {}),
    "wide_resnet50_2": (64, {}),
    "densenet121": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilenet_v3_small": (64, {}),
    "mnasnet0_5": (64, {}),
    "shufflenet_v2_x0_5": (64, {}),
    "efficientnet_b0": (64, {}),
    "regnet_y_400mf": (64, {}),
    "convnext_tiny": (64, {}),
    "vit_b_16": (64, {"image_size": 64}),
    "swin_t": (64, {}),
    "maxvit_t": (224, {}),
}
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (64, {"img_size": 64}),
    "deit_tiny_patch16_224": (64, {"img_size": 64}),
    "swin_tiny_patch4_window7_224": (224, {}),
    "convnextv2_atto": (64, {}),
    "mixer_s32_224": (64, {"img_size": 64}),
    "efficientnet_lite0": (64, {}),
    "mobilenetv4_conv_small": (64, {}),
    "ghostnet_100": (64, {}),
    "repvgg_a0": (64, {}),
    "levit_128s": (224, {}),
}
EXAMPLES = 8  # that the curvature is summed over
DRAWS = 4  # of a captured graph
LABELS = ("no", "yes")
ELSEWHERE = """
import sys
sys.modules["timm"] = sys.modules["torchvision"] = None  # importing either is an error
import torch
from safetensors.torch import load_file, save_file
from dubito.models import load
torch.set_num_threads(1)
for line in sys.stdin:
    artifact, given, answer = line.split()
    try:
        with torch.no_grad():
            save_file({"f": load(artifact).network.net(load_file(given)["x"])}, answer)
        print("answered", flush=True)
    except Exception as error:
        print(repr(error), flush=True)
"""
INDUCING_POINTS = ("gi", "li", "fac-gi", "rand-gi", "dgp", "dsvi")  # start at examples
STEPS = ("saved", "equal", "methods", "laplace", "served", "captured", "onnx")


def made(name: str) -> tuple[nn.Module, int]:
    """The network, in evaluation mode, and the side of its pictures."""
    library, _, short = name.partition("/")
    torch.manual_seed(0)
    if library == "timm":
        import timm

        side, arguments = TIMM[short]
        return settled(timm.create_model(short, pretrained=False, num_classes=2, **arguments), side), side
    import torchvision.models

    side, arguments = TORCHVISION[short]
    return settled(torchvision.models.get_model(short, weights=None, num_classes=2, **arguments), side), side


@torch.no_grad()
def settled(net: nn.Module, side: int) -> nn.Module:
    """With BatchNorm's statistics of a batch of noise, without which the signal of a deep random network fades out."""
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    net.train()(torch.randn(4, 3, side, side))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    return net.eval()


def measure(name: str, row: dict[str, Any], wanted: list[str], folder: Path, url: str, child: Any) -> dict[str, Any]:
    """The row with the steps that are wanted and not there yet."""
    net, side = made(name)
    card = Card(
        input=Input(shape=(3, side, side), image=Image(mean=(0.5,) * 3, std=(0.25,) * 3)),
        labels=LABELS,
    )
    row = {"network": name, "side": side, "parameters": count(net), **row}
    plain = bayesianize(net, "deterministic", unsupported="leave")
    file = folder / "plain.safetensors"
    steps: dict[str, Callable[[], Any]] = {
        "saved": lambda: len(save(plain, file, card=card).traced.calls),  # type: ignore[union-attr]
        "equal": lambda: elsewhere(net, file, side, folder, child),
        "methods": lambda: converted(file, side),
        "laplace": lambda: with_posterior(file, folder / "models" / "m" / "1" / "model.safetensors", card, side),
        "served": lambda: asked(url, side),
        "captured": lambda: captured(file, folder, card, side),
        "onnx": lambda: exported(file, folder),
    }
    for step, run in steps.items():
        if step != "saved" and (step in row or step not in wanted):
            continue
        if step == "captured" and not torch.cuda.is_available():
            continue
        start = time.perf_counter()
        try:
            if step == "served" and row["laplace"] is None:
                raise RuntimeError("there is no artifact to serve")
            row[step] = run()
        except (DubitoError, RuntimeError, AssertionError, httpx.HTTPError) as error:
            row[step] = None
            row[f"{step}_error"] = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        row[f"{step}_seconds"] = round(time.perf_counter() - start, 1)
    return row


def elsewhere(net: nn.Module, file: Path, side: int, folder: Path, child: Any) -> bool:
    """Whether the outputs of a process without the network's class are the same to the bit."""
    from safetensors.torch import load_file, save_file

    given, answer = folder / "x", folder / "f"
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    save_file({"x": x}, given)
    child.stdin.write(f"{file} {given} {answer}\n")
    child.stdin.flush()
    if (said := child.stdout.readline().strip()) != "answered":
        raise RuntimeError(said)
    with torch.no_grad():
        return torch.equal(net(x), load_file(answer)["f"])


def converted(file: Path, side: int) -> list[str]:
    """The methods that convert the rebuilt network; layers that no method can convert stay as they are."""
    net = load(file).network.net
    on_meta = deepcopy(net).to("meta")
    noise = torch.randn(8, 3, side, side), torch.arange(8) % len(LABELS)
    methods = []
    for method in METHODS:
        start: dict[str, Any] = {"net": net, "examples": noise} if method in INDUCING_POINTS else {"net": on_meta}
        try:
            network = bayesianize(**start, method=method, start="prior", unsupported="leave", inducing=8, members=2)
        except DubitoError:
            continue
        if network.layers or method == "deterministic":
            methods.append(method)
    return methods


def with_posterior(file: Path, out: Path, card: Card, side: int) -> int:
    """The number of weights of the last layer, over which there is a Laplace posterior now."""
    model = load(file)
    rng = torch.Generator().manual_seed(2)
    x = torch.randint(0, 256, (EXAMPLES, 3, side, side), generator=rng, dtype=torch.uint8)
    examples = Examples(x, torch.arange(EXAMPLES) % 2)
    settings = Laplace(select="last-layer", prior_precision=1.0)
    assert card.input is not None
    fitted = linearise(model.network, examples, examples, card.input, settings)
    assert isinstance(fitted.network, BayesianNetwork)
    out.parent.mkdir(parents=True, exist_ok=True)
    manifest = save(fitted.network, out, card=card)
    assert isinstance(manifest.subnetwork, SubnetworkEntry)
    return manifest.subnetwork.size


def asked(url: str, side: int) -> bool:
    """Whether a running server loads it, answers, and gives it back."""
    with httpx.Client(base_url=url, timeout=300) as client:
        loaded = client.post("/v2/repository/models/m/load")
        if loaded.status_code != 200:
            raise RuntimeError(loaded.text)
        try:
            x = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(3)).tolist()
            reply = client.post("/v1/models/m/predict", json={"inputs": x})
            if reply.status_code != 200:
                raise RuntimeError(reply.text)
            return reply.json()["predictions"][0]["label"] in LABELS
        finally:
            client.post("/v2/repository/models/m/unload")


def captured(file: Path, folder: Path, card: Card, side: int) -> bool:
    """Whether draws of FFG-U of the rebuilt network are one CUDA graph, with the answers of a pass without it."""
    device, out = torch.device("cuda"), folder / "ffg-u.safetensors"
    posterior = bayesianize(load(file).network.net, "ffg-u", start="prior", unsupported="leave", inducing=8)
    save(posterior, out, card=card)
    engine = Engine(reside(load(out), device, torch.float32), (2,), None, 0.0)
    engine.warm(DRAWS, nullcontext())
    assert engine.graphs is not None
    if engine.graphs.at(2, DRAWS) is None:
        return False
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(4)).numpy()
    request = PredictRequest(x, DRAWS, 5, DRAWS, 0.5)
    (one,) = engine.answer([request])
    engine.graphs = None
    (other,) = engine.answer([request])
    assert isinstance(one, PredictResult)
    assert isinstance(other, PredictResult)
    np.testing.assert_allclose(one.columns["probabilities"], other.columns["probabilities"], atol=1e-4)
    return True


def exported(file: Path, folder: Path) -> float:
    """The largest difference between the exported file's outputs and the artifact's."""
    from dubito.deploy.edge.check import check
    from dubito.deploy.edge.export import export
    from dubito.deploy.edge.export import save as write

    model = load(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter
        write(export(model, samples=1), folder / "m.onnx")
    report = check(folder / "m.onnx", model, file.stat().st_size)
    return float(report["max_difference"])


def table(rows: list[dict[str, Any]]) -> str:
    columns = "network, picture, parameters, calls, equal to the bit, methods, Laplace on the last layer, served"
    head = f"| {columns.replace(', ', ' | ')} | one CUDA graph | ONNX |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        missing = [m for m in METHODS if m not in (row.get("methods") or ())]
        methods = "all" if not missing else f"all but {', '.join(missing)}" if row.get("methods") else "none"
        weights = "no" if row.get("laplace") is None else f"{row['laplace']:,} weights"
        onnx = "" if "onnx" not in row else "no" if row["onnx"] is None else f"{row['onnx']:.0e}"
        yes = {True: "yes", False: "no", None: "no"}
        size = f"{row['side']} × {row['side']} | {row['parameters'] / 1e6:.1f} M | {row['saved'] or 'no'}"
        equal, served = yes[row.get("equal")], yes[row.get("served")]
        graph = yes[row["captured"]] if "captured" in row else ""
        lines.append(f"| `{row['network']}` | {size} | {equal} | {methods} | {weights} | {served} | {graph} | {onnx} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="of these networks: torchvision/resnet18 ...")
    parser.add_argument(
        "--steps", nargs="*", choices=STEPS, default=list(STEPS), help="of these steps; all need saving"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep rows here, one JSON object on a line")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no further network after so long")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"torchvision/{name}" for name in TORCHVISION]
    if find_spec("timm") is not None:
        names += [f"timm/{name}" for name in TIMM]
    rows = {row["network"]: row for row in kept_rows(args.keep)}
    chosen = [name for name in names if not args.only or name in args.only]
    chosen = [name for name in chosen if any(step not in rows.get(name, {}) for step in args.steps)]
    words = [sys.executable, "-c", ELSEWHERE]
    start, console = time.monotonic(), Console(stderr=True)
    with TemporaryDirectory() as place:
        folder = Path(place)
        repository, first = folder / "models", folder / "models" / "first" / "1" / "model.safetensors"
        first.parent.mkdir(parents=True)
        save(bayesianize(nn.Linear(2, 2), "deterministic"), first, card=Card(input=Input(shape=(2,))))
        command = ["dubito", "serve", str(repository), "--set", "buckets=1", "--set", "plan_seconds=0"]
        command += ["--set", "repository_api=true"]
        with (
            running(command, folder / "log", "/readyz") as server,
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child,
        ):
            for name in chosen:
                if time.monotonic() - start > args.seconds:
                    break
                rows[name] = measure(name, rows.get(name, {}), args.steps, folder, server.url, child)
                keep_row(args.keep, rows[name])
                console.print(json.dumps(rows[name]), soft_wrap=True)
            assert child.stdin is not None
            child.stdin.close()
    listed = [rows[name] for name in names if name in rows]
    through = sum(all(row.get(step) for step in ("saved", "equal", "laplace", "served")) for row in listed)
    print(machine())
    print(table(listed))
    print(f"through save, load, Laplace on the last layer and serve: {through} of {len(listed)}")


if __name__ == "__main__":
    main()
