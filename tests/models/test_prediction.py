"""K samples folded into the batch: against one network per sample, across seeds, batches, plans and threads."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from dubito.models import bayesianize, predict
from dubito.models.conversion.directions import set_directions
from dubito.models.errors import ConversionError, InputError, PredictionError
from dubito.models.manifest import Regression
from dubito.models.network.geometry import Execution
from dubito.models.network.network import BayesianNetwork, NetworkFactors
from dubito.models.numerics.normals import Normals
from dubito.models.posteriors.protocol import Dense, Factored
from dubito.models.predictions.prediction import Prediction
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.models.pruning import prune
from tests.examples import at_most
from tests.faulty import need


class Residual(nn.Module):
    """What real networks have: strides, groups, BatchNorm, a skip, dropout, pooling, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2, bias=False)
        self.right = nn.Conv2d(8, 12, 1, stride=2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.left(x) + self.right(x))
        return self.head(self.drop(x.mean((2, 3))))  # type: ignore[no-any-return]


def make_residual() -> Residual:
    torch.manual_seed(0)
    net = Residual()
    for _ in range(5):  # BatchNorm statistics that are not those of the start
        net(torch.randn(16, 3, 9, 9))
    return net.eval()


@pytest.fixture
def residual() -> Residual:
    return make_residual()


INPUTS = torch.randn(5, 3, 9, 9, generator=torch.Generator().manual_seed(1))

METHODS: dict[str, dict[str, Any]] = {
    "ffg-u": {"inducing": 6, "noise": "exact"},
    "fcg-u": {"inducing": (4, 5), "noise": "exact"},
    "ensemble-u": {"inducing": 6, "members": 3, "noise": "exact"},
    "ffg-w": {},
    "fcg-w": {"covariance_limit": 4096, "layers": {"left": "ffg-w"}},
    "ensemble-w": {"members": 3},
    "mc-dropout": {"rate": 0.3, "layers": {"stem": {"rate": 0.3}}},
    "whvi": {"layers": {"left": {"covariance": "full"}, "right": {"flows": 2}, "head": {"D": 2}}},
}


def widen(network: BayesianNetwork) -> BayesianNetwork:
    """Posteriors start narrow: make them wide, so that a draw that reaches the wrong row shows."""
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith((".lam.raw", ".spread.raw")):
                p.fill_(2.0)
    return network


def weights_of(
    network: BayesianNetwork, factors: NetworkFactors, noise: Tensor, member: int
) -> list[dict[str, Tensor]]:
    """Each sample's plain weights by parameter name, from the factors and the normals alone."""
    samples: list[dict[str, Tensor]] = [{} for _ in noise]
    at = 0
    for name, f in factors.layers.items():
        share = noise[:, at : at + f.normals]
        at += f.normals
        operand = f.draw(share, torch.full((len(noise),), member) if f.members else None)
        W = operand.W if isinstance(operand, Dense) else operand.dense()  # type: ignore[union-attr]
        if isinstance(operand, Factored):
            assert operand.e is None
        geometry = network.layers[name].geometry
        for k, W_k in enumerate(W):
            if geometry.bias:
                samples[k][f"{name}.bias"] = W_k[:, -1]
                W_k = W_k[:, :-1]
            samples[k][f"{name}.weight"] = W_k
    return samples


