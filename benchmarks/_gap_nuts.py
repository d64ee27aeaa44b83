"""The reference of `benchmarks.gap`: the posterior of the same network by NUTS, for three seeds of the data.

    pip install numpyro && python benchmarks/_gap_nuts.py benchmarks/gap_nuts.json 0 1 2

Some minutes on two cores. Neither numpyro nor jax is a dependency of dubito: the file that this writes is kept. It has
the data and, on a grid, the mean and standard deviation of the network's output without noise, and of each the Monte
Carlo error by the spread over chains; all in units of the normalised targets.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

NOISE = 3.0  # of y = x³ + noise, before targets are normalised
WIDTH = 50  # of both hidden layers
CHAINS, WARMUP, DRAWS, DEPTH = 4, 500, 500, 9


def data(seed: int) -> tuple[Any, Any, float]:
    """40 inputs on both sides of a gap, normalised, their targets, and the standard deviation of the noise."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(2, 4, 40) * rng.choice([-1, 1], 40)
    y = x**3 + NOISE * rng.standard_normal(40)
    return (x - x.mean()) / x.std(), (y - y.mean()) / y.std(), NOISE / float(y.std())


def reference(seed: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro.distributions import Normal
    from numpyro.infer import MCMC, NUTS

    x, y, noise = data(seed)
    grid = np.linspace(-2, 2, 81)

    def network(weights: list[Any], inputs: Any) -> Any:
        """Each layer with a bias as the last row of its weights."""
        for i, W in enumerate(weights):
            inputs = jnp.concatenate([jnp.maximum(inputs, 0) if i else inputs, jnp.ones((len(inputs), 1))], 1) @ W
        return inputs[:, 0]

    def model(x: Any, y: Any) -> None:
        weights = []
        for i, (d_in, d_out) in enumerate(((2, WIDTH), (WIDTH + 1, WIDTH), (WIDTH + 1, 1))):
            scale = jnp.full((d_in, d_out), d_in**-0.5)
            weights.append(numpyro.sample(f"W_{i}", Normal(0.0, scale).to_event(2)))
        numpyro.sample("y", Normal(network(weights, x), noise).to_event(1), obs=y)

    sampler = NUTS(model, max_tree_depth=DEPTH)
    counts = {"num_warmup": WARMUP, "num_samples": DRAWS, "num_chains": CHAINS}
    chains = MCMC(sampler, **counts, chain_method="vectorized", progress_bar=False)
    chains.run(jax.random.PRNGKey(seed), x[:, None], y, extra_fields=("diverging", "num_steps"))
    drawn = chains.get_samples(group_by_chain=True)
    flat = [drawn[f"W_{i}"].reshape(CHAINS * DRAWS, *drawn[f"W_{i}"].shape[2:]) for i in range(3)]
    f = jax.lax.map(lambda W: network(list(W), grid[:, None]), tuple(flat))  # (draws, grid)
    f = np.asarray(f, dtype=np.float64).reshape(CHAINS, DRAWS, -1)
    std = f.reshape(-1, len(grid)).std(0)
    extra = chains.get_extra_fields()
    print(seed, "divergences", int(extra["diverging"].sum()), "leapfrog steps", float(extra["num_steps"].mean()))
    return {
        "x": x.tolist(),
        "y": y.tolist(),
        "noise": noise,
        "grid": grid.tolist(),
        "mean": f.mean((0, 1)).round(5).tolist(),
        "std": std.round(5).tolist(),
        "std_error": (f.std(1).std(0, ddof=1) / CHAINS**0.5).round(5).tolist(),
        "divergences": int(extra["diverging"].sum()),
    }


if __name__ == "__main__":
    out = Path(sys.argv[1])
    known: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for seed in sys.argv[2:]:
        known[seed] = reference(int(seed))
        out.write_text(json.dumps(known) + "\n")
