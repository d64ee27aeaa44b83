"""Peak memory of K = 20 draws of a CIFAR ResNet-50 on a CPU, against one deterministic pass of the same batch.

Each side runs in a process of its own; what counts is the peak resident memory of the prediction above what the process
held before it, network, factors and inputs included in the latter.
"""

import argparse
import subprocess
import sys

from rich.console import Console
from rich.table import Table

CHILD = """
import resource, sys, threading, time
import torch
from dubito.models import bayesianize, build, predict
kind, K, B, noise, name = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
torch.set_num_threads(2)
torch.manual_seed(0)
net = build(name).eval()
x = torch.randn(B, 3, 32, 32)
if kind == "ours":
    network = bayesianize(net, "ffg-u", inducing=64, start="prior", noise=noise).eval()
    del net
    factors = network.factors()
    run = lambda: predict(network, factors, x, K, 0)
else:
    def run():
        with torch.inference_mode():
            net(x)

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()

if kind == "ours":
    predict(network, factors, x[:1], 1, 0)  # libraries loaded, threads started
else:
    with torch.inference_mode():
        net(x[:1])
before, peak, done = resident(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, resident())
        time.sleep(0.0005)
watcher = threading.Thread(target=watch)
watcher.start()
run()
done = True
watcher.join()
print(peak - before)
"""


def peak(kind: str, K: int, B: int, noise: str = "auto", name: str = "resnet50-cifar") -> int:
    """Bytes above the process's own."""
    command = [sys.executable, "-c", CHILD, kind, str(K), str(B), noise, name]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20, help="K")
    parser.add_argument("--batch", type=int, default=32, help="B")
    args = parser.parse_args()
    from benchmarks._measure import machine

    plain = peak("plain", 1, args.batch)
    table = Table(title=f"ResNet-50 (CIFAR), batch {args.batch}: peak memory above the process's own")
    for column in ("", "MB", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("one deterministic pass", f"{plain / 1e6:.0f}", "1.00")
    for noise, name in (("auto", "noise as chosen per layer"), ("exact", "exact noise, W formed layer by layer")):
        ours = peak("ours", args.samples, args.batch, noise)
        table.add_row(f"K = {args.samples}, {name}", f"{ours / 1e6:.0f}", f"{ours / plain:.2f}")
    console = Console()
    console.print(table)
    console.print(machine())


if __name__ == "__main__":
    main()
