"""K posterior draws of a CIFAR ResNet-18 on a CPU, against a loop over K deterministic networks.

The rival is an ensemble of K plain networks in the memory layout that is fastest for it. In the library BatchNorm stays
as it is, on both sides; a server folds it, and so does the rival of its rows. Ours is the cheapest execution per layer,
with λ = 0 and with λ > 0 (the exact law where forming W is as cheap, else the factored law with R directions); the
exact law in every layer, which forms every W, is shown beside them. Each path's predictions for the first input are
checked against those for that input alone. The same networks as a server runs them, with compiled passes and normals,
stand below them.

A second table has the embedded digits, one input in the engine of a server: by torch, and compiled. Where there is a C
compiler, all of ours draw by compiled normals, which serve a whole process.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from benchmarks._measure import answering, machine, take_turns
from dubito.models import bayesianize, build, load, predict, save
from dubito.models.conversion.directions import set_directions
from dubito.models.embedded import embedded
from dubito.models.manifest import Card, Input
from dubito.models.network.network import BayesianNetwork

OFTEN = 20  # answers that are timed together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="K")
    parser.add_argument("--batch", type=int, default=32, help="B")
    parser.add_argument("--inducing", type=int, default=64, help="M")
    parser.add_argument("--directions", type=int, default=4, help="R")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    net = build("resnet18-cifar").eval()
    x = torch.randn(args.batch, 3, 32, 32)
    M, K = args.inducing, args.samples
    ours = {
        "λ = 0": bayesianize(net, "ffg-u", inducing=M, start="prior", lam_max=0.0),
        f"λ > 0, factored noise, R = {args.directions}": bayesianize(net, "ffg-u", inducing=M, start="prior"),
        "λ > 0, exact law": bayesianize(net, "ffg-u", inducing=M, start="prior", noise="exact"),
    }
    for network in ours.values():
        set_directions(network, x, args.directions)
    layouts = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
    rivals = {f"{K} networks, {name}": _ensemble(net, K, x, layout) for name, layout in layouts.items()}
    folded = {f"{name}, folded": _ensemble(_folded(net), K, x, layouts[name.split(", ")[1]]) for name in rivals}
    paths = {name: _ours(n, x, K) for name, n in ours.items()}
    served = {f"{name}, as a server": _served(n, x, K) for name, n in ours.items()}
    times = take_turns(rivals | folded | paths | served, args.rounds)
    table = Table(title=f"ResNet-18 (CIFAR), M = {M}, batch {args.batch}, K = {K}")
    for column in ("", "median seconds", "ratio to the best ensemble"):
        table.add_column(column, justify="left" if not column else "right")
    for group in (rivals | paths, folded | served):  # with the rivals that have the same fusions
        best = min(times[name] for name in group if name in rivals | folded)
        for name in group:
            table.add_row(name, f"{times[name]:.3f}", f"{times[name] / best:.3f}")
    console = Console()
    console.print(table)
    console.print(_digits(args.rounds))
    console.print(machine())


def _ensemble(net: nn.Module, K: int, x: Tensor, layout: torch.memory_format) -> Callable[[], object]:
    nets = [copy.deepcopy(net).to(memory_format=layout) for _ in range(K)]
    inputs = x.contiguous(memory_format=layout)

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [n(inputs) for n in nets]

    return run


def _folded(net: nn.Module) -> nn.Module:
    """Each BatchNorm within the convolution before it."""
    traced = fx.symbolic_trace(net)
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        before = node.args[0] if node.op == "call_module" and isinstance(modules[node.target], nn.BatchNorm2d) else None
        if before is not None:
            traced.set_submodule(before.target, fuse_conv_bn_eval(modules[before.target], modules[node.target]))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


def _ours(network: BayesianNetwork, x: Tensor, K: int) -> Callable[[], object]:
    """Draws included; the factors are computed once, as a server does."""
    factors = network.eval().factors()
    whole = predict(network, factors, x, K, 0, keep_outputs=True).outputs
    alone = predict(network, factors, x[:1], K, 0, keep_outputs=True).outputs
    assert whole is not None
    assert alone is not None
    torch.testing.assert_close(whole[:, :1], alone, rtol=1e-3, atol=1e-4)
    return lambda: predict(network, factors, x, K, 0)


def _served(network: BayesianNetwork, x: Tensor, K: int) -> Callable[[], object]:
    """As a server answers: units, passes by onnxruntime where that is faster, normals by compiled code."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save(network, file, card=Card(input=Input(shape=tuple(x.shape[1:]))))
        return answering(load(file), x, K)


def _digits(rounds: int) -> Table:
    model = load(embedded("digits"))
    x = torch.randn(1, 1, 8, 8)
    table = Table(title="the embedded digits, one input, in the engine")
    for column in ("K", "torch, ms", "compiled, ms"):
        table.add_column(column, justify="right")
    for K in (20, 64):
        # where there is a C compiler, both draw by it: it serves all engines of a process
        paths = {name: answering(model, x, K, compiled=name == "compiled") for name in ("torch", "compiled")}
        times = take_turns({name: partial(_often, run) for name, run in paths.items()}, 3 * rounds)
        table.add_row(str(K), *(f"{1000 * times[name] / OFTEN:.2f}" for name in paths))
    return table


def _often(run: Callable[[], object]) -> None:
    for _ in range(OFTEN):
        run()


if __name__ == "__main__":
    main()
