"""The same promises on a GPU; skipped, aloud, where there is none."""

import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from dubito.models import bayesianize, build, predict
from dubito.models.network.geometry import Execution
from dubito.models.network.linearised import LinearisedFactors, Subnetwork, by_jvp
from dubito.models.network.network import BayesianNetwork
from dubito.models.numerics.hadamard import by_steps, transform
from dubito.models.numerics.normals import Normals
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.prediction import predict_closed
from dubito.models.predictions.uncertainty import Classified

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: GPU predictions are not tested"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),  # a backward pass is the first to do so
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # which torch 2.11 uses in its own jvp
]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-u", "ffg-w", "ensemble-w", "mc-dropout", "whvi"])
def test_the_mean_is_the_cpus(method: str) -> None:
    network = bayesianize(small(), method, inducing=8, members=3)
    x = torch.randn(6, 3, 16, 16)
    here = predict(network, network.factors(), x, 0, keep_outputs=True).outputs
    network = network.cuda()
    there = predict(network, network.factors(), x, 0, keep_outputs=True).outputs
    assert here is not None
    assert there is not None
    torch.testing.assert_close(there.cpu(), here, rtol=1e-2, atol=1e-2)  # TF32 may be on in convolutions


@pytest.mark.parametrize("noise", ["exact", "factored"])
def test_a_seed_fixes_the_draws_whatever_the_plan_and_the_cut(noise: str) -> None:
    network = bayesianize(small(), "ffg-u", inducing=8, noise=noise).cuda()
    factors = network.factors()
    x = torch.randn(6, 3, 16, 16)
    first = predict(network, factors, x, 8, 3, keep_outputs=True).outputs
    assert first is not None
    assert torch.equal(first, predict(network, factors, x, 8, 3, keep_outputs=True).outputs)  # type: ignore[arg-type]
    executions: tuple[Execution, ...] = ("loop", "batch", "unfold", "factored")
    for execution in executions:
        for max_rows in (1, 5, 1000):
            plan: dict[str, Execution] = dict.fromkeys(network.layers, execution)
            other = predict(network, factors, x, 8, 3, plan=plan, max_rows=max_rows, keep_outputs=True).outputs
            assert other is not None
            torch.testing.assert_close(other, first, rtol=2e-2, atol=2e-2)


def test_draws_have_the_cpus_law() -> None:
    """Mean probabilities over many draws, within five standard errors."""
    network = bayesianize(small(), "ffg-u", inducing=8, lam_max=1.0)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith((".lam.raw", ".spread.raw")):
                p.fill_(1.0)
    x, K = torch.randn(4, 3, 16, 16), 4096
    here = predict(network, network.factors(), x, K, 0, keep_outputs=True).outputs
    network = network.cuda()
    there = predict(network, network.factors(), x, K, 0, keep_outputs=True).outputs
    assert here is not None
    assert there is not None
    ours, theirs = here.softmax(-1), there.softmax(-1).cpu()
    error = ((ours.var(0) + theirs.var(0)) / K).sqrt()
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 5 * error + 1e-4).all()


def test_bfloat16_stays_close() -> None:
    network = bayesianize(small(), "ffg-u", inducing=8).cuda()
    factors = network.factors()
    x = torch.randn(6, 3, 16, 16)
    full = predict(network, factors, x, 16, 0).summary
    half = predict(network.to(torch.bfloat16), factors, x, 16, 0).summary
    assert isinstance(full, Classified)
    assert isinstance(half, Classified)
    assert (full.probabilities - half.probabilities).abs().max() < 0.02