@pytest.mark.parametrize("method", METHODS)
def test_each_sample_is_the_plain_network_with_that_samples_weights(residual: Residual, method: str) -> None:
    """The oracle runs torch's own layers, one sample at a time, nothing folded."""
    network = widen(bayesianize(residual, method, **METHODS[method]))
    factors = network.factors()
    K, seed = 4, 7
    out = predict(network, factors, INPUTS, K, seed, keep_outputs=True).outputs
    assert out is not None
    noise = Normals(seed, torch.device("cpu")).rows(K, factors.normals)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()
    shapes = {name: p.shape for name, p in residual.named_parameters()}
    for k in range(K):
        member = order[k % 3]
        weights = weights_of(network, factors, noise[k : k + 1], member)[0]
        weights = {name: w.reshape(shapes[name]) for name, w in weights.items()}
        expected = functional_call(residual, weights, INPUTS)
        torch.testing.assert_close(out[k], expected, rtol=1e-4, atol=1e-4)
    assert all((out[0] - out[k]).abs().max() > 1e-3 for k in range(1, 3)), "the samples do not differ"


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-u", "ffg-w", "ensemble-w", "mc-dropout", "whvi"])
@pytest.mark.parametrize("noise", ["exact", "factored"])
def test_a_seed_fixes_the_answers_however_the_work_is_cut(residual: Residual, method: str, noise: str) -> None:
    options = {k: v for k, v in METHODS[method].items() if k != "noise"}
    network = widen(bayesianize(residual, method, noise=noise, **options))
    factors = network.factors()

    def outputs(**passes: Any) -> Tensor:
        out = predict(network, factors, INPUTS, 6, 3, keep_outputs=True, **passes).outputs
        assert out is not None
        return out

    whole = outputs(max_rows=1000)
    assert torch.equal(whole, outputs(max_rows=1000))
    for max_rows in (1, 2, 7, 12):
        torch.testing.assert_close(outputs(max_rows=max_rows), whole, rtol=1e-4, atol=1e-5)
    for one in range(len(INPUTS)):  # alone, an input gets the same draws
        alone = predict(network, factors, INPUTS[one : one + 1], 6, 3, keep_outputs=True).outputs
        assert alone is not None
        torch.testing.assert_close(alone[:, 0], whole[:, one], rtol=1e-4, atol=1e-5)
    fewer = predict(network, factors, INPUTS, 4, 3, keep_outputs=True).outputs
    assert fewer is not None
    torch.testing.assert_close(fewer, whole[:4], rtol=1e-4, atol=1e-5)
    others = [predict(network, factors, INPUTS, 6, seed, keep_outputs=True).outputs for seed in range(4, 12)]
    assert not all(other is not None and torch.allclose(other, whole) for other in others)  # few orders of few members


@pytest.mark.parametrize("noise", ["exact", "factored"])
@pytest.mark.parametrize("lam_max", [0.0, 0.5])
def test_plans_change_how_not_what(residual: Residual, noise: str, lam_max: float) -> None:
    network = widen(bayesianize(residual, "ffg-u", inducing=6, noise=noise, lam_max=lam_max))
    factors = network.factors()
    answers = []
    executions: tuple[Execution, ...] = get_args(Execution)
    for execution in executions:
        plan: dict[str, Execution] = dict.fromkeys(network.layers, execution)
        out = predict(network, factors, INPUTS, 5, 0, plan=plan, max_rows=100, keep_outputs=True).outputs
        assert out is not None
        answers.append(out)
    for other in answers[1:]:
        torch.testing.assert_close(other, answers[0], rtol=1e-3, atol=1e-4)


def test_unseeded_predictions_differ_and_can_be_had_again(residual: Residual) -> None:
    network = widen(bayesianize(residual, "ffg-u", inducing=6))
    factors = network.factors()
    first, second = (predict(network, factors, INPUTS, 3, keep_outputs=True) for _ in range(2))
    assert first.outputs is not None
    assert second.outputs is not None
    assert first.seed != second.seed
    assert not torch.allclose(first.outputs, second.outputs)
    again = predict(network, factors, INPUTS, 3, first.seed, keep_outputs=True)
    assert again.outputs is not None
    assert torch.equal(again.outputs, first.outputs)


def test_zero_samples_answer_with_the_mean(residual: Residual) -> None:
    for method in ("ffg-w", "mc-dropout"):  # their means are the network's own weights
        network = bayesianize(residual, method)
        found = predict(network, network.factors(), INPUTS, 0, keep_outputs=True)
        assert found.samples == 0
        assert found.outputs is not None
        torch.testing.assert_close(found.outputs[0], residual(INPUTS).detach(), rtol=1e-5, atol=1e-5)
    network = bayesianize(residual, "ffg-u", inducing=80)  # rank M covers every layer
    found = predict(network, network.factors(), INPUTS, 0, keep_outputs=True)
    assert found.outputs is not None
    torch.testing.assert_close(found.outputs[0], residual(INPUTS).detach(), rtol=1e-3, atol=1e-4)


