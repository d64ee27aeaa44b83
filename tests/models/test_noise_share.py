"""The share of noise in a layer's weights, against the law of W in full at a toy size."""

import math

import pytest
import torch
from torch import nn

from dubito.models import bayesianize
from dubito.models.posteriors.inducing import Inducing
from dubito.models.report import NOISE_DRAWS, noise_share


@pytest.mark.parametrize("lam_max", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(40, 60), (30, 8)])
def test_of_inducing_weights(shape: tuple[int, int], lam_max: float) -> None:
    """E‖W − E W‖² by [Ritter21, eq. 34] with Ψ inverted outright: σ²(Σ s² P_r P_c + λ²(d_out d_in − tr P_r tr P_c))."""
    d_out, d_in = shape
    torch.manual_seed(0)
    net = nn.Linear(d_in, d_out, bias=False)
    layer = bayesianize(net, "ffg-u", inducing=6, spread=0.3, sigma_max=0.6, lam_max=lam_max).layers[""]
    q = layer.posterior
    assert isinstance(q, Inducing)
    with torch.no_grad():
        if q.lam is not None:
            q.lam.raw.fill_(40.0)
        Z_r, Z_c = q.Z_r().double(), q.Z_c().double()
        D_r, D_c = (  # with the jitter that is part of D² everywhere
            (D().double().square() + 1e-4 * (Z @ Z.T).diagonal().mean()) for Z, D in ((Z_r, q.D_r), (Z_c, q.D_c))
        )
        P_r, P_c = (Z.T @ torch.linalg.inv(Z @ Z.T + torch.diag(D)) @ Z for Z, D in ((Z_r, D_r), (Z_c, D_c)))
        noise = 0.3**2 * float(P_r.trace() * P_c.trace())
        noise += lam_max**2 * (d_out * d_in - float(P_r.trace() * P_c.trace()))
        mean = float(q.factors().mean(None).dense().double().square().sum()) / q.sigma**2
    share = math.sqrt(noise / mean)
    draws = NOISE_DRAWS * 36  # normals that the noise is made of, at the least
    assert noise_share(layer) == pytest.approx(share, rel=5 / math.sqrt(2 * draws))


def test_of_an_ensemble_and_of_none() -> None:
    torch.manual_seed(0)
    net = nn.Linear(50, 40, bias=False)
    members = bayesianize(net, "ensemble-w", members=4).layers[""]
    W = members.q.factors().mean(torch.arange(4)).W.double()  # type: ignore[union-attr]
    expected = float((W - W.mean(0)).square().sum((1, 2)).mean().sqrt() / W.mean(0).norm())
    assert noise_share(members) == pytest.approx(expected, rel=1e-4)
    assert noise_share(bayesianize(net, "mc-dropout").layers[""]) is None
