"""What the λ-noise of a convolution does to a real feature map: exact, way 3 with R directions, fresh per location.

At one location all schemes have the same variance. What sets them apart is how the noise of two locations, or of two
inputs, hangs together, and so what is left of it after global average pooling. `pytest -s` shows the table.
"""

from dataclasses import dataclass
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.models.network.geometry import Conv, Execution, apply
from dubito.models.posteriors.inducing import Inducing, leading_directions
from dubito.models.posteriors.inducing_factors import LambdaLaw
from tests.examples import at_most

pytestmark = pytest.mark.draws
SEED = 0
IMAGES = Path(__file__).parents[3] / "shared" / "data" / "FashionMNIST" / "raw" / "t10k-images-idx3-ubyte"
CHANNELS, M, SIDE = 32, 32, 14
LAM, SIGMA = 0.1, (9 * CHANNELS) ** -0.5
K = at_most(400)  # samples of the network; each of the 32 output channels has noise of its own
STEP = 100
SHOWN = 4  # inputs that are measured; others find the directions


@pytest.fixture(scope="module")
def features() -> Tensor:
    """(n, 32, 14, 14): Fashion-MNIST through a 3×3 convolution to 32 channels, ReLU and 2×2 max-pooling."""
    if not IMAGES.exists():
        pytest.skip(f"no {IMAGES.name} under ../shared/data of the repository: the noise table needs real images")
    pixels = np.frombuffer(IMAGES.read_bytes(), np.uint8, count=200 * 784, offset=16).reshape(200, 1, 28, 28)
    rng = torch.Generator().manual_seed(SEED)
    stem = torch.randn(CHANNELS, 1, 3, 3, generator=rng) / 3
    x = torch.from_numpy((pixels / 255 - 0.2860) / 0.3530).float()
    return F.max_pool2d(F.relu(F.conv2d(x, stem, padding=1)), 2)


def patches(x: Tensor) -> Tensor:
    """(n, 32, 14, 14) -> (n, 196, 288)."""
    return F.unfold(x, 3, padding=1).mT


@dataclass(frozen=True)
class Row:
    """One line of the table: averages over output channels, locations and inputs."""

    location: float
    pooled: float
    neighbours: float
    inputs: float


def measure(noise: Tensor) -> Row:
    """(K, n, 32, 14, 14) zero-mean noise of the layer's output."""
    var = noise.square().mean((0, 2))  # (n, 14, 14)
    beside = (noise[..., 1:] * noise[..., :-1]).mean((0, 2)) / (var[..., 1:] * var[..., :-1]).sqrt()
    pairs = [(i, j) for i in range(noise.shape[1]) for j in range(i)]
    across = [(noise[:, i] * noise[:, j]).mean((0, 1)) / (var[i] * var[j]).sqrt() for i, j in pairs]
    pooled = noise.mean((-1, -2)).square().mean()
    return Row(float(var.mean()), float(pooled), float(beside.mean()), float(torch.stack(across).mean()))


