"""What a whole layer does with its input, bias, groups, borders and all, against the dense Gaussian of eq. 34.

The oracle cuts the input into patches by hand, writes Cov(vec W) as one dense matrix with explicit inverses, and maps
both through the layer's linear action.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito.models import bayesianize
from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.posteriors.inducing import Inducing
from tests.examples import at_most

pytestmark = pytest.mark.draws
K = at_most(20_000)
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "linear, biased, wide": (nn.Linear(7, 3), (7,), {"inducing": (2, 3)}),
    "linear, biased, tall": (nn.Linear(3, 6), (3,), {"inducing": (3, 2)}),
    "linear, biased, M > d": (nn.Linear(4, 3), (4,), {"inducing": 8}),
    "convolution, biased": (nn.Conv2d(2, 3, 3, padding=1), (2, 3, 3), {"inducing": (2, 4)}),
    "convolution, grouped, biased": (nn.Conv2d(4, 4, 2, padding=1, groups=2), (4, 2, 2), {"inducing": (3, 4)}),
    "convolution, grouped, strided": (nn.Conv1d(4, 6, 3, 2, groups=2, bias=False), (4, 7), {"inducing": (4, 3)}),
}


def rows_of(layer: nn.Module, x: Tensor) -> Tensor:
    """For each output, which entries of W meet which inputs: (outputs · places, d_out · d_in), W's rows stacked."""
    bias = layer.bias is not None
    weights = [p for p in (layer.weight, layer.bias) if p is not None]
    d_out, d = len(layer.weight), layer.weight[0].numel()  # type: ignore[arg-type, index]
    actions = []
    for i in range(d_out):  # the layer is linear in its weights: feed it one unit weight at a time
        for j in range(d + bias):
            with torch.no_grad():
                for p in weights:
                    p.zero_()  # type: ignore[operator]
                (layer.weight.view(d_out, d)[i] if j < d else layer.bias)[j if j < d else i] = 1  # type: ignore[operator]
                actions.append(layer(x[None])[0].flatten().double())
    return torch.stack(actions, 1)


def dense_law(q: Inducing) -> tuple[Tensor, Tensor]:
    """Mean and covariance of W with its rows stacked, q(V) included, by explicit inverses and Kronecker products."""
    with torch.no_grad():
        Z_r, Z_c, D_r, D_c = (t.double() for t in (q.Z_r(), q.Z_c(), q.D_r(), q.D_c()))
        D_r, D_c = (
            (D**2 + 1e-4 * (Z.square().sum(1) + D**2).mean()).sqrt() for Z, D in ((Z_r, D_r), (Z_c, D_c))
        )  # the relative jitter
        Psi_r, Psi_c = Z_r @ Z_r.T + torch.diag(D_r**2), Z_c @ Z_c.T + torch.diag(D_c**2)
        P_r, P_c = (Z.T @ torch.linalg.inv(Psi) @ Z for Z, Psi in ((Z_r, Psi_r), (Z_c, Psi_c)))
        A_r = Z_r.T @ torch.linalg.inv(torch.linalg.cholesky(Psi_r)).T
        A_c = Z_c.T @ torch.linalg.inv(torch.linalg.cholesky(Psi_c)).T
        lam, sigma = q.scale(), q.sigma
        m, s = (t.double() for t in (q.law.centre(), q.law.spread()))  # type: ignore[union-attr]
        mean = (sigma * A_r @ m @ A_c.T).flatten()
        M = torch.kron(A_r, A_c)
        C = (lam * sigma) ** 2 * (torch.eye(len(mean)).double() - torch.kron(P_r, P_c))
        return mean, C + sigma**2 * M @ torch.diag(s.flatten() ** 2) @ M.T


def outputs(network: BayesianNetwork, x: Tensor, how: Any) -> Tensor:
    factors = network.factors()
    found = []
    rng = torch.Generator().manual_seed(0)
    for _ in range(K // 4000):
        noise = torch.randn(4000, factors.normals, generator=rng)
        found.append(network.run(x[None], factors, Draws(4000, noise, 0), {"": how}).flatten(1))
    return torch.cat(found).double()


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize(("noise", "how"), [("exact", "batch"), ("factored", "factored"), ("factored", "batch")])
def test_a_layers_outputs_have_the_law_of_the_dense_gaussian(case: str, noise: str, how: str) -> None:
    """Exact noise: the joint law of all outputs at all places. Factored: that of all outputs at each place alone."""
    torch.manual_seed(1)
    layer, shape, options = LAYERS[case]
    layer.reset_parameters()  # type: ignore[operator]
    network = bayesianize(layer, "ffg-u", noise=noise, lam_max=1.0, sigma_max=1.0, **options)
    q = network.layers[""].posterior
    assert isinstance(q, Inducing)
    with torch.no_grad():
        q.lam.raw.fill_(0.5)  # type: ignore[union-attr]
        q.law.spread.raw.normal_()  # type: ignore[union-attr]
        q.D_r.raw.normal_()
        q.D_c.raw.normal_()
    x = torch.randn(shape)
    drawn = outputs(network, x, how)
    L = rows_of(layer, x)
    mean, C = dense_law(q)
    mean, C = L @ mean, L @ C @ L.T
    v = C.diagonal().clamp(min=0)
    assert ((drawn.mean(0) - mean).abs() < 5 * (v / K).sqrt() + 1e-5).all()
    error = 5 * ((v[:, None] * v + C**2) / K).sqrt() + 1e-5
    wrong = (drawn.T.cov() - C).abs() > error
    if noise == "factored":  # between two places the truth is the cosine of their patches, and way 3 says 1
        places = math.prod(layer(x[None]).shape[2:]) if len(shape) > 1 else 1
        place = torch.arange(len(v)) % places
        wrong &= place[:, None] == place
        groups = getattr(layer, "groups", 1)
        group = torch.arange(len(v)) // places // (len(v) // places // groups)
        wrong &= group[:, None] == group  # as are two groups' patches
    assert not wrong.any()
