"""The linearised network against dense covariances and brute-force Jacobians [Daxberger21, eqs. 7-8]."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, save
from dubito.models.errors import ArtifactError, ConversionError, InputError
from dubito.models.manifest import Regression
from dubito.models.network.learned import Learned
from dubito.models.network.linearised import (
    LinearisedFactors,
    Subnetwork,
    SubnetworkFactors,
    by_jvp,
    pack,
    unpack,
)
from dubito.models.network.network import BayesianNetwork, Draws, Plan
from dubito.models.numerics.parameters import count
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import predict, predict_closed
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.models.pruning import prune
from tests.models.test_jacobian import Turned, brute, mixed

S = 30


def chosen(D: int, S: int = S) -> Tensor:
    return torch.randperm(D, generator=torch.Generator().manual_seed(1))[:S].sort().values


def precision(S: int = S) -> Tensor:
    root = torch.randn(S, S, generator=torch.Generator().manual_seed(2)).double()
    return root @ root.T + 0.5 * torch.eye(S)


def subnetwork(net: nn.Module, H: Tensor | None = None) -> Subnetwork:
    H = precision() if H is None else H
    index = chosen(sum(p.numel() for p in net.parameters()), len(H))
    entry = SubnetworkEntry(size=len(H), select="random", prior_precision=0.5, examples=7)
    return Subnetwork.of(index, torch.linalg.cholesky(H), entry)


def of(network: BayesianNetwork) -> Subnetwork:
    assert isinstance(network.joint, Subnetwork)
    return network.joint


def network(task: Regression | None = None) -> BayesianNetwork:
    made = bayesianize(mixed().float(), "deterministic", task=task)
    made.subnetwork = subnetwork(made.net)
    return made.eval()


def prepared(net: nn.Module, index: Tensor, H: Tensor) -> tuple[BayesianNetwork, LinearisedFactors]:
    """With the factor in float64, which no artifact holds."""
    made = bayesianize(net, "deterministic").eval()
    made.set_joint(subnetwork(net, H))
    factors = made.factors()
    assert isinstance(factors, LinearisedFactors)
    return made, replace(factors, subnetwork=SubnetworkFactors(index, torch.linalg.cholesky(H)))


def no_plan(B: int, K: int) -> Plan:
    return {}


@pytest.mark.parametrize("outputs", [None, 3, 1000])
def test_samples_are_the_linearised_network(outputs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows of the Jacobian (3 outputs, or not known yet) and by forward mode (as if there were 1000).

    In inference mode, as a server asks: there torch 2.11 loses the tangents of forward mode.
    """
    net, x = mixed(), torch.randn(5, 2, 9, 9).double()
    J, H = brute(net, x), precision()
    made, factors = prepared(net, chosen(J.shape[2]), H)
    made.learned.outputs = outputs
    eps = torch.randn(6, S).double()
    with torch.inference_mode():
        found = factors.outputs(made, x, Draws(6, eps, 0), no_plan, 10)
    moves = torch.linalg.solve(torch.linalg.cholesky(H).T, eps.T).T  # δ = L⁻ᵀ ε, densely
    torch.testing.assert_close(found, net(x) + torch.einsum("bcs,ks->kbc", J[:, :, factors.subnetwork.index], moves))
    torch.testing.assert_close(factors.outputs(made, x, Draws(1, None, 0), no_plan, 10)[0], net(x))


def test_draws_have_the_covariance_of_the_precision() -> None:
    H, N = precision(5), 200_000
    factors = SubnetworkFactors(torch.arange(5), torch.linalg.cholesky(H))
    draws = factors.draw(torch.randn(N, 5, generator=torch.Generator().manual_seed(0)).double())
    C = torch.linalg.inv(H)
    v = C.diag()
    assert (draws.mean(0).abs() < 5 * (v / N).sqrt()).all()
    assert ((draws.T.cov() - C).abs() < 5 * ((v[:, None] * v + C**2) / N).sqrt()).all()


def test_moments_are_the_dense_ones() -> None:
    net, x = mixed(), torch.randn(5, 2, 9, 9).double()
    J, H = brute(net, x), precision()
    made, factors = prepared(net, chosen(J.shape[2]), H)
    f, variance = factors.moments(made, x)
    J = J[:, :, factors.subnetwork.index]
    torch.testing.assert_close(f, net(x))
    torch.testing.assert_close(variance, torch.einsum("bcs,st,bct->bc", J, torch.linalg.inv(H), J))


@pytest.mark.parametrize("first", [False, True])
def test_forward_mode_through_attention(first: bool) -> None:
    torch.manual_seed(0)
    net, x = Turned(first).double().eval(), torch.randn(3, 5, 4).double()
    J = brute(net, x)
    index, moves = chosen(J.shape[2]), torch.randn(4, S).double()
    expected = net(x) + torch.einsum("bcs,ks->kbc", J[:, :, index], moves)
    torch.testing.assert_close(by_jvp(net, Learned(), x, index, moves, 4), expected)


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrent(x)[1][0][-1])
        return out


