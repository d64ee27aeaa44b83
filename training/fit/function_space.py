"""Function-space VI [Rudner21]: the KL between functions at context inputs, in place of the KL between weights.

Both sides are Gaussian: q by linearising the network at the mean of the weights, with the covariance J Σ Jᵀ; the prior
by its mean and variance. J is never formed. A probe is a draw t ~ N(0, J Σ Jᵀ) of the linearised network, by forward
mode. The covariance of S probes about their known mean has a Wishart distribution: its trace has the right mean, and
the mean of its log-determinant differs from the true one by a constant that follows from S. So the estimate of the KL
and its gradient have no bias.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from dubito.models.manifest import Input
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.parameters import Positive
from dubito.training.config import Context, RecipeError
from dubito.training.data.data import Examples, enter
from dubito.training.data.spoil import spoil
from dubito.training.seeds import sow

OF_TRAINING = ("uniform", "spoiled", "augmented")  # kinds of context inputs that the training data gives
JITTER = 1e-6  # of a covariance, as a share of its mean variance
REACH = 16  # probes by which the posterior's reach is measured
FAR = 10.0  # standard deviations of the prior over the largest of the posterior's, from which on a remark is made
AT_CAP = 20.0  # before the sigmoid of a capped number


@dataclass(frozen=True)
class FunctionSpace:
    """The prior over functions, and the inputs at which they are compared with it."""

    context: Context
    train: Examples
    declared: Input
    other: Tensor | None  # inputs of another data set
    start: BayesianNetwork | None  # whose mean is the prior's mean; None: zero

    @classmethod
    def of(
        cls, context: Context, network: BayesianNetwork, train: Examples, declared: Input, other: Tensor | None = None
    ) -> Self:
        check_gaussian(network)
        start = copy.deepcopy(network).requires_grad_(False).eval() if context.prior_mean == "start" else None
        return cls(context, train, declared, other, start)

    def inputs(self, batch: Tensor, rng: torch.Generator) -> Tensor:
        """Context inputs of a step, as the network takes them: (n, …)."""
        n = self.context.points
        match self.context.inputs:
            case "uniform":
                x = self._uniform(n, rng)
            case "spoiled":
                copies = torch.cat(list(spoil(batch.cpu(), rng)))
                x = copies[torch.randperm(len(copies), generator=rng)[:n]]
            case "augmented":
                x = batch[:n]
            case _:
                assert self.other is not None
                x = self.other[torch.randint(len(self.other), (n,), generator=rng)]
        return enter(x.to(batch.device), self.declared)

    def _uniform(self, n: int, rng: torch.Generator) -> Tensor:
        x = self.train.x
        if x.dtype == torch.uint8:
            return torch.randint(256, (n, *x.shape[1:]), generator=rng, dtype=torch.uint8)
        low, high = x.flatten(1).aminmax(dim=0)
        low, high = low - self.context.margin * (high - low), high + self.context.margin * (high - low)
        u = torch.rand(n, len(low), generator=rng)
        return torch.lerp(low.cpu(), high.cpu(), u).view(n, *x.shape[1:])

    @torch.no_grad()
    def out_of_reach(self, network: BayesianNetwork, batch: Tensor, seed: int) -> str | None:
        """A remark where the caps of the posterior keep its functions far narrower than the prior."""
        wide = copy.deepcopy(network).eval()
        capped = [m for m in wide.modules() if isinstance(m, Positive) and m.cap is not None]
        if not capped:
            return None
        for part in capped:
            part.raw.fill_(AT_CAP)
        sow(seed, batch.device)
        x = self.inputs(batch, torch.Generator().manual_seed(seed))
        _, probes = _linearised(wide, x, max(REACH, self.context.probes))
        most, prior = float(probes.square().mean().sqrt()), math.sqrt(self.context.prior_variance)
        if FAR * most > prior:
            return None
        return (
            f"The prior of the functions has a standard deviation of {prior:.3g}; with every cap reached, the "
            f"posterior has one of {most:.3g} at the context inputs. Its doubt stays below the prior's: raise "
            "sigma_max in posterior.options, or lower context.prior_variance."
        )

    def kl(self, network: BayesianNetwork, x: Tensor) -> Tensor:
        """An estimate of the KL at these context inputs."""
        return function_kl(network, x, self.context, self.start)


def check_gaussian(network: BayesianNetwork) -> None:
    if not network.gaussian:
        raise RecipeError(
            "fit.objective is 'function-space', which needs a Gaussian posterior; ensembles, dropout, flows, "
            "inducing points and the plain network have none. Use ffg-u, fcg-u, ffg-w, fcg-w or whvi (without flows)."
        )


def function_kl(network: BayesianNetwork, x: Tensor, context: Context, start: BayesianNetwork | None) -> Tensor:
    """KL of the linearised posterior to the prior at the context inputs x (n, …), summed over outputs."""
    mean, probes = _linearised(network, x, context.probes)
    if start is not None:
        with torch.no_grad():
            mean = mean - start.mean(x).float()[..., : mean.shape[1]]
    return gaussian_kl(mean, probes, context.prior_variance, full=context.covariance == "full")


def _linearised(network: BayesianNetwork, x: Tensor, S: int) -> tuple[Tensor, Tensor]:
    """Mean (n, C) and S probes (S, n, C) of the outputs, without the columns that the targets' noise follows."""
    C = network.task.outputs if network.task.kind == "regression" else None
    with evaluating_norms(network):
        mean, probes = network.sample_linearised(x, S)
    return mean.float()[..., :C], probes.float()[..., :C]


def gaussian_kl(mean: Tensor, probes: Tensor, variance: float, full: bool) -> Tensor:
    """An unbiased estimate of KL(N(mean, C) ‖ N(0, variance)) from S probes t ~ N(0, C), summed over outputs.

    `mean` (n, C), `probes` (S, n, C). With `full`, C is the covariance between the n inputs, for each output; else its
    diagonal. E ln χ²_k = ψ(k/2) + ln 2, and ln det of a Wishart matrix is a sum of such logarithms [Bishop06, B.81].
    """
    S, n, outputs = probes.shape
    squares = probes.square().mean(0)  # (n, C)
    quadratic = (squares.sum() + mean.square().sum()) / variance
    half = torch.arange(S, S - n if full else S - 1, -1, dtype=torch.float64) / 2
    bias = float((torch.special.digamma(half) + math.log(2 / S)).sum()) * (1 if full else n)
    if full:
        t = probes.permute(2, 0, 1).double()  # (C, S, n)
        covariance = t.mT @ t / S
        ridge = JITTER * covariance.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        covariance = covariance + ridge * torch.eye(n, dtype=t.dtype, device=t.device)
        log_det = 2 * torch.linalg.cholesky(covariance).diagonal(dim1=1, dim2=2).log().sum().to(mean.dtype)
    else:
        log_det = squares.clamp(min=torch.finfo(squares.dtype).tiny).log().sum()
    kl: Tensor = (quadratic - n * outputs + n * outputs * math.log(variance) - (log_det - outputs * bias)) / 2
    return kl


@contextmanager
def evaluating_norms(network: nn.Module) -> Iterator[None]:
    """BatchNorm keeps its statistics: context inputs are no data."""
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()
