"""GPyTorch's deep GP with the layers, points and steps of ours: whitened inducing outputs, local inducing inputs."""

import math
from typing import TYPE_CHECKING, Any

import gpytorch
import torch
from gpytorch.models.deep_gps import DeepGP, DeepGPLayer
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.uci_elbo import Division

START = 0.1  # standard deviation of the inducing outputs of hidden layers, as ours


class Identity(gpytorch.means.Mean):  # type: ignore[misc]
    """The skip connection: output o has input o as its mean."""

    def forward(self, x: Tensor) -> Tensor:
        return x.diagonal(dim1=-3, dim2=-1).mT


class Layer(DeepGPLayer):  # type: ignore[misc]
    def __init__(self, Z: Tensor, d_out: int | None) -> None:
        batch = torch.Size([]) if d_out is None else torch.Size([d_out])
        points = Z.clone() if d_out is None else Z.expand(d_out, *Z.shape).clone()
        q = gpytorch.variational.CholeskyVariationalDistribution(len(Z), batch_shape=batch)
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, q), Z.shape[1], d_out)
        self.mean_module = gpytorch.means.ZeroMean() if d_out is None else Identity()
        rbf = gpytorch.kernels.RBFKernel(batch_shape=batch, ard_num_dims=Z.shape[1])
        self.covar_module = gpytorch.kernels.ScaleKernel(rbf, batch_shape=batch)
        rbf.lengthscale = math.sqrt(Z.shape[1])
        self.covar_module.outputscale = 1.0
        if d_out is not None:
            with torch.no_grad():
                q.chol_variational_covar.mul_(START)

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Deep(DeepGP):  # type: ignore[misc]
    def __init__(self, Z: Tensor, layers: int, noise: float) -> None:
        super().__init__()
        self.hidden = torch.nn.ModuleList([Layer(Z, Z.shape[1]) for _ in range(layers - 1)])
        self.last = Layer(Z, None)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.likelihood.noise = noise**2

    def forward(self, x: Tensor) -> Any:
        for layer in self.hidden:
            x = layer(x)
        return self.last(x)


def theirs(layers: int, points: int, steps: int, d: "Division") -> dict[str, float]:
    from benchmarks.uci_elbo import DRAWS, NOISE, descend

    N = len(d.x)
    model = Deep(d.x[torch.randperm(N)[:points]], layers, NOISE)
    bound = gpytorch.mlls.DeepApproximateMLL(gpytorch.mlls.VariationalELBO(model.likelihood, model, N))

    def loss(some: Tensor) -> Tensor:
        with gpytorch.settings.num_likelihood_samples(1):
            value: Tensor = -bound(model(d.x[some]), d.y[some, 0])
            return value

    seconds = descend(list(model.parameters()), loss, N, steps)
    model.eval()
    with torch.no_grad(), gpytorch.settings.num_likelihood_samples(DRAWS):
        elbo = float(bound(model(d.x), d.y[:, 0])) - float(d.scale.log().sum())
        law = model.likelihood(model(d.x_test))
        mean, std = law.mean.double() * d.scale + d.shift, law.stddev.double() * d.scale
        density = torch.distributions.Normal(mean, std).log_prob(d.y_test[:, 0]).logsumexp(0) - math.log(DRAWS)
        return {
            "elbo": elbo,
            "log_likelihood": float(density.mean()),
            "rmse": float((mean.mean(0) - d.y_test[:, 0]).square().mean().sqrt()),
            "seconds_an_epoch": seconds,
        }