def test_an_ensemble_cycles_through_its_members_and_zero_samples_use_each_once(residual: Residual) -> None:
    network = bayesianize(residual, "ensemble-w", members=3)
    factors = network.factors()
    means = predict(network, factors, INPUTS, 0, keep_outputs=True)
    assert means.samples == 0
    assert means.outputs is not None
    assert len(means.outputs) == 3
    drawn = predict(network, factors, INPUTS, 7, 11, keep_outputs=True).outputs
    assert drawn is not None
    places = [int((means.outputs - d).abs().amax((1, 2)).argmin()) for d in drawn]
    for k, place in enumerate(places):
        torch.testing.assert_close(drawn[k], means.outputs[place], rtol=1e-5, atol=1e-5)
    assert sorted(places[:3]) == [0, 1, 2]
    assert places[3:] == places[:3] + places[:1]
    orders = set()
    for seed in range(30):
        out = predict(network, factors, INPUTS, 3, seed, keep_outputs=True).outputs
        assert out is not None
        orders.add(tuple(int((means.outputs - d).abs().amax((1, 2)).argmin()) for d in out))
    assert len(orders) == 6, "the order of the members does not depend on the seed"


def test_ensemble_u_members_share_one_member_over_all_layers(residual: Residual) -> None:
    """A member is a whole network: with λ = 0 there are as many functions as members, not members ** layers."""
    network = bayesianize(residual, "ensemble-u", inducing=6, members=2, lam_max=0)
    out = predict(network, network.factors(), INPUTS, 8, 0, keep_outputs=True).outputs
    assert out is not None
    torch.testing.assert_close(out[::2], out[0].expand(4, -1, -1))
    torch.testing.assert_close(out[1::2], out[1].expand(4, -1, -1))
    assert (out[0] - out[1]).abs().max() > 1e-4


def test_a_deterministic_network_answers_once_and_says_so(residual: Residual) -> None:
    network = bayesianize(residual, "deterministic")
    found = predict(network, network.factors(), INPUTS, 20, 0, keep_outputs=True)
    assert found.samples == 1
    assert found.outputs is not None
    torch.testing.assert_close(found.outputs[0], residual(INPUTS).detach())
    assert isinstance(found.summary, Classified)
    assert found.summary.mutual_information.abs().max() < 1e-6


def test_factors_are_a_value_that_training_cannot_reach(residual: Residual) -> None:
    for method in ("ffg-u", "ffg-w", "ensemble-w", "mc-dropout"):
        network = bayesianize(residual, method, inducing=6)
        assert network.layers
        factors = network.factors()
        before = predict(network, factors, INPUTS, 3, 0, keep_outputs=True).outputs
        with torch.no_grad():
            for layer in network.layers.values():
                for p in layer.parameters():
                    p.add_(0.5)
        after = predict(network, factors, INPUTS, 3, 0, keep_outputs=True).outputs
        assert before is not None
        assert after is not None
        if method != "ensemble-w":  # whose other layers are kept in copies inside the network
            assert torch.equal(before, after)
        with pytest.raises(AttributeError):
            factors.copies = 3  # type: ignore[misc]


def test_training_mode_is_put_aside_and_restored(residual: Residual) -> None:
    network = bayesianize(residual, "ffg-w").train()
    network.net.norm.eval()  # type: ignore[union-attr]
    factors = network.factors()
    statistics = network.net.norm.running_mean.clone()  # type: ignore[union-attr, operator]
    first = predict(network, factors, INPUTS, 2, 0, keep_outputs=True).outputs
    second = predict(network, factors, INPUTS, 2, 0, keep_outputs=True).outputs
    assert first is not None
    assert second is not None
    assert torch.equal(first, second), "dropout or BatchNorm was active"
    assert torch.equal(statistics, network.net.norm.running_mean)  # type: ignore[union-attr, arg-type]
    assert network.training
    assert network.net.drop.training  # type: ignore[union-attr]
    assert not network.net.norm.training  # type: ignore[union-attr]


@pytest.mark.parametrize("training", [False, True])
def test_threads_do_not_see_each_others_draws(residual: Residual, training: bool) -> None:
    """Nor, where the network was left in training mode, a BatchNorm that another thread switched back."""
    network = widen(bayesianize(residual, "ffg-u", inducing=6)).train(training)
    factors = network.factors()
    statistics = network.net.norm.running_mean.clone()  # type: ignore[union-attr, operator]

    def ask(seed: int) -> Tensor:
        out = predict(network, factors, INPUTS, 3, seed, keep_outputs=True).outputs
        assert out is not None
        return out

    alone = [ask(seed) for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(16)))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(statistics, network.net.norm.running_mean)  # type: ignore[union-attr, arg-type]
    assert network.training == training


