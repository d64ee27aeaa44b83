"""K posterior draws on a GPU: our plans beside an ensemble of K networks, and the paper's rule looped over draws.

    python -m benchmarks.gpu_predict [--architectures …] [--inducing 64] [--samples 20] [--batches 1 8 64 500]
    python -m benchmarks.gpu_predict --architectures torchvision/convnext_tiny torchvision/vit_b_16 --size 224 \\
        --no-rule --inducing 64 --samples 20 --batches 1 8 32

bfloat16, channels last, logits of K draws for B inputs, drawing included, the same random weights' sizes on all
sides; the inputs lie on the device, ours on the host, from where each pass fetches them. The ensemble is given the best
of three: eager, captured as a CUDA graph, and compiled and captured; its BatchNorm is folded into its convolutions.
Ours is what `dubito serve` runs: plans measured by the engine, captured. Answers are compared in the same run: ours
with float32 without plans from the same normals, the ensemble's two graphs with each other, the rule's mean logits with
those of our exact law, in standard errors. Medians of rounds in which all take turns, the rule's for one draw, times K;
peak memory is that of a path's own tensors, beside the weights, ours and the ensemble's; resident memory is the
allocator's difference before and after a model is put on the device.
"""

import argparse
import copy
import gc
import json
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.fusion import fuse_conv_bn_eval

from benchmarks._measure import machine
from benchmarks._rule import draw_by_rule
from dubito.models import bayesianize, build, load, save
from dubito.models.conversion.directions import set_directions
from dubito.models.manifest import Card, Input
from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors
from dubito.models.network.plan import cheapest
from dubito.models.numerics.normals import Normals
from dubito.models.posteriors.inducing import Inducing
from dubito.models.posteriors.matheron import regularise
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import no_graph
from dubito.models.predictions.resident import reside
from dubito.service.engine.budget import peak_of
from dubito.service.engine.engine import Engine
from dubito.service.engine.graphs import PassGraph, for_gpu
from dubito.service.engine.plans import PlanCache

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
USUAL = 20  # samples that plans are measured for
DRAWS = 48  # of the rule, where it is compared
FAR = 5.0  # standard errors, which of 40 numbers none should reach in ten thousand runs
COLUMNS = (
    "network",
    "M",
    "K",
    "B",
    "one pass",
    "ensemble",
    "rule",
    "λ = 0",
    "ratio",
    "λ > 0",
    "ratio",
    "peak MB",
    "error",
)

Shape = tuple[int, int, int]  # of a picture


def plain(architecture: str) -> nn.Module:
    """A plain network whose BatchNorms are not the identity, as after some training."""
    torch.manual_seed(0)
    net = build(architecture).eval()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.0)
            nn.init.normal_(m.running_mean, std=0.1)  # type: ignore[arg-type]
    return net


def folded(net: nn.Module) -> nn.Module:
    """The network with each BatchNorm folded into the convolution before it."""
    traced = torch.fx.symbolic_trace(copy.deepcopy(net))
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        before = node.args[0] if node.op == "call_module" and node.args else None
        norm = modules.get(str(node.target))
        if isinstance(norm, nn.BatchNorm2d) and isinstance(before, torch.fx.Node):
            name = str(before.target)
            traced.set_submodule(name, fuse_conv_bn_eval(modules[name], norm))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced.to(DEVICE, HALF).to(memory_format=torch.channels_last)