@pytest.fixture(scope="module")
def table(features: Tensor) -> dict[str, Row]:
    rng = torch.Generator().manual_seed(SEED)
    Z_r, Z_c = torch.randn(M, CHANNELS, generator=rng), torch.randn(M, 9 * CHANNELS, generator=rng)
    layer = Conv(CHANNELS, CHANNELS, (3, 3), (1, 1), (1, 1), (1, 1), 1, bias=False)
    shown, calibration = features[:SHOWN], patches(features[SHOWN:]).flatten(0, 1)
    found = calibration[torch.randperm(len(calibration), generator=rng)[:4096]]

    # Z_cᵀ Ψ⁻¹ Z_c and its like by an explicit inverse, D being all jitter
    P_r, P_c = (
        Z.T @ torch.linalg.inv(Z @ Z.T + torch.eye(M) * 1e-4 * Z.square().sum(1).mean()) @ Z for Z in (Z_r, Z_c)
    )
    x = patches(shown)
    energy, inside = x.square().sum(-1), (x @ P_c * x).sum(-1)  # (n, 196)
    assert 1 - inside.sum() / energy.sum() > 0.8, "most patch energy should lie outside the span"

    def posterior(noise: LambdaLaw) -> Inducing:
        return Inducing(Z_r, Z_c, None, SIGMA, D=1e-5, lam=LAM, noise=noise)

    def draw(made: Inducing, execution: Execution) -> Tensor:
        f = made.factors().given(torch.zeros(1, M, M))  # zero: the noise alone
        rng = torch.Generator().manual_seed(SEED + 1)
        outputs = []
        for _ in range(0, K, STEP):
            operand = f.draw(torch.randn(STEP, f.normals, generator=rng), None)
            out = apply(layer, shown.repeat(STEP, 1, 1, 1), operand, STEP, execution)
            outputs.append(out.view(STEP, SHOWN, CHANNELS, SIDE, SIDE))
        return torch.cat(outputs)

    def fresh() -> Tensor:
        """The exact law of each location alone: λ²σ²(‖x‖² I − xᵀP_c x · P_r), drawn anew at every one."""
        p, vectors = torch.linalg.eigh(P_r)
        std = LAM * SIGMA * (energy[:, None] - inside[:, None] * p[:, None]).clamp(min=0).sqrt()  # (n, 32, 196)
        rng = torch.Generator().manual_seed(SEED + 2)
        z = torch.randn(K, *std.shape, generator=rng) * std
        noise: Tensor = vectors @ z
        return noise.view(K, SHOWN, CHANNELS, SIDE, SIDE)

    def dense(x: Tensor) -> float:
        """Mean over channels and inputs of the exact variance of W x."""
        shares = LAM**2 * SIGMA**2 * (x.square().sum(-1)[..., None] - (x @ P_c * x).sum(-1)[..., None] * P_r.diagonal())
        return float(shares.mean())

    rows = {"exact (way 2)": measure(draw(posterior("exact"), "loop")), "fresh noise per location": measure(fresh())}
    B = posterior("factored").factors().matheron.B_c
    for R in (0, 1, 4, 16):
        made = posterior("factored")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)  # the low-rank SVD starts at random
            made.directions = leading_directions(found, B, R).T if R else None
        rows[f"way 3, R = {R}"] = measure(draw(made, "factored"))

    print(f"\n| {'scheme':24} | at a location | after pooling | of neighbours | of two inputs |")
    unit = rows["exact (way 2)"].location / 7.58  # so that the first column reads as the table of the method does
    for name, row in rows.items():
        print(
            f"| {name:24} | {row.location / unit:13.2f} | {row.pooled / unit:13.4f} "
            f"| {row.neighbours:13.3f} | {row.inputs:13.3f} |"
        )
    rows["dense Gaussian"] = Row(dense(x), dense(x.mean(1)), nan, nan)  # pooling is linear: it pools the patches
    return rows


def test_leading_directions_carry_the_most_energy_outside_the_span(features: Tensor) -> None:
    """Against a full SVD in numpy of what a projection onto the complement of B leaves."""
    rng = torch.Generator().manual_seed(SEED)
    B = torch.linalg.qr(torch.randn(9 * CHANNELS, M, generator=rng))[0]
    x = patches(features[:20]).flatten(0, 1)
    left = x.double().numpy() @ (np.eye(9 * CHANNELS) - B.double().numpy() @ B.double().numpy().T)
    s = np.linalg.svd(left, compute_uv=False)
    for R in (1, 4, 16):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            found = leading_directions(x, B, R).double().numpy()
        assert found.shape == (9 * CHANNELS, R)
        np.testing.assert_allclose(found.T @ found, np.eye(R), atol=1e-5)
        np.testing.assert_allclose(B.T.double().numpy() @ found, 0, atol=1e-4)
        assert np.linalg.norm(left @ found) ** 2 > 0.999 * (s[:R] ** 2).sum()


WAY_3 = [f"way 3, R = {R}" for R in (0, 1, 4, 16)]


@pytest.mark.slow
def test_every_scheme_has_the_exact_variance_at_a_location(table: dict[str, Row]) -> None:
    """K·32 independent normals at least, for locations and inputs may be one: a standard error of √(2/(32 K))."""
    for name, row in table.items():
        assert abs(row.location / table["dense Gaussian"].location - 1) < 5 * (2 / (CHANNELS * K)) ** 0.5, name


@pytest.mark.slow
def test_way_2_has_the_exact_variance_after_pooling(table: dict[str, Row]) -> None:
    ratio = table["exact (way 2)"].pooled / table["dense Gaussian"].pooled
    assert abs(ratio - 1) < 5 * (2 / (CHANNELS * K)) ** 0.5


@pytest.mark.slow
def test_fresh_noise_averages_away(table: dict[str, Row]) -> None:
    fresh, exact = table["fresh noise per location"], table["exact (way 2)"]
    assert fresh.pooled < 0.05 * exact.pooled
    assert abs(fresh.neighbours) < 0.01
    assert abs(fresh.inputs) < 0.01


@pytest.mark.slow
def test_way_3_approaches_the_exact_law_as_directions_are_added(table: dict[str, Row]) -> None:
    exact, rows = table["exact (way 2)"], [table[name] for name in WAY_3]
    pooled = [row.pooled for row in rows]
    assert pooled[0] > 1.3 * exact.pooled
    assert pooled == sorted(pooled, reverse=True)
    assert abs(pooled[-1] / exact.pooled - 1) < 0.15
    for column in ("neighbours", "inputs"):
        gaps = [abs(getattr(row, column) - getattr(exact, column)) for row in rows]
        assert gaps == sorted(gaps, reverse=True), column
        assert gaps[0] > 0.15, column
        assert gaps[-1] < 0.1, column
    assert rows[0].neighbours > 0.9