class Viewed(nn.Module):
    """What most tutorials write: a `view` of a feature map, which wants it contiguous in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, bias=False)
        self.fc = nn.Linear(6 * 7 * 7, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.fc(x.view(-1, 6 * 7 * 7))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", METHODS)
def test_a_network_that_views_its_feature_maps_works_unchanged(method: str) -> None:
    torch.manual_seed(0)
    net = Viewed()
    options = {k: v for k, v in METHODS[method].items() if k != "layers"}
    network = widen(bayesianize(net, "ffg-w" if method == "fcg-w" else method, **options))
    network(INPUTS).sum().backward()
    factors = network.factors()
    executions: tuple[Execution, ...] = get_args(Execution)
    for execution in executions:
        plan: dict[str, Execution] = dict.fromkeys(network.layers, execution)
        first = predict(network, factors, INPUTS, 4, 0, plan=plan, keep_outputs=True).outputs
        again = predict(network, factors, INPUTS, 4, 0, plan=plan, max_rows=5, keep_outputs=True).outputs
        assert first is not None
        assert again is not None
        torch.testing.assert_close(first, again, rtol=1e-4, atol=1e-5)


class Tight(nn.Module):
    """Stands for a device with room for few rows."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.fc, self.room = nn.Linear(4, 3), room

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            raise torch.OutOfMemoryError(f"{len(x)} rows")
        return self.fc(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("room", [1, 3, 7])
def test_out_of_memory_halves_the_work_never_the_answer(room: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    wide, tight = Tight(10**6), Tight(room)
    tight.load_state_dict(wide.state_dict())
    answers = []
    for net in (wide, tight):
        network = widen(bayesianize(net, "ffg-w"))
        answers.append(predict(network, network.factors(), x, 9, 0, keep_outputs=True).outputs)
    assert answers[0] is not None
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-5, atol=1e-6)
    hopeless = bayesianize(Tight(0), "ffg-w")
    with pytest.raises(torch.OutOfMemoryError):
        predict(hopeless, hopeless.factors(), x, 2, 0)


def test_a_transformer_encoder_predicts_in_spite_of_torchs_fast_path() -> None:
    torch.manual_seed(0)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(x).mean(1))  # type: ignore[no-any-return]

    net = Encoder().eval()
    network = bayesianize(net, "ffg-w", unsupported="leave")
    assert any("linear1" in name for name in network.layers)
    x = torch.randn(3, 5, 8)
    mean = predict(network, network.factors(), x, 0, keep_outputs=True).outputs
    assert mean is not None
    torch.testing.assert_close(mean[0], net(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_layer_answers_for_its_sizes_but_has_no_weight_to_show(residual: Residual) -> None:
    layers = bayesianize(residual, "ffg-w").layers
    assert (layers["head"].in_features, layers["head"].out_features) == (12, 5)
    assert (layers["left"].in_channels, layers["left"].groups, layers["left"].stride) == (8, 2, (2, 2))
    assert not hasattr(layers["head"], "weight")
    with pytest.raises(ConversionError, match="no one weight"):
        _ = layers["head"].weight


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16
def test_autocast_trains_even_where_M_exceeds_d(residual: Residual) -> None:
    need(torch.bfloat16)
    network = bayesianize(residual, "ffg-u", inducing=20).train()
    with torch.autocast("cpu", torch.bfloat16):
        out = network(INPUTS)
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.layers["head"].parameters())


def test_a_call_trains_one_joint_draw_with_gradients_everywhere(residual: Residual) -> None:
    for method, options in METHODS.items():
        network = bayesianize(residual, method, **options).train()
        assert network(INPUTS).shape == (5, 5)
        loss = network.sample(INPUTS, 3).square().mean() + network.kl() * 1e-3  # three draws: each member once
        loss.backward()
        missing = [n for n, p in network.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not missing, (method, missing)


def test_batches_of_a_transformers_kind_keep_their_samples_apart() -> None:
    """A Linear layer inside acts on (K·B, T, d)."""
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 7), nn.Linear(7, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)).mean(1))  # type: ignore[no-any-return]

    net = Tokens()
    network = widen(bayesianize(net, "ffg-w"))
    factors = network.factors()
    x = torch.randn(4, 5, 6)
    out = predict(network, factors, x, 3, 0, keep_outputs=True, max_rows=100).outputs
    assert out is not None
    noise = Normals(0, torch.device("cpu")).rows(3, factors.normals)
    for k, weights in enumerate(weights_of(network, factors, noise, 0)):
        torch.testing.assert_close(out[k], functional_call(net, weights, x), rtol=1e-4, atol=1e-5)


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x[:-1])  # type: ignore[no-any-return]