def captured(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The function as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def go() -> Tensor:
        graph.replay()
        return out

    return go


class Ensemble:
    """K deterministic networks with one compiled forward pass."""

    def __init__(self, net: nn.Module, most: int) -> None:
        self.net = net
        first = {name: p.detach() for name, p in net.named_parameters()}
        others = ({n: p + 0.01 * torch.randn_like(p) for n, p in first.items()} for _ in range(most - 1))
        self.members = [first, *others]
        self.compiled = torch.compile(self._one, dynamic=False)

    def _one(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.net, parameters, (x,))  # type: ignore[no-any-return]

    def loop(self, x: Tensor, K: int, compiled: bool) -> Callable[[], Tensor]:
        one = self.compiled if compiled else self._one
        return lambda: torch.stack([one(p, x) for p in self.members[:K]])

    def ways(self, x: Tensor, K: int) -> dict[str, Callable[[], Tensor]]:
        eager, graph, compiled = (self.loop(x, K, c) for c in (False, False, True))
        graph, compiled = captured(graph), captured(compiled)
        torch.testing.assert_close(graph().float(), compiled().float(), rtol=0.1, atol=0.1)
        return {"ensemble, eager": eager, "ensemble, graph": graph, "ensemble, compiled": compiled}

    def one(self, x: Tensor) -> Callable[[], Tensor]:
        return captured(lambda: self.compiled(self.members[0], x))


def network_of(architecture: str, M: int, noisy: bool, shape: Shape) -> BayesianNetwork:
    network = bayesianize(plain(architecture), "ffg-u", inducing=M, lam_max=0.1 if noisy else 0.0)
    for layer in network.layers.values():
        if noisy and isinstance(layer.posterior, Inducing) and layer.posterior.lam is not None:
            layer.posterior.lam.raw.data.zero_()  # halfway to its cap
    if noisy:
        set_directions(network, torch.randn(4, *shape), 4)
    return network.eval().to(DEVICE)


def model_of(network: BayesianNetwork, shape: Shape) -> Model:
    """The model as a server loads it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        save(network, file, card=Card(input=Input(shape=shape)))
        return reside(load(file), DEVICE, HALF)


def shape_of(model: Model) -> tuple[int, ...]:
    assert model.card.input is not None
    return model.card.input.shape


def resident_bytes(network: BayesianNetwork, shape: Shape) -> int:
    """Bytes that the device's allocator gives out for a served model."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = for_gpu(model_of(network, shape))
    gc.collect()
    after = torch.cuda.memory_allocated()
    del model
    return after - before


def engine_of(model: Model, B: int, samples: Sequence[int], memory: PlanCache, seconds: float) -> Engine:
    """An engine with plans for the usual K, as in a server, and graphs for every K."""
    engine = Engine(model, [B], memory, seconds)
    engine.warm(USUAL if USUAL in samples else samples[0], nullcontext())
    job = engine._job(torch.zeros(B, *shape_of(model)), 0, None)
    assert engine.graphs is not None
    for _, k in (part for K in samples for part in parts_of(engine, B, K)):
        engine.graphs.capture(job, k)
    return engine


def parts_of(engine: Engine, B: int, K: int) -> list[tuple[int, int]]:
    """The passes of a request: first draw, and number of draws."""
    once = engine._job(torch.zeros(B, *shape_of(engine.model)), 0, None, K).samples_at_once(B)
    return [(start, min(once, K - start)) for start in range(0, K, once)]


def graph_of(engine: Engine, x: Tensor, k: int) -> PassGraph:
    """The graph of k draws, with these inputs in its buffer."""
    assert engine.graphs is not None
    graph = engine.graphs.at(len(x), k)
    assert graph is not None
    graph.put([x.float().cpu().numpy()])
    return graph


def ours(engine: Engine, x: Tensor, K: int) -> Callable[[], Tensor]:
    """The graphs that answer a request, with a new seed each time; they copy the inputs from the host."""
    parts = [(graph_of(engine, x, k), start) for start, k in parts_of(engine, len(x), K)]

    def run() -> Tensor:
        seed = secrets.randbits(48)
        outputs = [graph.go(seed, start).clone() for graph, start in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    return run


def peak_of_ours(engine: Engine, x: Tensor, K: int) -> float:
    """Peak MB of the same passes without graphs, which the allocator sees."""
    job = replace(engine._job(x, 0, None, K), graph_for=no_graph)
    start, k = parts_of(engine, len(x), K)[0]
    return peak_of(lambda: job.outputs(job.draws(start, k, len(x))), DEVICE) / 1e6


def check(engine: Engine, network: BayesianNetwork, factors: NetworkFactors, x: Tensor, K: int) -> float:
    """Relative difference between ours and float32 without plans, with the same normals."""
    some, k = x[:8], min(K, 4)
    noise = Normals(7, DEVICE).rows(k, factors.normals)
    with torch.inference_mode():
        expected = network.run(some.float(), factors, Draws(k, noise, 7), cheapest(factors))
        _, first = parts_of(engine, len(x), K)[0]
        outputs = graph_of(engine, x, first).go(7, 0)[:k, : len(some)].float()
    return float((outputs - expected[: len(outputs)]).norm() / expected.norm())


def by_rule(network: BayesianNetwork, net: nn.Module, x: Tensor, K: int) -> Callable[[], Tensor]:
    """The paper's rule: draws W of every layer for each draw, then runs a plain pass."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    layers = {name: layer.posterior for name, layer in network.layers.items()}
    shapes = {name: p.shape for name, p in net.named_parameters()}

    def run() -> Tensor:
        out = []
        for _ in range(K):
            weights: dict[str, Tensor] = {}
            for name, q in layers.items():
                assert isinstance(q, Inducing)
                assert q.law is not None
                frozen = q.law.freeze()
                V = frozen.draw(torch.randn(1, frozen.normals, device=DEVICE, generator=rng), None)
                Z_r, Z_c = q.Z_r(), q.Z_c()
                D_r, D_c = regularise(Z_r, q.D_r()), regularise(Z_c, q.D_c())
                W = draw_by_rule(Z_r, D_r, Z_c, D_c, V, q.scale(), q.sigma, rng)[0].to(x.dtype)
                if f"{name}.bias" in shapes:
                    weights[f"{name}.bias"] = W[:, -1].contiguous()
                    W = W[:, :-1]
                weights[f"{name}.weight"] = W.reshape(shapes[f"{name}.weight"])
            out.append(functional_call(net, weights, (x,)))
        return torch.stack(out)

    return run


def check_rule(network: BayesianNetwork, net: nn.Module, shape: Shape) -> float:
    """Largest difference between mean logits of the rule and of our exact law in float32, in standard errors."""
    exact = copy.deepcopy(network)
    for layer in exact.layers.values():
        assert isinstance(layer.posterior, Inducing)
        layer.posterior.noise = "exact"
    x = torch.randn(4, *shape, device=DEVICE)
    factors = exact.factors()
    with torch.inference_mode():
        theirs = by_rule(network, net, x, DRAWS)().double()
        parts = []
        for start in range(0, DRAWS, 4):
            rng = torch.Generator(DEVICE).manual_seed(start)
            noise = torch.randn(4, factors.normals, device=DEVICE, generator=rng)
            parts.append(exact.run(x, factors, Draws(4, noise, 0), cheapest(factors)).double())
    mine = torch.cat(parts)
    error = ((theirs.var(0) + mine.var(0)) / DRAWS).sqrt()
    far = float(((theirs.mean(0) - mine.mean(0)).abs() / error).max())
    if far > FAR:
        raise SystemExit(f"the rule's mean logits are {far:.1f} standard errors from ours; expected less than {FAR}.")
    return far


def median_ms(runs: dict[str, Callable[[], Tensor]], rounds: int, budget: float = 0.25) -> dict[str, float]:
    """Median milliseconds by the device's clock, all in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            if turn > 2 and statistics.median(times[name]) * turn > 1000 * budget:
                continue
            torch.cuda.synchronize()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            ended.synchronize()
            if turn:
                times[name].append(began.elapsed_time(ended))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", default=["resnet18-cifar", "resnet50-cifar"])
    parser.add_argument("--size", type=int, default=32, help="of the pictures, which have three channels")
    parser.add_argument("--inducing", type=int, nargs="+", default=[32, 64], help="M")
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 20, 64], help="K")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 500], help="B")
    parser.add_argument("--noise", nargs="+", choices=["0", "+"], default=["0", "+"], help="λ = 0, λ > 0")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plan-seconds", type=float, default=120.0)
    parser.add_argument("--no-rule", action="store_true", help="leave the paper's rule out")
    parser.add_argument("--json", type=Path, help="append each cell as a line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; this benchmark measures one.")
    torch._dynamo.config.recompile_limit = 64  # each network and batch is a program of its own; and none is left out:
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for dtype in (torch.float32, HALF):  # the library takes its workspace at the first product: no model's own memory
        torch.ones(8, 8, device=DEVICE, dtype=dtype) @ torch.ones(8, 8, device=DEVICE, dtype=dtype)
    memory = PlanCache(None, DEVICE)
    shape = (3, args.size, args.size)
    table = Table(title="median ms of K samples of B inputs, bfloat16, drawing included")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for architecture in args.architectures:
        net = plain(architecture).to(DEVICE)
        ensemble = Ensemble(folded(net), max(args.samples))
        half = copy.deepcopy(net).to(HALF).to(memory_format=torch.channels_last)
        plain_bytes = sum(p.numel() * HALF.itemsize for p in net.parameters())
        networks, models, wide, shares = {}, {}, {}, {}
        for case in ((M, kind) for M in args.inducing for kind in args.noise):
            networks[case] = network_of(architecture, case[0], case[1] == "+", shape)
            shares[case] = resident_bytes(networks[case], shape) / plain_bytes
            models[case], wide[case] = model_of(networks[case], shape), networks[case].factors()
            text = (
                f"{architecture}, M = {case[0]}, λ {case[1]}: resident {shares[case]:.3f} of the plain network's bytes"
            )
            if not args.no_rule:
                text += f"; the rule within {check_rule(networks[case], net, shape):.1f} standard errors of ours"
            print(text, flush=True)
        for B in args.batches:
            x = torch.randn(B, *shape, device=DEVICE, dtype=HALF).contiguous(memory_format=torch.channels_last)
            with torch.inference_mode():
                engines = {case: engine_of(m, B, args.samples, memory, args.plan_seconds) for case, m in models.items()}
                errors = {c: check(e, networks[c], wide[c], x, args.samples[0]) for c, e in engines.items()}
            for K in args.samples:
                with torch.inference_mode():
                    runs = {"one pass": ensemble.one(x), **ensemble.ways(x, K)}
                    same = list(runs)
                    runs |= {ours_of(case): ours(engine, x, K) for case, engine in engines.items()}
                    times = median_ms(runs, args.rounds)
                    peaks = {ours_of(case): peak_of_ours(engine, x, K) for case, engine in engines.items()}
                    peaks["ensemble"] = peak_of(ensemble.loop(x, K, compiled=True), DEVICE) / 1e6
                    for M in () if args.no_rule else args.inducing:
                        rule = by_rule(networks[M, args.noise[-1]], half, x, 1)
                        times[f"rule, {M}"] = K * median_ms({"rule": rule}, 2)["rule"]
                        peaks[f"rule, {M}"] = peak_of(rule, DEVICE) / 1e6
                for M in args.inducing:
                    cell = {"network": architecture, "M": M, "K": K, "B": B}
                    cell["ms"] = {name: times[name] for name in same} | _own(times, M, args.noise)
                    cell["best ensemble"] = min(times[name] for name in same if name.startswith("ensemble"))
                    cell["peak MB"] = {"ensemble": peaks["ensemble"]} | _own(peaks, M, args.noise)
                    cell["errors"] = [errors[M, kind] for kind in args.noise]
                    cell["plans"] = {kind: dict(engines[M, kind].plans.at(B, USUAL)) for kind in args.noise}
                    cell["resident"] = {kind: shares[M, kind] for kind in args.noise}
                    if args.json is not None:
                        with args.json.open("a") as file:
                            file.write(json.dumps(cell) + "\n")
                    row = _row(cell)
                    table.add_row(*row)
                    print(*row, flush=True)
                del runs
            del engines
            torch.cuda.empty_cache()
    Console(width=180).print(table)
    print(machine(), torch.cuda.get_device_name(), sep=", ")


