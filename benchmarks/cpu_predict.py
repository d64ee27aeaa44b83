"""K posterior draws of a CIFAR ResNet-18 on a CPU, against a loop over K deterministic networks.

The rival is an ensemble of K plain networks in the memory layout that is fastest for it; BatchNorm stays unfolded on
both sides. Ours is the cheapest execution per layer, with λ = 0 and with λ > 0 (the exact law where forming W is as
cheap, else the factored law with R directions); the exact law in every layer, which forms every W, is shown beside
them. Each path's predictions for the first input are checked against those for that input alone.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks._measure import machine, take_turns
from dubito.models import bayesianize, build, predict
from dubito.models.conversion.directions import set_directions
from dubito.models.network.network import BayesianNetwork


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
    rivals: dict[str, Callable[[], object]] = {
        f"{K} networks, contiguous": _ensemble(net, K, x, torch.contiguous_format),
        f"{K} networks, channels last": _ensemble(net, K, x, torch.channels_last),
    }
    times = take_turns(rivals | {name: _ours(n, x, K) for name, n in ours.items()}, args.rounds)
    best = min(times[name] for name in rivals)
    table = Table(title=f"ResNet-18 (CIFAR), M = {M}, batch {args.batch}, K = {K}")
    for column in ("", "median seconds", "ratio to the best ensemble"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / best:.3f}")
    console = Console()
    console.print(table)
    console.print(machine())


def _ensemble(net: nn.Module, K: int, x: Tensor, layout: torch.memory_format) -> Callable[[], object]:
    nets = [copy.deepcopy(net).to(memory_format=layout) for _ in range(K)]
    inputs = x.contiguous(memory_format=layout)

    @torch.inference_mode()
    def run() -> list[Tensor]:
        return [n(inputs) for n in nets]

    return run


def _ours(network: BayesianNetwork, x: Tensor, K: int) -> Callable[[], object]:
    """Draws included; the factors are computed once, as a server does."""
    factors = network.eval().factors()
    whole = predict(network, factors, x, K, 0, keep_outputs=True).outputs
    alone = predict(network, factors, x[:1], K, 0, keep_outputs=True).outputs
    assert whole is not None
    assert alone is not None
    torch.testing.assert_close(whole[:, :1], alone, rtol=1e-3, atol=1e-4)
    return lambda: predict(network, factors, x, K, 0)


if __name__ == "__main__":
    main()