class TimeFirst(nn.Module):
    """(B, T, d) turned to (T, B, d): as many rows as K, but not the samples' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.transpose(0, 1)).mean(0)  # type: ignore[no-any-return]


def test_a_network_that_drops_rows_is_an_error() -> None:
    network = bayesianize(Halved(), "ffg-w")
    with pytest.raises(PredictionError, match="a tensor of 2 rows; expected a tensor with one row per input"):
        predict(network, network.factors(), torch.randn(3, 4), 4, 0)
    with pytest.raises(InputError, match=r"layer 'fc' got .* mixes or drops rows .* layers={'fc': 'deterministic'}"):
        network.sample(torch.randn(3, 4), 4)
    with pytest.raises(InputError, match="outside a Bayesian network"):
        network.net(torch.randn(3, 4))


@pytest.mark.parametrize("T", [7, 8, 40])
@pytest.mark.parametrize("method", ["ffg-w", "ensemble-w"])
def test_a_network_that_puts_time_first_is_sampled_one_draw_at_a_time(T: int, method: str) -> None:
    """Folded, its rows would belong to the wrong samples, and with 8 or 40 steps no row count would show it."""
    torch.manual_seed(0)
    network = widen(bayesianize(TimeFirst(), method))
    factors = network.factors()
    x = torch.randn(1, T, 4)
    alone = predict(network, factors, x, 8, 0, max_rows=1, keep_outputs=True)
    fresh = widen(bayesianize(TimeFirst(), method))
    fresh.load_state_dict(network.state_dict())
    equal(predict(fresh, fresh.factors(), x, 8, 0, max_rows=1000, keep_outputs=True), alone)


def equal(one: Prediction, other: Prediction) -> None:
    """Up to rounding, draw by draw."""
    assert one.outputs is not None
    assert other.outputs is not None
    torch.testing.assert_close(one.outputs, other.outputs, rtol=1e-5, atol=1e-6)


class Flipped(nn.Module):
    """Averages over a picture and its mirror image, which it puts behind the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.b(self.a(torch.cat([x, x.flip(-1)])).relu().mean((2, 3))).chunk(2)
        return (one + other) / 2  # type: ignore[no-any-return]


class OfItsOwn(nn.Module):
    """One of its layers gets rows that are no inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("prototypes", torch.randn(40, 6))
        self.a, self.b = nn.Linear(4, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) @ self.b(self.prototypes).T[:, :5]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("net", "shape"), [(TimeFirst, (8, 4)), (Flipped, (3, 6, 6)), (OfItsOwn, (4,))])
@pytest.mark.parametrize("method", ["ffg-w", "ensemble-w", "mc-dropout"])
@pytest.mark.parametrize("first", ["draws agree", "inputs of zeros"])
def test_rows_that_mix_are_seen_where_the_answers_do_not_show_it(
    net: type[nn.Module], shape: tuple[int, ...], method: str, first: str
) -> None:
    """The first draw and the last may be the same member, as of five in twenty, or weights hardly vary; and an input of
    zeros says nothing of the weights."""
    torch.manual_seed(0)
    network = bayesianize(net(), method)
    factors, x = network.factors(), torch.randn(2, *shape)
    predict(network, factors, torch.zeros_like(x) if first == "inputs of zeros" else x, 20, 0)
    assert not network.learned.folds
    alone = predict(network, factors, x, 8, 1, max_rows=1, keep_outputs=True)
    equal(predict(network, factors, x, 8, 1, keep_outputs=True), alone)


@pytest.mark.parametrize(("net", "shape"), [(TimeFirst, (8, 4)), (Flipped, (3, 6, 6)), (OfItsOwn, (4,))])
@pytest.mark.parametrize("method", ["ffg-w", "ensemble-u", "mc-dropout"])
def test_draws_whose_rows_would_mix_do_not_share_a_training_step(
    net: type[nn.Module], shape: tuple[int, ...], method: str
) -> None:
    network = bayesianize(net(), method)
    x = torch.randn(2, *shape)
    assert network(x).shape[0] == 2
    for refused in (network.sample, network.sample_linearised):
        with pytest.raises(InputError, match=r"mixes rows of the batch, .* cannot share a training step"):
            refused(x, 2)
    assert network.training


class OneHot(nn.Module):
    """Its first column is a number of a category."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        kinds = nn.functional.one_hot(x[:, 0].long(), 5).to(x)
        return self.b(self.a(torch.cat([kinds, x[:, 1:]], 1)).relu())  # type: ignore[no-any-return]