def ours_of(case: tuple[int, str]) -> str:
    return f"ours, {case[1]}, {case[0]}"


def _own(values: dict[str, float], M: int, kinds: Sequence[str]) -> dict[str, float]:
    """The figures of one M, by names without M."""
    mine = {f"ours, {kind}": values[ours_of((M, kind))] for kind in kinds}
    return mine | ({"rule": values[f"rule, {M}"]} if f"rule, {M}" in values else {})


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    ms, best, peaks = cell["ms"], cell["best ensemble"], cell["peak MB"]
    pairs = [text for kind in ("0", "+") for text in _pair(ms.get(f"ours, {kind}"), best)]
    mine = max(value for name, value in peaks.items() if name.startswith("ours"))
    return (
        *(str(cell[name]) for name in ("network", "M", "K", "B")),
        f"{ms['one pass']:.3f}",
        f"{best:.2f}",
        f"{ms['rule']:.0f}" if "rule" in ms else "",
        *pairs,
        f"{mine:.0f}, {peaks['ensemble']:.0f}",
        f"{max(cell['errors']):.3f}",
    )


def _pair(ms: float | None, best: float) -> tuple[str, str]:
    return ("", "") if ms is None else (f"{ms:.3f}", f"{ms / best:.3f}")


if __name__ == "__main__":
    main()
