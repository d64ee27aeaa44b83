"""Tabular regression: from a CSV file to a served model whose answers are numbers with intervals.

The table is made here by a formula of which the truth is known (J. H. Friedman, Multivariate Adaptive Regression
Splines, Annals of Statistics 19, 1991): y = 10 sin(π a b) + 20 (c − ½)² + 10 d + 5 e + noise, with a to e uniform in
[0, 1]. The noise has a standard deviation of ½ where e is below ½, and of 2 elsewhere. Run it in an empty folder:

    python examples/table.py
"""

import argparse
import csv
import subprocess
import time

import httpx
import numpy as np
from numpy.typing import NDArray

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rows", type=int, default=1000)
parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the recipe, such as fit.epochs=50")
parser.add_argument("--port", type=int, default=8000)
options = parser.parse_args()


def truth(x: NDArray[np.float64]) -> NDArray[np.float64]:
    a, b, c, d, e = x.T
    return np.asarray(10 * np.sin(np.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e)


# 1. A table with a header; the last column is what to predict.
rng = np.random.default_rng(0)
x = rng.random((options.rows, 5))
y = truth(x) + np.where(x[:, 4] < 0.5, 0.5, 2.0) * rng.standard_normal(len(x))
with open("friedman.csv", "w", newline="") as file:
    csv.writer(file).writerows([["a", "b", "c", "d", "e", "y"], *np.column_stack([x, y]).tolist()])

# 2. Train: an ensemble whose networks also say how noisy y is, calibrated on rows that are held out.
changes = [word for change in ["task=regression", *options.set] for word in ("--set", change)]
train = ["dubito", "train", "csv:friedman.csv", "--target", "y", "--out", "table.safetensors"]
subprocess.run([*train, *changes], check=True)

# 3. Serve it, and ask: 500 new rows, and one far outside of the table.
new = rng.random((500, 5))
server = subprocess.Popen(
    ["dubito", "serve", "table.safetensors", "--port", str(options.port), "--set", "log_level=warning"]
)
try:
    with httpx.Client(base_url=f"http://localhost:{options.port}", timeout=60) as http:
        while server.poll() is None:
            try:
                if http.get("/readyz").is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        reply = http.post("/v1/models/table/predict", json={"inputs": new.tolist(), "seed": 0}).json()
        far = http.post("/v1/models/table/predict", json={"inputs": [[9, 9, 9, 9, 9]], "seed": 0}).json()
finally:
    server.terminate()
    server.wait()
rows, (outlier,) = reply["predictions"], far["predictions"]
error = np.sqrt(np.mean((np.array([row["mean"][0] for row in rows]) - truth(new)) ** 2))
sigma = np.sqrt([row["aleatoric_variance"][0] for row in rows])
print(f"served: root mean square error {error:.2f} against the formula, whose values spread by {truth(new).std():.2f}")
print(f"noise: {sigma[new[:, 4] < 0.5].mean():.2f} where it is 0.5, {sigma[new[:, 4] >= 0.5].mean():.2f} where it is 2")
print(f"the first new row, in truth {truth(new)[0]:.2f}: {rows[0]}")
print(f"far outside: flagged {outlier['ood']['flag']}, interval {outlier['interval']}")