def test_other_inputs_that_show_whether_rows_mix_are_such_as_the_network_takes() -> None:
    x = 30 * torch.randn(6, 4)
    x[:, 0] = torch.arange(6) % 5
    network = bayesianize(OneHot(), "ffg-w")
    predict(network, network.factors(), x, 4, 0)
    assert network.learned.folds
    assert network.learned.apart == {(4,)}


class Changes(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 1
        return self.a(x.relu_())  # type: ignore[no-any-return]


def test_inputs_stay_what_they_were() -> None:
    torch.manual_seed(0)
    network, x = bayesianize(Changes(), "ffg-w"), torch.randn(2, 4)
    before = x.clone()
    answers = [predict(network, network.factors(), x, K, 0, keep_outputs=True).outputs for K in (1, 1, 2)]
    assert torch.equal(x, before)
    assert answers[0] is not None
    assert answers[1] is not None
    assert answers[2] is not None
    assert torch.equal(answers[0], answers[1])
    torch.testing.assert_close(answers[2][:1], answers[0])


def test_torchs_fast_path_is_back_where_it_was_after_threads_have_used_transformers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(40, 3)).eval()
    network = bayesianize(net, "ffg-w", unsupported="leave").eval()
    factors = network.factors()
    x = torch.randn(2, 5, 8)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: predict(network, factors, x, 2, seed), range(60)))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_checkpoint_loads_into_a_fresh_network_pruned_or_not() -> None:
    torch.manual_seed(0)
    net = make_residual()
    for method in ("ffg-u", "ffg-w"):
        options: dict[str, Any] = {"inducing": 6, "noise": "factored"}
        plain, pruned, fresh = (widen(bayesianize(net, method, **options)) for _ in range(3))
        prune(pruned, 0.3)
        if method == "ffg-u":
            set_directions(pruned, INPUTS, 2)
        for source in (pruned, plain, pruned):
            fresh.load_state_dict(source.state_dict())
            found, wanted = (predict(n, n.factors(), INPUTS, 3, 0, keep_outputs=True).outputs for n in (fresh, source))
            assert found is not None
            assert wanted is not None
            assert torch.equal(found, wanted)


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "samples below zero": (lambda: {"samples": -1}, "samples is -1; expected a whole number"),
    "samples of another kind": (lambda: {"samples": 2.5}, "samples is 2.5"),
    "samples beyond reason": (lambda: {"samples": 10**9}, "samples is 1000000000"),
    "seed below zero": (lambda: {"seed": -3}, "seed is -3"),
    "a list": (lambda: {"x": [[1.0]]}, "inputs came as list; expected a torch tensor"),
    "no inputs": (lambda: {"x": torch.empty(0, 3, 9, 9)}, "at least one input"),
    "a NaN": (lambda: {"x": torch.stack([INPUTS[0], INPUTS[1] * torch.nan])}, "input 1 holds NaN"),
    "an infinity": (lambda: {"x": INPUTS[:1] / 0}, "input 0 holds NaN or infinity"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_error(residual: Residual, case: str) -> None:
    make, message = BAD[case]
    network = bayesianize(residual, "ffg-w")
    arguments: dict[str, Any] = {"x": INPUTS, "samples": 2, "seed": 0} | make()
    with pytest.raises(InputError, match=message):
        predict(network, network.factors(), **arguments)


def test_an_answer_that_is_not_finite_is_an_error_not_a_number(residual: Residual) -> None:
    network = bayesianize(residual, "ffg-w")
    with pytest.raises(PredictionError, match="answer to input 0 is not finite"):
        predict(network, network.factors(), INPUTS.sign() * 3e38, 2, 0)
    wrong = bayesianize(nn.Sequential(nn.Linear(4, 3)), "ffg-w", task=Regression(outputs=2))
    with pytest.raises(PredictionError, match="3 values per input; its task says 2"):
        predict(wrong, wrong.factors(), torch.randn(2, 4), 2, 0)
    images = bayesianize(nn.Sequential(nn.Conv2d(3, 4, 3)), "ffg-w")
    with pytest.raises(PredictionError, match="expected \\(B, classes\\)"):
        predict(images, images.factors(), INPUTS, 2, 0)


def test_regression_answers_in_the_targets_units() -> None:
    torch.manual_seed(0)
    task = Regression(outputs=2, shift=(10.0, -3.0), scale=(2.0, 5.0))
    network = widen(bayesianize(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), "ffg-w", task=task))
    found = predict(network, network.factors(), torch.randn(6, 3), 50, 0, keep_outputs=True)
    assert isinstance(found.summary, Regressed)
    assert found.outputs is not None
    raw = found.outputs.double()
    scale, shift = torch.tensor([2.0, 5.0]).double(), torch.tensor([10.0, -3.0]).double()
    torch.testing.assert_close(found.summary.mean.double(), raw.mean(0) * scale + shift, rtol=1e-5, atol=1e-5)
    epistemic = raw.var(0, unbiased=False) * scale**2
    torch.testing.assert_close(found.summary.epistemic_variance.double(), epistemic, rtol=1e-4, atol=1e-6)
    assert network.noise is not None
    aleatoric = (network.noise().detach().double() * scale) ** 2
    torch.testing.assert_close(found.summary.aleatoric_variance.double(), aleatoric.expand(6, 2), rtol=1e-5, atol=1e-8)


