"""The reference of `benchmarks.gap`: the posterior of the same network by Hamiltonian Monte Carlo, in numpy.

    python benchmarks/_gap_hmc.py benchmarks/gap_hmc.json 0 1 2

Under a minute for each seed of the data. It shares no code with dubito. Weights are whitened, so that their prior is
N(0, I); all chains have one step size, found by dual averaging for an acceptance of 0.8; the number of leapfrog steps
is drawn for each proposal. The file has the data and, on a grid, mean and standard deviation of the network's output
without noise, the standard error of the latter over chains, and R̂ of the output; in units of the normalised targets.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NOISE = 3.0  # of y = x³ + noise, before targets are normalised
SIZES = ((2, 50), (51, 50), (51, 1))  # of the weights, the last row of each a bias
CHAINS, WARMUP, DRAWS = 4, 250, 400
STEPS = (40, 120)  # of a proposal, at least and at most


def data(seed: int) -> tuple[Array, Array, float]:
    """40 inputs on both sides of a gap, normalised, their targets, and the standard deviation of the noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(2, 4, 40) * rng.choice([-1, 1], 40)
    y = x**3 + NOISE * rng.standard_normal(40)
    return (x - x.mean()) / x.std(), (y - y.mean()) / y.std(), NOISE / float(y.std())


def with_ones(x: Array) -> Array:
    return np.concatenate([x, np.ones((*x.shape[:-1], 1))], -1)


def forward(weights: list[Array], x: Array) -> tuple[Array, list[Array]]:
    """Outputs (C, n) of C networks, and what each layer gets; `weights` are white, with prior N(0, 1)."""
    given, f = [], np.broadcast_to(x[:, None], (len(weights[0]), len(x), 1))
    for i, W in enumerate(weights):
        given.append(with_ones(np.maximum(f, 0) if i else f))
        f = given[-1] @ W / math.sqrt(W.shape[1])
    return f[..., 0], given


def energy(weights: list[Array], x: Array, y: Array, noise: float) -> tuple[Array, list[Array]]:
    """Negative log posterior (C,) and its gradients."""
    f, given = forward(weights, x)
    error = (f - y) / noise
    value = (error**2).sum(1) / 2 + sum((W**2).sum((1, 2)) for W in weights) / 2
    slope, gradients = (error / noise)[..., None], []
    for W, got in zip(reversed(weights), reversed(given), strict=True):
        scale = 1 / math.sqrt(W.shape[1])
        gradients.append(W + scale * got.transpose(0, 2, 1) @ slope)
        slope = scale * slope @ W[:, :-1].transpose(0, 2, 1) * (got[..., :-1] > 0)
    return value, gradients[::-1]


def chains(seed: int, grid: Array) -> tuple[Array, float]:
    """Outputs on the grid, (draws, C, G), and the mean acceptance."""
    x, y, noise = data(seed)
    rng = np.random.default_rng(1000 + seed)
    weights = [rng.standard_normal((CHAINS, *size)) for size in SIZES]
    value, gradients = energy(weights, x, y, noise)
    log_step, mean_log, total = math.log(1e-3), 0.0, 0.0  # dual averaging [Hoffman and Gelman, 2014, algorithm 5]
    kept, accepted = [], []
    for i in range(WARMUP + DRAWS):
        step = math.exp(log_step if i < WARMUP else mean_log)
        momenta = [rng.standard_normal(W.shape) for W in weights]
        start = value + sum((p**2).sum((1, 2)) for p in momenta) / 2
        W_new, g = [W.copy() for W in weights], gradients
        for _ in range(int(rng.integers(*STEPS))):
            momenta = [p - step / 2 * d for p, d in zip(momenta, g, strict=True)]
            W_new = [W + step * p for W, p in zip(W_new, momenta, strict=True)]
            after, g = energy(W_new, x, y, noise)
            momenta = [p - step / 2 * d for p, d in zip(momenta, g, strict=True)]
        end = after + sum((p**2).sum((1, 2)) for p in momenta) / 2
        chance = np.nan_to_num(np.exp(np.minimum(0.0, start - end)))
        taken = rng.random(CHAINS) < chance
        weights, gradients = (
            [np.where(taken[:, None, None], new, old) for new, old in zip(*pair, strict=True)]
            for pair in ((W_new, weights), (g, gradients))
        )
        value = np.where(taken, after, value)
        if i < WARMUP:
            total += 0.8 - float(chance.mean())
            log_step = math.log(1e-2) - math.sqrt(i + 1) / 0.05 * total / (i + 11)
            share = (i + 1) ** -0.75
            mean_log = share * log_step + (1 - share) * mean_log
        else:
            accepted.append(float(chance.mean()))
            kept.append(forward(weights, grid)[0])
    print(f"seed {seed}: step {math.exp(mean_log):.4f}, acceptance {np.mean(accepted):.2f}", flush=True)
    return np.stack(kept), float(np.mean(accepted))


def reference(seed: int) -> dict[str, Any]:
    x, y, noise = data(seed)
    grid = np.linspace(-2, 2, 81)
    f, acceptance = chains(seed, grid)
    halves = f.reshape(2, DRAWS // 2, CHAINS, -1).transpose(1, 0, 2, 3).reshape(DRAWS // 2, 2 * CHAINS, -1)
    within, between = halves.var(0, ddof=1).mean(0), halves.mean(0).var(0, ddof=1)
    r_hat = np.sqrt((within * (1 - 2 / DRAWS) + between) / within)
    return {
        "x": x.tolist(),
        "y": y.tolist(),
        "noise": noise,
        "grid": grid.round(6).tolist(),
        "mean": f.mean((0, 1)).round(5).tolist(),
        "std": f.reshape(-1, len(grid)).std(0).round(5).tolist(),
        "std_error": (f.std(0).std(0, ddof=1) / CHAINS**0.5).round(5).tolist(),
        "r_hat": r_hat.round(4).tolist(),
        "acceptance": acceptance,
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for seed in sys.argv[2:]:
        known[seed] = reference(int(seed))
        out.write_text(json.dumps(known) + "\n")
