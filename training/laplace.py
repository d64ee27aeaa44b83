"""Subnetwork Laplace [Daxberger21]: a Gaussian over S weights of a trained network.

The S weights are chosen by the diagonal of the generalised Gauss-Newton matrix over all weights. The precision H_S of
the Gaussian is the Gauss-Newton matrix H over those S, plus the prior precision on its diagonal.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito.models.conversion.start import CONVERTIBLE
from dubito.models.errors import DubitoError
from dubito.models.manifest import Input
from dubito.models.network.jacobian import Linearised, add_squares, layout
from dubito.models.network.linearised import Subnetwork
from dubito.models.network.network import BayesianNetwork
from dubito.models.posteriors.subnetwork import Selection, SubnetworkEntry
from dubito.models.predictions.prediction import evaluating, tally_for
from dubito.models.predictions.uncertainty import ValueTally, probit
from dubito.models.terminal import bar
from dubito.training.config import Laplace
from dubito.training.data.data import Examples, enter
from dubito.training.metrics import gaussian_nll, nll

USUAL_SIZE = 1000  # default S
LARGE = 1_000_000  # weights of a network for which the last layer is the default: no gradient goes further down
MOST_LAST = 2000  # weights of a last layer that are all taken: every prediction reads their 2 million numbers
JACOBIAN = 1 << 26  # numbers of a Jacobian held at a time
VALIDATION = 1 << 28  # numbers of the Jacobian of validation examples, which is kept for the whole grid
COARSE = tuple(10.0**n for n in range(-4, 5))
FINE = 4  # steps to a factor of ten
SAME = 1e-4  # a difference of log-likelihoods that is none


class LaplaceError(DubitoError):
    """A network or data for which there is no Laplace approximation."""


@dataclass(frozen=True)
class FittedLaplace:
    network: BayesianNetwork
    scores: dict[float, float]  # mean validation log-likelihood by prior precision; empty if the precision was given


def linearise(
    network: BayesianNetwork,
    train: Examples,
    validation: Examples,
    declared: Input,
    settings: Laplace | None = None,
    seed: int = 0,
) -> FittedLaplace:
    """A copy of a trained plain network with a Gaussian over S of its weights."""
    settings = Laplace() if settings is None else settings
    check_plain(network)
    network = copy.deepcopy(network)
    network.set_joint(None)
    network.eval()
    index = choose(network, train, declared, settings, seed)
    H = curvature(network, train, declared, index, settings.batch)
    precision, scores = settings.prior_precision, dict[float, float]()
    if precision is None:
        precision, scores = best_precision(network, validation, declared, index, H, settings.batch)
    entry = SubnetworkEntry(
        size=len(index), select=selection(network.net, settings), prior_precision=precision, examples=len(train)
    )
    network.set_joint(Subnetwork.of(index, factor(H, precision), entry))
    return FittedLaplace(network, scores)


def describe(fitted: FittedLaplace) -> str:
    """The chosen prior precision and its validation log-likelihood, in a sentence or two."""
    chosen = fitted.network.joint
    assert isinstance(chosen, Subnetwork)
    S, precision = chosen.entry.size, chosen.entry.prior_precision
    if not fitted.scores:
        return f"a posterior over {S:,} weights, with the given prior precision of {precision:.4g}"
    text = (
        f"a posterior over {S:,} weights, with a prior precision of {precision:.4g}: validation log-likelihood "
        f"{fitted.scores[precision]:.4f}, from {min(fitted.scores.values()):.4f} elsewhere on the grid"
    )
    if max(fitted.scores.values()) - min(fitted.scores.values()) < SAME:
        return (
            f"{text}. All of the grid are the same: the outputs hardly depend on these weights, and the posterior adds "
            "next to no doubt. Choose others (--select last-layer, --select magnitude)."
        )
    if precision < max(COARSE):
        return text
    return (
        f"{text}. It is the grid's largest: on the validation part the network is best as it is, and the posterior "
        "adds next to no doubt. Choose a smaller prior precision for more."
    )


def check_plain(network: BayesianNetwork) -> None:
    if network.factors().random and network.joint is None:
        raise LaplaceError(
            "this network is Bayesian already; expected a plain one (method deterministic), trained as usual."
        )
    if network.gain is not None:
        raise LaplaceError(
            "the noise of this network's targets depends on the input; a subnetwork Laplace approximation knows "
            'constant noise only. Train the network with noise = "constant".'
        )


def selection(net: nn.Module, settings: Laplace) -> Selection:
    """As the settings say; else the last layer of a large network.

    Anything below the last layer needs a backward pass through the network for each class, in the fit and in every
    prediction.
    """
    large = sum(p.numel() for p in net.parameters()) > LARGE
    return settings.select or ("last-layer" if large else "variance")


def check_size(net: nn.Module, settings: Laplace) -> int:
    """S, checked against the number of weights to choose from."""
    last = selection(net, settings) == "last-layer"
    D = len(_last_layer(net)) if last else sum(p.numel() for p in net.parameters())
    usual = D if last and D <= MOST_LAST else min(USUAL_SIZE, D)
    S = usual if settings.size is None else settings.size
    if S > D:
        whose = "last layer" if last else "network"
        raise LaplaceError(f"size is {S:,}, but the {whose} has {D:,} weights; expected no more than those.")
    return S


def choose(network: BayesianNetwork, train: Examples, declared: Input, settings: Laplace, seed: int = 0) -> Tensor:
    """Indices (S,), ascending, of the chosen weights in the flattened parameters."""
    net = network.net
    D, device = sum(p.numel() for p in net.parameters()), next(net.parameters()).device
    S, rng = check_size(net, settings), torch.Generator().manual_seed(seed)
    match selection(net, settings):
        case "last-layer":  # all of it, or some at random
            every = _last_layer(net)
            places = every[torch.randperm(len(every), generator=rng)[:S]].to(device)
        case "random":
            places = torch.randperm(D, generator=rng)[:S].to(device)
        case "magnitude":
            size = torch.cat([p.detach().abs().flatten() for p in net.parameters()])
            places = size.sort(descending=True, stable=True).indices[:S]
        case _:
            places = least_curved(diagonal(network, train, declared, settings.batch), S)
    return places.sort().values


def least_curved(diagonal: Tensor, S: int) -> Tensor:
    """Indices of the S largest variances 1/(diagonal + prior precision): the smallest curvatures, for any prior.

    Weights with zero curvature come last: no output depends on them at any training input (behind a dead unit, for
    example), so a posterior over them would not change a prediction.
    """
    reached = torch.where(diagonal > 0, diagonal, torch.inf)
    return reached.sort(stable=True).indices[:S]


def _last_layer(net: nn.Module) -> Tensor:
    last = [name for name, module in net.named_modules() if isinstance(module, CONVERTIBLE)][-1:]
    if not last:
        raise LaplaceError("the network has no Linear or Conv layer, so it has no last one; choose another --select.")
    owner = net.get_submodule(last[0])
    mine = {id(p) for p in owner.parameters(recurse=False)}
    names = {name for name, p in net.named_parameters() if id(p) in mine}
    spans = [span for name, span in layout(net).items() if name in names]
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])


def roots(network: BayesianNetwork, f: Tensor) -> Tensor:
    """v (n, B, C) with Σ v vᵀ = the Hessian of the negative log-likelihood at the outputs f (B, C).

    Classification: √p_c (e_c − p) for each c, which sum to diag(p) − p pᵀ. Regression: e_d/σ_d.
    """
    if network.noise is not None:
        return (torch.diag(1 / network.noise().detach())[:, None].expand(-1, len(f), -1)).to(f)
    p = f.softmax(-1)
    return p.T.sqrt()[..., None] * (torch.eye(f.shape[1], device=f.device, dtype=f.dtype)[:, None] - p)


def diagonal(network: BayesianNetwork, train: Examples, declared: Input, batch: int) -> Tensor:
    """The diagonal of the Gauss-Newton matrix over all weights, in one pass over the examples: (D,)."""
    net = network.net
    like = next(net.parameters())
    total = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=torch.float64, device=like.device)
    with evaluating(network), bar("curvature of each weight", len(train)) as advance:
        for x in train.x.split(batch):
            add_squares(net, enter(x.to(like.device), declared), lambda f: roots(network, f), total, network.learned)
            advance(len(x))
    _check_finite(total)
    return total


def curvature(network: BayesianNetwork, train: Examples, declared: Input, index: Tensor, batch: int) -> Tensor:
    """The Gauss-Newton matrix over the chosen weights, in float64: (S, S)."""
    net, S = network.net, len(index)
    device = next(net.parameters()).device
    H = torch.zeros(S, S, dtype=torch.float64, device=device)
    with evaluating(network), bar(f"curvature of {S:,} weights", len(train)) as advance:
        C = len(roots(network, _outputs(network, enter(train.x[:1].to(device), declared))))
        for x in train.x.split(max(1, min(batch, JACOBIAN // (C * S)))):
            linearised = Linearised(net, enter(x.to(device), declared), index, network.learned)
            v = roots(network, linearised.outputs)
            A = torch.einsum("nbc,bcs->nbs", v, linearised.jacobian()).flatten(0, 1).double()
            H.addmm_(A.T, A)
            advance(len(x))
    _check_finite(H)
    return H


@torch.no_grad()
def _outputs(network: BayesianNetwork, x: Tensor) -> Tensor:
    f: Tensor = network.net(x)
    return f


def _check_finite(curvature: Tensor) -> None:
    if not curvature.isfinite().all():
        raise LaplaceError(
            "the curvature is not finite: the network's weights or some training inputs are out of range. "
            "Look at the network's outputs on the training part."
        )


def factor(H: Tensor, precision: float) -> Tensor:
    """Cholesky factor L with L Lᵀ = H + precision · I; H is unchanged."""
    diagonal = H.diagonal().clone()
    H.diagonal().add_(precision)
    L, info = torch.linalg.cholesky_ex(H)
    H.diagonal().copy_(diagonal)
    if int(info) != 0:
        raise LaplaceError(
            f"with a prior precision of {precision:g} the precision matrix over {len(H):,} weights is not positive "
            "definite in float64: expected a larger prior precision for curvatures as large as these "
            f"(up to {float(diagonal.max()):.3g})."
        )
    lower: Tensor = L
    return lower


def best_precision(
    network: BayesianNetwork, validation: Examples, declared: Input, index: Tensor, H: Tensor, batch: int
) -> tuple[float, dict[float, float]]:
    """Prior precision with the best validation log-likelihood of the probit predictive: powers of ten, then finer."""
    f, J, y = _validation_jacobian(network, validation, declared, index, batch)
    scores: dict[float, float] = {}
    with bar("choosing the prior precision", len(COARSE) + 2 * (FINE - 1)) as advance:

        def look(precisions: Iterator[float] | tuple[float, ...]) -> None:
            for precision in precisions:
                scores[precision] = _score(network, f, J, y, factor(H, precision), precision)
                advance(1)

        look(COARSE)
        best = max(scores, key=scores.__getitem__)
        steps = [n / FINE for n in range(-FINE + 1, FINE) if n]
        look(best * 10**n for n in steps if COARSE[0] <= best * 10**n <= COARSE[-1])
    return max(scores, key=scores.__getitem__), dict(sorted(scores.items()))


def _validation_jacobian(
    network: BayesianNetwork, validation: Examples, declared: Input, index: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs (V, C), Jacobians (V, C, S) and targets of as many examples as `VALIDATION` allows."""
    device, S = next(network.parameters()).device, len(index)
    with evaluating(network), bar("validation part", len(validation)) as advance:
        C = _outputs(network, enter(validation.x[:1].to(device), declared)).shape[1]
        V = min(len(validation), max(1, VALIDATION // (C * S)))
        parts = []
        for x in validation.x[:V].split(max(1, min(batch, JACOBIAN // (C * S)))):
            linearised = Linearised(network.net, enter(x.to(device), declared), index, network.learned)
            parts.append((linearised.outputs, linearised.jacobian()))
            advance(len(x))
    return torch.cat([f for f, _ in parts]), torch.cat([J for _, J in parts]), validation.y[:V].to(device)


def _score(network: BayesianNetwork, f: Tensor, J: Tensor, y: Tensor, L: Tensor, precision: float) -> float:
    """Mean log-likelihood of the targets; raises if it is not finite."""
    rows = J.flatten(0, 1)
    variances = [
        torch.linalg.solve_triangular(L, some.double().mT, upper=False).square().sum(0)
        for some in rows.split(max(1, JACOBIAN // len(L)))
    ]
    score = -closed_nll(network, f.double(), torch.cat(variances).view_as(f), y)
    if not math.isfinite(score):
        raise LaplaceError(
            f"the validation log-likelihood at a prior precision of {precision:g} is {score}, which is no number: "
            "the network's outputs or Jacobians on the validation part are out of range."
        )
    return score


def closed_nll(network: BayesianNetwork, f: Tensor, variance: Tensor, y: Tensor) -> float:
    """Mean negative log-likelihood of the probit predictive, in the targets' own units."""
    tally = tally_for(network)
    if isinstance(tally, ValueTally):
        summary = tally.regressed(f, variance)
        return gaussian_nll(
            summary.mean.cpu(), (summary.epistemic_variance + summary.aleatoric_variance).cpu(), y.cpu()
        )
    return nll(probit(f, variance).probabilities.cpu(), y.cpu())