def test_bfloat16_runs_and_stays_close(residual: Residual) -> None:
    need(torch.bfloat16)
    for noise in ("exact", "factored"):
        network = bayesianize(residual, "ffg-u", inducing=6, noise=noise, lam_max=0.5)
        factors = network.factors()
        full = predict(network, factors, INPUTS, 8, 0).summary
        half = predict(network.to(torch.bfloat16), factors, INPUTS, 8, 0).summary
        assert isinstance(full, Classified)
        assert isinstance(half, Classified)
        assert half.probabilities.dtype == torch.float32
        assert (full.probabilities - half.probabilities).abs().max() < 0.02


@settings(max_examples=at_most(10), deadline=None)
@given(
    channels=st.integers(1, 4),
    hidden=st.integers(1, 6),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    bias=st.booleans(),
    M=st.integers(1, 9),
    K=st.integers(1, 5),
    B=st.integers(1, 4),
    max_rows=st.integers(1, 30),
    noise=st.sampled_from(["exact", "factored"]),
    method=st.sampled_from(["ffg-u", "ensemble-u", "ffg-w", "ensemble-w", "mc-dropout"]),
)
def test_any_shape_gives_proper_answers_that_do_not_depend_on_the_cut(
    channels: int,
    hidden: int,
    kernel: int,
    stride: int,
    bias: bool,
    M: int,
    K: int,
    B: int,
    max_rows: int,
    noise: str,
    method: str,
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv1d(channels, hidden, kernel, stride, bias=bias)
    net = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(2 * hidden, 3, bias=bias))
    network = bayesianize(net, method, inducing=M, noise=noise, members=2)
    factors = network.factors()
    x = torch.randn(B, channels, 7)
    cut = predict(network, factors, x, K, 0, max_rows=max_rows).summary
    whole = predict(network, factors, x, K, 0, max_rows=1000).summary
    assert isinstance(cut, Classified)
    assert isinstance(whole, Classified)
    torch.testing.assert_close(cut.probabilities, whole.probabilities, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cut.probabilities.sum(-1), torch.ones(B))
    assert (cut.mutual_information >= 0).all()


def test_what_is_learned_stays_with_the_network_that_it_was_learned_about() -> None:
    """A copy may have other layers (a folded BatchNorm, say), so it starts anew; and no file holds what was learned."""
    network = bayesianize(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), "ffg-u", inducing=3)
    predict(network, network.factors(), torch.randn(5, 6), 4, 0)
    assert network.learned.folded == {(5, 6)}
    again = copy.deepcopy(network)
    assert again.learned is not network.learned
    assert not again.learned.folded
    assert not any("learned" in name for name in network.state_dict())
    network.train()
    with network.learned.evaluating(network), network.learned.evaluating(network):
        assert not network.net.training
    assert network.net.training
