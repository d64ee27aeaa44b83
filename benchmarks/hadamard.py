"""The Walsh–Hadamard transform beside the product with H and beside a copy of the data, by the number of columns D.

    python -m benchmarks.hadamard

512 rows, as in the paper (figure 8; break-even on its CPU between 512 and 1024 columns), and on a GPU 65,536 too, which
fill it. `product` is x H with H kept; `steps` is the fast transform without a GPU's kernel, `kernel` the one with it,
and `chosen` what `transform` does. Limits on a GPU, at 65,536 rows and D ≥ 512: faster than the product, and at most
1.5 times the copy.
"""

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks._measure import machine, take_turns
from dubito.models.numerics.hadamard import BY_PRODUCT, LARGEST_KERNEL, by_steps, matrix, transform

SIDES = [2**n for n in range(6, 14)]
ROWS = {"cpu": [512], "cuda": [512, 65_536]}


def rivals(x: Tensor) -> dict[str, Callable[[], object]]:
    H = matrix(x.shape[-1], x.dtype, x.device)
    functions: dict[str, Callable[[], object]] = {
        "copy": x.clone,
        "product": lambda: x @ H,
        "steps": lambda: by_steps(x),
        "chosen": lambda: transform(x),
    }
    if x.is_cuda and x.shape[-1] <= LARGEST_KERNEL:
        from dubito.models.numerics.hadamard_kernel import transform_on_gpu

        functions["kernel"] = lambda: transform_on_gpu(x)
    return functions


def repeated(run: Callable[[], object], times: int, cuda: bool) -> Callable[[], object]:
    """Many calls in a row; on a GPU captured as a CUDA graph, like a training step: the host is not measured."""
    if not cuda:

        def many() -> None:
            for _ in range(times):
                run()

        return many
    run()  # compiles, and makes what libraries need
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()

    def there() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--largest", type=int, default=SIDES[-1], help="columns")
    parser.add_argument("--devices", nargs="+", choices=list(ROWS), help="without it, all that are here")
    args = parser.parse_args()
    console = Console()
    with torch.inference_mode():
        for device in args.devices or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            for dtype in [torch.float32, *([torch.bfloat16] if device == "cuda" else [])]:
                for rows in ROWS[device]:
                    console.print(_table(device, dtype, rows, args))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(machine(), f"{args.rounds} rounds", gpu, sep=", ")


def _table(device: str, dtype: torch.dtype, rows: int, args: argparse.Namespace) -> Table:
    by_product = f"up to D = {BY_PRODUCT[device]} the product is chosen"
    table = Table(title=f"{device}, {rows:,} rows, {str(dtype).removeprefix('torch.')}: median µs; {by_product}")
    names = ["copy", "product", "steps", "chosen", *(["kernel"] if device == "cuda" else [])]
    for column in ("D", *names, "product / chosen", "chosen / copy"):
        table.add_column(column, justify="right")
    for D in [D for D in SIDES if args.largest >= D]:
        x = torch.randn(rows, D, device=device).to(dtype)
        times = max(1, min(100, (1 << 22 if device == "cpu" else 1 << 28) // (rows * D)))
        seconds_by = take_turns({n: repeated(r, times, x.is_cuda) for n, r in rivals(x).items()}, args.rounds)
        micro = {name: 1e6 * seconds / times for name, seconds in seconds_by.items()}
        cells = [f"{micro[name]:,.1f}" if name in micro else "" for name in names]
        ratios = (micro["product"] / micro["chosen"], micro["chosen"] / micro["copy"])
        table.add_row(str(D), *cells, *(f"{ratio:.2f}" for ratio in ratios))
    return table


if __name__ == "__main__":
    main()