def test_forward_mode_through_an_lstm() -> None:
    """In float32, in which a CPU's library has one without forward mode."""
    torch.manual_seed(0)
    net, x = Steps().eval(), torch.randn(3, 6, 4)
    J = brute(net, x)
    index, moves = chosen(J.shape[2]), torch.randn(4, S)
    expected = net(x) + torch.einsum("bcs,ks->kbc", J[:, :, index], moves)
    torch.testing.assert_close(by_jvp(net, Learned(), x, index, moves, 4), expected, rtol=1e-4, atol=1e-4)
    assert torch.backends.mkldnn.enabled  # as before


class Cube(torch.autograd.Function):
    """With derivatives of both modes, and no rule for batches of them."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return g * 3 * x**2

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return t * 3 * x**2


def test_what_cannot_be_batched_is_done_draw_by_draw() -> None:
    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Cube.apply(self.layer(x))
            return out

    net, x = Cubed().double().eval(), torch.randn(4, 3).double()
    J = brute(net, x)
    moves = torch.randn(5, 8).double()
    expected = net(x) + torch.einsum("bcs,ks->kbc", J, moves)
    learned = Learned()
    torch.testing.assert_close(by_jvp(net, learned, x, torch.arange(8), moves, 5), expected)
    assert not learned.batched


def test_probit_and_its_limits() -> None:
    made, x = network(), torch.randn(4, 2, 9, 9)
    factors = made.factors()
    found = predict_closed(made, factors, x).summary
    assert isinstance(found, Classified)
    f, variance = factors.moments(made, x)
    expected = (f / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    torch.testing.assert_close(found.probabilities, expected)
    torch.testing.assert_close(found.entropy, -(expected * expected.log()).sum(-1))
    assert found.mutual_information.isnan().all()
    assert found.expected_entropy.isnan().all()
    # no variance: the network as it is
    made.subnetwork = subnetwork(made.net, 1e12 * torch.eye(S).double())
    sure = predict_closed(made, made.factors(), x).summary
    assert isinstance(sure, Classified)
    torch.testing.assert_close(sure.probabilities, made.net(x).softmax(-1))
    assert sure.probabilities.argmax(-1).equal(made.net(x).argmax(-1))


def test_two_classes_keep_their_leader_where_variances_are_alike() -> None:
    """With logits (0, a) only the difference counts, and dividing it does not change its sign."""
    from dubito.models.predictions.uncertainty import probit

    a = torch.randn(100)
    f = torch.stack([torch.zeros_like(a), a], 1)
    p = probit(f, torch.rand(100, 2) * 50).probabilities
    assert p.argmax(-1).equal(f.argmax(-1))


def test_the_mean_is_the_network_and_seeds_fix_the_rest() -> None:
    made, x = network(), torch.randn(6, 2, 9, 9)
    factors = made.factors()
    assert factors.random
    assert factors.normals == S
    mean = predict(made, factors, x, 0, keep_outputs=True)
    assert mean.outputs is not None
    assert mean.samples == 0
    torch.testing.assert_close(mean.outputs[0], made.net(x))
    first = predict(made, factors, x, 7, 3, keep_outputs=True).outputs
    assert first is not None
    assert torch.equal(first, predict(made, factors, x, 7, 3, keep_outputs=True).outputs)  # type: ignore[arg-type]
    for rows in (1, 4):
        other = predict(made, factors, x, 7, 3, max_rows=rows, keep_outputs=True).outputs
        torch.testing.assert_close(other, first)
    assert not torch.equal(first, predict(made, factors, x, 7, 4, keep_outputs=True).outputs)  # type: ignore[arg-type]


def test_regression_in_closed_form_is_the_limit_of_draws() -> None:
    task = Regression(outputs=3, shift=(1.0, 2.0, 3.0), scale=(2.0, 1.0, 0.5))
    made, x, K = network(task), torch.randn(4, 2, 9, 9), 4000
    factors = made.factors()
    closed, drawn = predict_closed(made, factors, x).summary, predict(made, factors, x, K, 0).summary
    assert isinstance(closed, Regressed)
    assert isinstance(drawn, Regressed)
    torch.testing.assert_close(closed.aleatoric_variance, drawn.aleatoric_variance)
    error = (closed.epistemic_variance / K).sqrt()
    assert ((closed.mean - drawn.mean).abs() < 5 * error).all()
    ratio = drawn.epistemic_variance / closed.epistemic_variance
    assert ((ratio - 1).abs() < 5 * (2 / K) ** 0.5).all()
    _, variance = factors.moments(made, x)
    torch.testing.assert_close(closed.epistemic_variance, variance * torch.tensor(task.scale).square())


def test_threads_do_not_meet() -> None:
    """One pass swaps weights and watches layers while another does the same."""
    from concurrent.futures import ThreadPoolExecutor

    made, x = network(), torch.randn(3, 2, 9, 9)
    factors = made.factors()
    made.learned.outputs = 1000  # forward mode
    alone = predict(made, factors, x, 3, 0, keep_outputs=True).outputs
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: predict(made, factors, x, 3, 0, keep_outputs=True).outputs, range(8)))
    assert all(torch.equal(alone, other) for other in found)  # type: ignore[arg-type]


def test_a_triangle_is_packed_row_by_row() -> None:
    L = torch.linalg.cholesky(precision(4))
    packed = pack(L)
    assert packed.shape == (10,)
    assert packed[:3].tolist() == [L[0, 0], L[1, 0], L[1, 1]]
    assert torch.equal(unpack(packed), L)


# the artifact


def lenet() -> BayesianNetwork:
    torch.manual_seed(0)
    made = bayesianize(build("lenet"), "deterministic")
    made.subnetwork = subnetwork(made.net, precision())
    return made.eval()


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16", "int8"])
def test_an_artifact_holds_indices_and_a_packed_triangle(stored: str, tmp_path: Path) -> None:
    made, path, x = lenet(), tmp_path / "model.safetensors", torch.randn(3, 1, 28, 28)
    manifest = save(made, path, precision=stored)  # type: ignore[arg-type]
    assert isinstance(manifest.subnetwork, SubnetworkEntry)
    assert manifest.subnetwork.size == S
    inside = load_file(path)
    assert inside["subnetwork.index"].dtype == torch.int32
    width = {"float32": 4, "int8": 2}.get(stored, 2)  # an int8 file keeps its triangle in half precision
    assert inside["subnetwork.triangle"].nbytes == width * S * (S + 1) // 2
    model = load(path)
    assert torch.equal(of(model.network).index, of(made).index)
    assert model.method == "probit"
    one, other = model.predict(x), Model(made, manifest).predict(x)
    assert one.method == "probit"
    assert isinstance(one.summary, Classified)
    assert isinstance(other.summary, Classified)
    tolerance = {"float32": 1e-6, "float16": 5e-3, "bfloat16": 5e-2, "int8": 5e-2}[stored]
    torch.testing.assert_close(one.summary.probabilities, other.summary.probabilities, rtol=0, atol=tolerance)
    assert count(model.network) == 61706 + S * (S + 1) // 2


def test_method_and_samples_say_how_a_model_answers(tmp_path: Path) -> None:
    save(lenet(), tmp_path / "m.safetensors")
    model, x = load(tmp_path / "m.safetensors"), torch.randn(2, 1, 28, 28)
    assert model.predict(x).method == "probit"
    assert (model.predict(x, 5).method, model.predict(x, 5).samples) == ("sampling", 5)
    assert model.predict(x, method="sampling").samples == 20
    assert model.predict(x, "auto").settled is not None
    with pytest.raises(InputError, match="takes no draws"):
        model.predict(x, 5, method="probit")
    plain = bayesianize(build("lenet"), "deterministic")
    save(plain, tmp_path / "p.safetensors")
    with pytest.raises(InputError, match="has a closed form"):
        load(tmp_path / "p.safetensors").predict(x, method="probit")
    with pytest.raises(InputError, match="expected probit, sampling"):
        model.predict(x, method="guess")  # type: ignore[arg-type]


def test_a_file_that_lies_about_its_subnetwork_is_refused(tmp_path: Path) -> None:
    good = lenet()
    changes: list[tuple[Callable[[Subnetwork], object], str]] = [
        (lambda s: s.index.add_(61706), "no 30 weights"),
        (lambda s: s.index.copy_(s.index.flip(0)), "in order"),
        (lambda s: s.index[0].fill_(-1), "no 30 weights"),
        (lambda s: s.triangle.neg_(), "not positive"),
    ]
    for change, said in changes:
        bad = copy.deepcopy(good)
        change(of(bad))
        save(bad, tmp_path / "bad.safetensors")
        with pytest.raises(ArtifactError, match=said):
            load(tmp_path / "bad.safetensors")
    blank = Subnetwork(torch.arange(3, dtype=torch.int32), torch.ones(6), of(good).entry)
    with pytest.raises(ArtifactError, match="no 3 weights of the 2"):
        blank.check(nn.Linear(2, 1, bias=False))


def test_other_indices_or_triangles_do_not_load(tmp_path: Path) -> None:
    import json

    from safetensors import safe_open

    save(lenet(), tmp_path / "m.safetensors")
    tensors = load_file(tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        about = file.metadata()
    tensors["subnetwork.index"] = tensors["subnetwork.index"][:-1].clone()
    told = json.loads(about["dubito"])
    from dubito.models.artifact.artifact import digest

    told["sha256"] = digest(told, tensors)
    save_file(tensors, tmp_path / "m.safetensors", {"dubito": json.dumps(told)})
    with pytest.raises(ArtifactError, match=r"subnetwork\.index"):
        load(tmp_path / "m.safetensors")


def test_what_does_not_go_with_a_subnetwork_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="nothing to prune"):
        prune(lenet(), 0.5)
    with pytest.raises(ArtifactError, match='save it with "keep"'):
        save(lenet(), tmp_path / "m.safetensors", batchnorm="fold")