def test_training_steps_run() -> None:
    network = bayesianize(small(), "ffg-u", inducing=8).cuda().train()
    x = torch.randn(6, 3, 16, 16, device="cuda")
    loss = network(x).square().mean() + network.kl() * 1e-4
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("D", [2**n for n in range(14)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_transforms_kernel_is_its_twin(D: int, dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, D, device="cuda").to(dtype)
    found, twin = transform(x), by_steps(x.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    assert found.dtype == dtype
    assert (found.double() - twin).abs().max() <= tolerance * twin.abs().max()
    if D >= 64:  # smaller ones go by a product
        from dubito.models.numerics.hadamard_kernel import transform_on_gpu

        kernel = transform_on_gpu(x.mT.contiguous().mT)  # not contiguous
        assert torch.equal(kernel, found)


def test_the_transforms_gradient_is_the_transform() -> None:
    x = torch.randn(5, 512, device="cuda", requires_grad=True)
    y = torch.randn(5, 512, device="cuda")
    (transform(x) * y).sum().backward()
    torch.testing.assert_close(x.grad, transform(y), rtol=1e-5, atol=1e-5)


def test_walsh_hadamard_layers_train() -> None:
    net = nn.Sequential(nn.Linear(300, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    network = bayesianize(net, "whvi", flows=1).train()
    with torch.autocast("cuda", torch.bfloat16):
        out = network(torch.randn(6, 300, device="cuda"))
    (out.float().square().mean() + network.kl() * 1e-4).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def linearised(S: int, net: nn.Module, device: str = "cpu") -> BayesianNetwork:
    """A made-up posterior over S weights: a diagonal, and a little beside it; made on a device, which may be faster."""
    network = bayesianize(net, "deterministic").eval()
    D = sum(p.numel() for p in net.parameters())
    rng = torch.Generator().manual_seed(0)
    L = torch.eye(S, device=device)
    L[1:, 0] = 0.01 * torch.randn(S - 1, generator=rng).to(device)
    entry = SubnetworkEntry(size=S, select="random", prior_precision=1.0, examples=1)
    index = torch.randperm(D, generator=rng)[:S].sort().values.to(device)
    network.subnetwork = Subnetwork.of(index, L.mul_(30), entry).cpu()
    return network


def test_a_subnetwork_answers_as_on_the_cpu() -> None:
    network, x = linearised(50, small()), torch.randn(6, 3, 16, 16)
    here = predict_closed(network, network.factors(), x).summary
    network = network.cuda()
    factors = network.factors()
    there = predict_closed(network, factors, x).summary
    assert isinstance(here, Classified)
    assert isinstance(there, Classified)
    torch.testing.assert_close(there.probabilities.cpu(), here.probabilities, rtol=1e-2, atol=1e-2)
    rows = predict(network, factors, x, 8, 0, keep_outputs=True).outputs
    assert rows is not None
    assert isinstance(factors, LinearisedFactors)
    chosen = factors.subnetwork
    noise = Normals(0, torch.device("cuda")).rows(8, 50)
    forward = by_jvp(network.net, network.learned, x.cuda(), chosen.index, chosen.draw(noise), 8)
    torch.testing.assert_close(rows, forward, rtol=1e-2, atol=1e-2)


def test_walsh_hadamard_convolutions_train_as_a_captured_step() -> None:
    from dubito.models.manifest import Input
    from dubito.training.config import Fit
    from dubito.training.data.data import Examples
    from dubito.training.fit.fit import FitRun

    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
    network = bayesianize(small(), "whvi", layers={"0": "ffg-u"}, inducing=8).cuda()
    data, declared = Examples(x, y), Input(shape=(3, 16, 16))
    run = FitRun(
        network, data, data, declared, Fit(epochs=8, batch=16, lr=1e-2, kl=1e-3), 0, torch.device("cuda"), None
    )
    while not run.done:
        run.epoch()
    assert run.log[-1].nll < run.log[0].nll


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, of its own thread for gradients
def test_forty_thousand_weights_fit_and_serve(tmp_path: Path) -> None:
    """The paper's largest subnetwork has 42,438."""
    forty_thousand(40_000, tmp_path, torch.device("cuda"))


def forty_thousand(S: int, folder: Path, device: torch.device) -> None:
    """Through the file, and by the engine of the service, both predictives; then the curvature itself."""
    from dubito.models import load, save
    from dubito.models.manifest import Card, Input
    from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
    from dubito.training.data.data import Examples
    from dubito.training.laplace import curvature, factor

    file, declared = folder / "large.safetensors", Input(shape=(3, 32, 32))
    save(linearised(S, build("resnet18-cifar"), device.type), file, card=Card(input=declared))
    model = load(file).to(device)
    file.unlink()
    engine, x = Engine(model, (1, 32)), torch.randn(32, 3, 32, 32)
    engine.warm(20, nullcontext())
    times, found = {}, []
    for name, closed in (("closed form", True), ("20 draws", False)):
        start = time.perf_counter()
        (answer,) = engine.answer([PredictRequest(x.numpy(), 20, 0, 20, 0.05, closed=closed)])
        times[name] = time.perf_counter() - start
        assert isinstance(answer, PredictResult), answer
        assert answer.predictive == ("probit" if closed else "sampling")
        found.append(torch.as_tensor(answer.columns["probabilities"]))
    assert found[0].isfinite().all()
    assert (found[0] - found[1]).abs().max() < 0.2
    assert isinstance(model.factors, LinearisedFactors)
    start = time.perf_counter()
    data = Examples(x, torch.zeros(32, dtype=torch.long))
    H = curvature(model.network, data, declared, model.factors.subnetwork.index, 32)
    L = factor(H, 1.0)
    assert L.diagonal().min() >= 1 - 1e-6
    times["curvature of 32 examples and its factor"] = time.perf_counter() - start
    if device.type == "cuda":
        print(f"peak memory of the device: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    print(f"S = {S:,}:", ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()))
