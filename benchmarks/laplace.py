"""The closed-form predictive of subnetwork Laplace on a CIFAR ResNet-18, against laplace-torch's in the same run.

    python -m benchmarks.laplace [--peer]

Limits: at most 3 · C forward and backward passes of the batch (C classes), under 2 GB in all, and with `--peer` (needs
laplace-torch) at least 5 times as fast per input as its subnetwork predictive (`pred_type="glm"`, probit), ours at the
batch asked for, the peer at one that it survives: it holds a Jacobian over all weights. The Gaussian is a made-up one
of the size asked for; neither side's time depends on it.
"""

import argparse
import resource
import sys
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._measure import machine, take_turns
from dubito.models import bayesianize, build, predict
from dubito.models.network.linearised import Subnetwork
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.prediction import predict_closed
from dubito.models.predictions.uncertainty import Classified

C = 10


def made(net: nn.Module, S: int) -> BayesianNetwork:
    network = bayesianize(net, "deterministic").eval()
    D = sum(p.numel() for p in net.parameters())
    root = torch.randn(S, S, generator=torch.Generator().manual_seed(0)) / S**0.5
    index = torch.randperm(D, generator=torch.Generator().manual_seed(1))[:S].sort().values
    entry = SubnetworkEntry(size=S, select="random", prior_precision=1.0, examples=1)
    network.subnetwork = Subnetwork.of(index, torch.linalg.cholesky(root @ root.T + 100 * torch.eye(S)), entry)
    return network


def both_ways(net: nn.Module, x: Tensor) -> None:
    net.zero_grad(set_to_none=True)
    net(x).sum().backward()


def peer_of(net: nn.Module, network: BayesianNetwork) -> Callable[[Tensor], Tensor]:
    """laplace-torch over the same indices, with the same precision put in: only its predictive is measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports use what torch has deprecated
        from laplace import Laplace  # type: ignore[import-not-found]
    assert isinstance(network.joint, Subnetwork)
    L = network.joint.factors().L
    peer = Laplace(
        net,
        "classification",
        subset_of_weights="subnetwork",
        hessian_structure="full",
        subnetwork_indices=network.joint.index.long(),
        prior_precision=1.0,
    )
    one = TensorDataset(torch.randn(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))
    peer.fit(DataLoader(one))
    peer.H, peer._posterior_scale = L @ L.T - torch.eye(len(L)), None

    def answer(x: Tensor) -> Tensor:
        probabilities: Tensor = peer(x, pred_type="glm", link_approx="probit")
        return probabilities

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1000, help="S")
    parser.add_argument("--batch", type=int, default=32, help="B")
    parser.add_argument("--samples", type=int, default=20, help="K of the sampled predictive")
    parser.add_argument("--peer", action="store_true", help="Also laplace-torch.")
    parser.add_argument("--peer-batch", type=int, default=1, help="What the peer's memory allows.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    net = build("resnet18-cifar").eval()
    x, few = torch.randn(args.batch, 3, 32, 32), torch.randn(args.peer_batch, 3, 32, 32)
    network = made(net, args.size)
    factors = network.factors()
    rivals: dict[str, Callable[[], object]] = {
        "one forward and backward pass": lambda: both_ways(net, x),
        "closed form": lambda: predict_closed(network, factors, x),
        f"K = {args.samples} draws": lambda: predict(network, factors, x, args.samples, 0),
    }
    seconds = take_turns(rivals, args.rounds)
    memory = peak()
    table = Table("what", "batch", "median s", "s per input", "fwd-bwd passes", title=machine())
    once = seconds["one forward and backward pass"]
    for name, spent in seconds.items():
        table.add_row(name, str(len(x)), f"{spent:.2f}", f"{spent / len(x):.4f}", f"{spent / once:.2f}")
    failed = []
    if seconds["closed form"] > 3 * C * once:
        failed.append(f"the closed form takes {seconds['closed form'] / once:.1f} passes; allowed {3 * C}")
    if memory > 2e9:
        failed.append(f"the peak memory is {memory / 1e9:.2f} GB; allowed 2")
    said = [f"peak memory of this process before the peer: {memory / 1e9:.2f} GB"]
    if args.peer:
        peer = peer_of(net, network)
        ours = predict_closed(network, factors, few).summary
        assert isinstance(ours, Classified)
        torch.testing.assert_close(ours.probabilities, peer(few).detach(), rtol=1e-3, atol=1e-5)
        against = take_turns(
            {"ours": lambda: predict_closed(network, factors, few), "laplace-torch": lambda: peer(few)}, args.rounds
        )
        for name, spent in against.items():
            table.add_row(name, str(len(few)), f"{spent:.2f}", f"{spent / len(few):.4f}", "")
        per_input = against["laplace-torch"] / len(few)
        same, batched = against["laplace-torch"] / against["ours"], per_input * len(x) / seconds["closed form"]
        said.append(f"faster than laplace-torch: {same:.1f} times at its batch, {batched:.1f} times per input at ours")
        said.append(f"peak memory with the peer: {peak() / 1e9:.2f} GB")
        if batched < 5:
            failed.append(f"per input it is {batched:.1f} times as fast as the peer; expected 5")
    Console(width=140).print(table)
    print("\n".join([*said, *(f"FAILED: {reason}" for reason in failed)]))
    sys.exit(bool(failed))


def peak() -> float:
    """Bytes, of the whole process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    main()
