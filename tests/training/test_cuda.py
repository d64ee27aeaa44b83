"""Training on a GPU: a captured step does what the same step does uncaptured, and resumes."""

import pytest
import torch

from dubito.models import bayesianize, build
from dubito.training.config import Context, Fit
from dubito.training.data.data import Examples, input_of
from dubito.training.fit.fit import FitRun
from dubito.training.fit.function_space import FunctionSpace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def blobs(n: int, seed: int) -> Examples:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=rng)
    x = torch.randint(0, 60, (n, 1, 8, 8), generator=rng) + 45 * y[:, None, None, None]
    return Examples(x.to(torch.uint8), y)


def run_of(method: str, **changes: object) -> FitRun:
    torch.manual_seed(0)
    network = bayesianize(build("cnn", size=8, width=8, hidden=16, classes=4), method, inducing=8, start="prior")
    train = blobs(520, 1)  # the last batch is smaller than the others
    fit = Fit.model_validate({"epochs": 3, "likelihood_epochs": 1, "batch": 64, "amp": False, **changes})
    return FitRun(network, train, blobs(64, 2), input_of(train), fit, 0, torch.device("cuda"))


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-u", "fcg-u", "ffg-w", "mc-dropout", "deterministic"])
def test_a_captured_step_is_the_same_step(method: str) -> None:
    captured, plain = run_of(method), run_of(method, graph=False)
    for run in (captured, plain):
        while not run.done:
            run.epoch()
    assert captured.graphs is not None
    assert captured.graphs.graph is not None
    assert plain.graphs is None
    # the first epoch starts from the same weights; later ones differ by what rounding has grown to
    assert captured.log[0].nll == pytest.approx(plain.log[0].nll, rel=1e-3)
    assert captured.log[-1].validation_nll == pytest.approx(plain.log[-1].validation_nll, rel=0.2, abs=0.05)
    assert captured.log[-1].nll < captured.log[0].nll


@pytest.mark.parametrize("method", ["gi", "fac-gi", "li"])
def test_a_captured_step_of_inducing_points_is_the_same_step(method: str) -> None:
    """Convolutions, Cholesky factors in float64 and Gamma variables, all inside the graph."""
    runs = []
    for graph in (True, False):
        torch.manual_seed(0)
        train = blobs(520, 1)
        examples = (train.x.float() / 255, train.y)
        net = build("resnet8", channels=1, width=8, classes=4)
        network = bayesianize(net, method, inducing=16, prior="spatial-iw", start="prior", examples=examples)
        fit = Fit(epochs=3, batch=64, amp=False, lr=1e-2, graph=graph)
        run = FitRun(network, train, blobs(64, 2), input_of(train), fit, 0, torch.device("cuda"))
        while not run.done:
            run.epoch()
        runs.append(run)
    captured, plain = runs
    assert captured.graphs is not None
    assert captured.graphs.graph is not None
    assert captured.log[0].nll == pytest.approx(plain.log[0].nll, rel=1e-2)
    assert captured.log[0].kl == pytest.approx(plain.log[0].kl, rel=1e-2)
    assert captured.log[-1].loss < captured.log[0].loss


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("method", ["ffg-w", "ffg-u"])
def test_a_captured_step_in_function_space_is_the_same_step(method: str, amp: bool) -> None:
    runs = []
    for graph in (True, False):
        torch.manual_seed(0)
        train, device = blobs(520, 1), torch.device("cuda")
        net = build("convnet", size=8, stages=[8, 8], hidden=16, classes=4)
        network = bayesianize(net, method, inducing=8, sigma_max=10.0, spread=0.02, start="prior").to(device)
        functions = FunctionSpace.of(Context(points=8), network, train, input_of(train))
        fit = Fit(epochs=3, batch=64, amp=amp, graph=graph, objective="function-space")
        run = FitRun(network, train, blobs(64, 2), input_of(train), fit, 0, device, functions=functions)
        while not run.done:
            run.epoch()
        runs.append(run)
    captured, plain = runs
    assert captured.graphs is not None
    assert captured.graphs.graph is not None
    assert captured.log[0].nll == pytest.approx(plain.log[0].nll, rel=5e-2)
    assert captured.log[0].kl == pytest.approx(plain.log[0].kl, rel=5e-2)
    assert captured.log[-1].nll < captured.log[0].nll


def test_every_member_of_a_captured_ensemble_moves() -> None:
    run = run_of("ensemble-u", epochs=4)
    before = {k: v.clone() for k, v in run.network.state_dict().items() if k.endswith("points.value")}
    while not run.done:
        run.epoch()
    for name, points in run.network.state_dict().items():
        if name in before:
            moved = (points - before[name]).flatten(1).norm(dim=1)
            assert (moved > 0.1 * moved.max()).all(), name


def test_captured_steps_draw_anew() -> None:
    """With the learning rate at nothing, only the draws make one step's loss differ from another's."""
    run = run_of("ffg-u", lr=1e-30, schedule="constant", epochs=2)
    losses = []
    for x, y, share in [next(iter(run.batches.epoch(0)))] * 8:
        run.sums.zero_()
        run.take_step(x.float() / 255, y, share)
        losses.append(float(run.sums[0]))
    assert len(set(losses)) == 8


def test_a_run_in_half_precision_learns_and_resumes() -> None:
    whole, broken = run_of("ffg-u", amp=True, epochs=6), run_of("ffg-u", amp=True, epochs=6)
    while not whole.done:
        whole.epoch()
    for _ in range(2):
        broken.epoch()
    again = run_of("ffg-u", amp=True, epochs=6)
    again.restore(broken.state())
    while not again.done:
        again.epoch()
    assert again.log[-1].validation_nll == pytest.approx(whole.log[-1].validation_nll, rel=0.3, abs=0.05)
    assert whole.log[-1].accuracy is not None
    assert whole.log[-1].accuracy > 0.6
