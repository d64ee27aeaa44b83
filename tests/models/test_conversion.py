"""From any network to a Bayesian one: exact starts, overrides, and errors that name the layer."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from dubito.models import bayesianize, build, ensemble, load, predict, save
from dubito.models.conversion.directions import set_directions
from dubito.models.conversion.options import known_options, options_of
from dubito.models.conversion.start import weight_of
from dubito.models.errors import ConversionError
from dubito.models.manifest import Card, Input, Regression
from dubito.models.names import METHODS
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.network.features import last_linear
from dubito.models.network.geometry import Conv
from dubito.models.numerics.parameters import count
from dubito.models.posteriors.inducing import Inducing, leading
from dubito.models.posteriors.protocol import Dense, Factored
from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import reside
from dubito.models.predictions.uncertainty import Classified
from dubito.models.pruning import prune
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from tests.small_models import mlp


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, groups=2, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def rank(W: Tensor, r: int) -> Tensor:
    """The best fit of rank r, by numpy."""
    u, s, vt = np.linalg.svd(W.double().numpy(), full_matrices=False)
    return torch.from_numpy(u[:, :r] * s[:r] @ vt[:r])


@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u"])
@pytest.mark.parametrize("inducing", [1, 3, (3, 5), 30])
def test_the_mean_weight_starts_as_the_best_fit_of_rank_M(method: str, inducing: int | tuple[int, int]) -> None:
    net = small()
    network = bayesianize(net, method, inducing=inducing)
    M = min(inducing if isinstance(inducing, tuple) else (inducing,))
    for name, layer in network.layers.items():
        W = weight_of(net.get_submodule(name))
        f = layer.q.factors()
        member = torch.arange(f.members) if f.members else None
        mean = f.mean(member)
        assert isinstance(mean, Factored)
        found = mean.dense().double().mean(0)  # over the members, where there are any
        torch.testing.assert_close(found, rank(W, M), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("size", [1e-3, 1.0, 40.0])
@pytest.mark.parametrize("inducing", [2, (3, 5), 30])
def test_V_starts_with_an_RMS_of_1_whatever_the_size_of_the_weights(
    size: float, inducing: int | tuple[int, int]
) -> None:
    """So that σ_max is the same share of every layer's weights: σ √(M_out M_in) is the norm of the rank-M fit."""
    net = small()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(size)
    network = bayesianize(net, "ffg-u", inducing=inducing, sigma_max=0.2)
    M_out, M_in = inducing if isinstance(inducing, tuple) else (inducing, inducing)
    for name, layer in network.layers.items():
        q = layer.posterior
        assert isinstance(q, Inducing)
        norm = float(rank(weight_of(net.get_submodule(name)), min(M_out, M_in)).norm())
        assert q.sigma == layer.entry.sigma == pytest.approx(norm / math.sqrt(M_out * M_in), rel=1e-6)
        V = q.factors().q_V.mean(None)  # type: ignore[union-attr]
        assert float(V.square().mean().sqrt()) == pytest.approx(1, rel=2e-3)  # D² adds a little


def test_a_prior_that_is_given_is_kept_and_weights_without_size_take_the_papers() -> None:
    net = nn.Linear(7, 5, bias=False)
    assert bayesianize(net, "ffg-u", inducing=2, prior_scale=3.0).layers[""].entry.sigma == 3 / math.sqrt(7)
    assert bayesianize(net, "ffg-u", inducing=2, start="prior").layers[""].entry.sigma == 1 / math.sqrt(7)
    nn.init.zeros_(net.weight)
    assert bayesianize(net, "ffg-u", inducing=2).layers[""].entry.sigma == 1 / math.sqrt(7)


@pytest.mark.parametrize("shape", [(20, 30), (12, 5), (4, 40)])
def test_the_cap_of_lambda_can_be_a_share_of_the_weights(shape: tuple[int, int]) -> None:
    """Against the noise that is drawn: with λ at its cap, its norm is that share of the norm of W."""
    d_out, d_in = shape
    torch.manual_seed(0)
    net, K, share = nn.Linear(d_in, d_out, bias=False), 400, 0.3
    network = bayesianize(net, "ensemble-u", inducing=6, members=1, lam_share=share, noise="exact")
    q = network.layers[""].posterior
    assert isinstance(q, Inducing)
    assert q.lam is not None
    with torch.no_grad():
        q.lam.raw.fill_(50.0)
    f = q.factors()
    W = f.draw(torch.randn(K, f.normals), torch.zeros(K).long())
    assert isinstance(W, Dense)
    noise = (W.W - f.mean(torch.zeros(1).long()).dense()).flatten(1)
    of_W = rank(weight_of(net), 6).norm()
    squared = noise.double().square().sum(1) / of_W**2
    assert abs(float(squared.mean()) - share**2) < 5 * float(squared.std()) / math.sqrt(K)


def test_members_start_as_far_from_each_other_as_asked() -> None:
    """Around the network's weights, so that their mean stays where it is."""
    far, near = (bayesianize(small(), "ensemble-u", inducing=3, members=40, spread=s) for s in (0.5, None))
    for name in far.layers:
        points = [n.layers[name].q.factors().q_V.points for n in (far, near)]  # type: ignore[attr-defined]
        assert points[0].std(0).mean() == pytest.approx(0.5, rel=0.1)
        assert points[1].std(0).mean() == pytest.approx(0.1, rel=0.1)
        torch.testing.assert_close(points[0].mean(0), points[1].mean(0), rtol=1e-4, atol=1e-5)


def test_a_gaussian_starts_as_wide_as_asked() -> None:
    wide, narrow = (bayesianize(small(), "ffg-u", inducing=3, sigma_max=1.0, spread=s) for s in (0.5, None))
    for name in wide.layers:
        q, other = (n.layers[name].q.factors().q_V for n in (wide, narrow))  # type: ignore[attr-defined]
        torch.testing.assert_close(q.spread, torch.full((3, 3), 0.5))
        assert other.spread.max() < 0.04
        assert torch.equal(q.centre, other.centre)


def test_the_start_is_exact_for_any_D() -> None:
    torch.manual_seed(1)
    W = torch.randn(7, 11, dtype=torch.float64)
    for M_out, M_in, D in ((4, 5, 1e-4), (4, 4, 0.3), (9, 13, 2.0)):
        q = Inducing(torch.randn(M_out, 7).double(), torch.randn(M_in, 11).double(), None, 0.3, D=D)
        with torch.no_grad():
            q.D_r.raw.add_(torch.randn(M_out))
            q.D_c.raw.add_(torch.randn(M_in))
        V = q.fit(W)
        mean = q.trainable().given(V[None]).mean(None)
        assert isinstance(mean, Dense)
        torch.testing.assert_close(mean.W[0], rank(W, min(M_out, M_in)), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("shape", [(130, 200), (200, 130), (150, 150)])
@pytest.mark.parametrize("kind", ["full", "of rank 3", "zero", "of values far apart"])
def test_the_largest_singular_values_and_their_vectors(shape: tuple[int, int], kind: str) -> None:
    """Sizes that are worked out by eigenvectors, and matrices that must not be."""
    torch.manual_seed(0)
    W = torch.randn(shape, dtype=torch.float64)
    if kind == "of rank 3":
        W = rank(W, 3)
    elif kind == "zero":
        W = torch.zeros_like(W)
    elif kind == "of values far apart":
        W = W * torch.logspace(0, -9, shape[1], dtype=torch.float64)
    B_r, S, B_c = leading(W, 20)
    torch.testing.assert_close(B_r * S @ B_c.T, rank(W, 20), rtol=0, atol=1e-10 * max(1.0, float(S[0])))
    for B in (B_r, B_c):
        torch.testing.assert_close(B.T @ B, torch.eye(20, dtype=torch.float64), rtol=0, atol=1e-6)


def test_a_hierarchy_starts_at_the_networks_weights_too() -> None:
    """Its mean is the best fit of its own rank to the V's side by side: with rank to spare, the network itself."""
    torch.manual_seed(0)
    net = mlp(8, 8, 4)
    x = torch.randn(5, 8)
    for method in ("ffg-u", "fcg-u", "ensemble-u"):
        network = bayesianize(net, method, inducing=16, hierarchy=(16, 16))
        out = predict(network, network.factors(), x, 0, keep_outputs=True).outputs
        assert out is not None
        if method == "ensemble-u":  # whose members start around it
            assert (out.mean(0) - net(x)).abs().max() < 0.1
        else:
            torch.testing.assert_close(out[0], net(x).detach(), rtol=1e-3, atol=1e-4)
    bayesianize(net, "fcg-u", inducing=64, hierarchy=8)  # the layers' own covariance is never made


def test_the_network_itself_is_left_alone() -> None:
    net = small()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    kinds = [type(m) for m in net.modules()]
    bayesianize(net, "ffg-u", inducing=3)
    assert kinds == [type(m) for m in net.modules()]
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_accuracy_before_and_after_is_printed_where_data_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    net = small().eval()
    x = torch.randn(50, 3, 8, 8)
    y = net(x).argmax(-1)
    wrong = (y + 1) % 4
    bayesianize(net, "ffg-u", inducing=80, data=[(x[:30], y[:30]), (x[30:], wrong[30:])])
    said = capsys.readouterr().out
    assert said.startswith("accuracy 60.00% before, 60.00% after conversion (50 inputs")


def test_regression_prints_its_error_instead(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(3, 2)
    x = torch.randn(40, 3)
    bayesianize(net, "ffg-w", task=Regression(outputs=2), data=[(x, net(x).detach() + 0.5)])
    assert capsys.readouterr().out.startswith("RMSE 0.5 before, 0.5 after conversion (40 inputs")


def test_overrides_by_type_glob_and_name_the_most_particular_last() -> None:
    layers: dict[Any, Any] = {
        "5": {"M_out": 2, "lam_max": 0.0},
        nn.Conv2d: "ffg-w",
        "[02]": {"method": "ensemble-u", "members": 3},
        "2": "deterministic",
    }
    network = bayesianize(small(), "ffg-u", inducing=5, layers=layers)
    entries = {name: layer.entry for name, layer in network.layers.items()}
    assert {name: e.method for name, e in entries.items()} == {"0": "ensemble-u", "5": "ffg-u"}
    assert isinstance(network.net.get_submodule("2"), nn.Conv2d)
    head = network.layers["5"].posterior
    assert isinstance(head, Inducing)
    assert head.Z_r.value.shape == (2, 4)
    assert head.Z_c.value.shape == (5, 7)
    assert head.lam is None
    found = predict(network, network.factors(), torch.randn(2, 3, 8, 8), 4, 0)
    assert found.samples == 4


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such method": ({"method": "ffg"}, "no method 'ffg'; there are: ffg-u"),
    "no such option": ({"method": "ffg-u", "lambda_max": 1}, "unknown option 'lambda_max'"),
    "no such layer": ({"method": "ffg-u", "layers": {"fc": "ffg-w"}}, "'fc': …} matches no layer; there are: 0, 2, 5"),
    "bad option of a layer": ({"method": "ffg-u", "layers": {"0": {"M": 3}}}, "layer '0': unknown option 'M'"),
    "inducing of nothing": ({"method": "ffg-u", "inducing": 0}, "inducing weights of size 0"),
    "a crowd": ({"method": "ensemble-u", "members": 2000}, "members is 2000; expected at most 1024"),
    "negative cap": ({"method": "ffg-u", "lam_max": -1}, "lam_max is -1"),
    "zero cap of σ": ({"method": "ffg-u", "sigma_max": 0}, "sigma_max is 0"),
    "rate": ({"method": "mc-dropout", "rate": 1.0}, "rate is 1.0"),
    "noise": ({"method": "ffg-u", "noise": "some"}, "noise is 'some'"),
    "inducing of a fraction": ({"method": "ffg-u", "inducing": 2.5}, "inducing weights of size 2.5"),
    "inducing of many": ({"method": "ffg-u", "inducing": 5000}, "layer '0': M = 5000 for a side of 8"),
    "two caps of λ": ({"method": "ffg-u", "lam_max": 0.1, "lam_share": 0.1}, "both cap λ"),
    "no share": ({"method": "ffg-u", "lam_share": 0}, "lam_share is 0; expected a positive number"),
    "tiny cap": ({"method": "ffg-u", "lam_max": 1e-7}, "lam_max is 1e-07"),
    "start": ({"method": "ffg-u", "start": "trained"}, "start is 'trained'; expected one of network, prior"),
    "unsupported": ({"method": "ffg-u", "unsupported": "raise"}, "unsupported is 'raise'"),
    "members all the same": ({"method": "ensemble-u", "spread": 0.0}, "spread is 0.0; expected a positive number"),
    "wider than its cap": ({"method": "ffg-u", "spread": 0.1}, "layer '0': spread is 0.1 and sigma_max 0.1; expected"),
    "no data": ({"method": "ffg-u", "data": []}, "holds no examples"),
    "hierarchy of nothing": ({"method": "ffg-u", "hierarchy": 0}, "size 0"),
    "another q under a hierarchy": (
        {"method": "ffg-u", "hierarchy": 3, "layers": {"0": {"sigma_max": 0.5}}},
        "layer '0': under a hierarchy .* sigma_max cannot differ",
    ),
    "hierarchy of weights": ({"method": "ffg-w", "hierarchy": 3}, "a hierarchy needs an inducing method"),
    "hierarchy of unequal rows": (
        {"method": "ffg-u", "hierarchy": 3, "layers": {"0": {"M_out": 2}}},
        "need one M_out; they have \\[2, 64\\]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_named(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(ConversionError, match=message):
        bayesianize(small(), **arguments)


def test_full_covariance_refuses_what_exceeds_its_limit_and_names_what_fits() -> None:
    with pytest.raises(
        ConversionError, match=r"layer '0': .*4,096 entries.*limit is 1,024.*M = 32 \(inducing=32\) fits"
    ):
        bayesianize(small(), "fcg-u", inducing=64)
    bayesianize(small(), "fcg-u", inducing=math.isqrt(1024))
    with pytest.raises(ConversionError, match=r"layer '0': .*fcg-u with M = 10 "):
        bayesianize(small(), "fcg-w", covariance_limit=100)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def _hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return net


UNSUPPORTED: dict[str, tuple[nn.Module, str]] = {
    "transposed": (nn.Sequential(nn.Linear(4, 4), nn.ConvTranspose1d(4, 4, 3)), "1 (ConvTranspose1d)"),
    "attention": (nn.MultiheadAttention(4, 2, kdim=3), "the network itself (MultiheadAttention)"),
    "added keys": (nn.ModuleList([nn.MultiheadAttention(4, 2, add_bias_kv=True)]), "0 (MultiheadAttention)"),
    "recurrent": (nn.LSTM(4, 4), "the network itself (LSTM)"),
    "embedding": (nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)), "0 (Embedding)"),
    "tied": (Tied(), "a (Linear, tied weights), b (Linear, tied weights)"),
    "parametrised": (
        nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        "1 (ParametrizedLinear, parametrized: call",
    ),
    "hooked": (_hooked(), "0 (Linear, with hooks)"),
    "lazy": (
        nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)),
        "1 (LazyLinear, without sizes yet: run",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_layer_that_cannot_be_converted_is_named_or_left_alone_when_asked(case: str) -> None:
    net, named = UNSUPPORTED[case]
    with pytest.raises(ConversionError) as caught:
        bayesianize(net, "ffg-w")
    assert named in str(caught.value)
    assert 'unsupported="leave"' in str(caught.value)
    network = bayesianize(net, "ffg-w", unsupported="leave")
    assert all(type(net.get_submodule(name)) is nn.Linear for name in network.layers)


def test_a_transformer_predicts_with_its_attention_left_alone() -> None:
    torch.manual_seed(0)
    net = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3)
    network = bayesianize(
        net, "ffg-u", inducing=4, layers={"*.mlp.0": {"inducing": 8}, "*.self_attention.*": "deterministic"}
    )
    assert any("mlp.0" in name for name in network.layers)
    assert any(type(module) is nn.MultiheadAttention for module in network.modules())
    out = predict(network, network.factors(), torch.randn(2, 3, 32, 32), 3, 0, keep_outputs=True).outputs
    assert out is not None
    assert out.shape == (3, 2, 3)


def test_a_layer_used_twice_stays_one_layer() -> None:
    shared = nn.Linear(4, 4)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    network = bayesianize(net, "ffg-w")
    assert list(network.layers) == ["0"]
    assert network.net.get_submodule("0") is network.net.get_submodule("2")
    assert count(network) == 2 * count(net)
    out = predict(network, network.factors(), torch.randn(3, 4), 0, keep_outputs=True).outputs
    assert out is not None


def test_a_lone_layer_is_a_network() -> None:
    net = nn.Linear(4, 3)
    network = bayesianize(net, "ffg-w")
    x = torch.randn(2, 4)
    out = predict(network, network.factors(), x, 0, keep_outputs=True).outputs
    assert out is not None
    torch.testing.assert_close(out[0], net(x).detach())


def test_an_ensemble_of_trained_networks_is_those_networks() -> None:
    """BatchNorm and all: each member's answers are the network's own."""
    nets = []
    for seed in range(3):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Flatten(), nn.Linear(288, 4))
        net(3 * torch.randn(20, 3, 8, 8) + 1)  # statistics of its own
        nets.append(net.eval())
    network = ensemble(nets)
    x = torch.randn(5, 3, 8, 8)
    found = predict(network, network.factors(), x, 0, keep_outputs=True)
    assert found.outputs is not None
    for out, net in zip(found.outputs, nets, strict=True):
        torch.testing.assert_close(out, net(x).detach(), rtol=1e-5, atol=1e-5)
    assert count(network) == sum(count(net) for net in nets)
    with pytest.raises(ConversionError, match="same layers"):
        ensemble([nets[0], small()])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(3, 2), nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale  # type: ignore[no-any-return]


class Placed(nn.Module):
    """A table of places, called with numbers of its own, and weights tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.norm, self.fc = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.place(torch.arange(5)))
        return self.fc(x.mean(1))  # type: ignore[no-any-return]


def test_copied_layers_that_see_no_batch_are_run_one_sample_at_a_time() -> None:
    torch.manual_seed(0)
    nets = [Placed().eval() for _ in range(3)]
    network = bayesianize(nets[0], "ensemble-w", members=3, unsupported="leave")
    assert len([n for n, _ in network.net.named_modules() if n.startswith("place.copies.")]) == 3
    x = torch.randn(2, 5, 4)
    one, all_at_once = (
        predict(network, network.factors(), x, 6, 0, max_rows=rows, keep_outputs=True).outputs for rows in (1, 1000)
    )
    assert one is not None
    torch.testing.assert_close(all_at_once, one, rtol=1e-5, atol=1e-6)
    single = bayesianize(nets[0], "ensemble-w", members=3, unsupported="leave", layers={"place": "deterministic"})
    assert isinstance(single.net.get_submodule("place"), nn.Embedding)


def test_an_ensemble_refuses_what_it_cannot_keep_apart() -> None:
    with pytest.raises(ConversionError, match="'scale' differs from network to network"):
        ensemble([Scaled(), Scaled()])


def test_dropout_does_not_hide_the_picture_unless_asked() -> None:
    assert list(bayesianize(small(), "mc-dropout").layers) == ["2", "5"]
    assert list(bayesianize(small(), "mc-dropout", layers={"0": {"rate": 0.1}}).layers) == ["0", "2", "5"]


def test_pruning_twice_never_brings_anything_back() -> None:
    network = bayesianize(small(), "ffg-u", inducing=4)
    prune(network, 0.5)
    once = count(network)
    prune(network, 0.8)
    assert count(network) == once
    prune(network, 0.25)
    assert count(network) < once
    weights = bayesianize(small(), "ffg-w")
    prune(weights, 0.3)
    once = count(weights)
    prune(weights, 0.6)
    assert count(weights) == once


@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u"])
def test_pruning_leaves_the_mean_weights_as_near_as_what_is_left_of_Z_allows(method: Any) -> None:
    """The nearest matrix whose rows and columns lie in the spans of the pruned Z's: W between two projections."""
    network = bayesianize(small().double(), method, inducing=4)
    member = torch.tensor([0])
    before = {name: mean_of(layer.q.factors().mean(member)) for name, layer in network.layers.items()}
    prune(network, 0.5)
    for name, layer in network.layers.items():
        q = layer.posterior
        assert isinstance(q, Inducing)
        rows, columns = (onto(Z().detach()) for Z in (q.Z_r, q.Z_c))
        torch.testing.assert_close(
            mean_of(q.factors().mean(member)), rows @ before[name] @ columns, rtol=1e-4, atol=1e-5
        )


def mean_of(operand: object) -> Tensor:
    assert isinstance(operand, Factored)
    return operand.dense()[0]


def onto(Z: Tensor) -> Tensor:
    """The orthogonal projection onto the rows of Z."""
    values, rows = np.linalg.svd(Z.numpy(), full_matrices=False)[1:]
    rows = rows[values > 1e-9 * values[0]]
    return torch.from_numpy(rows.T @ rows)


def test_weights_that_are_not_finite_are_refused() -> None:
    net = small()
    with torch.no_grad():
        net.get_parameter("5.weight")[0, 0] = torch.nan
    with pytest.raises(ConversionError, match="layer '5': its weights hold NaN"):
        bayesianize(net, "ffg-u")


@pytest.mark.parametrize("method", ["ffg-u", "fcg-u", "ensemble-u", "whvi", "gi", "li"])
def test_depthwise_convolutions_stay_plain_unless_they_are_named(method: str) -> None:
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 4, 2))
    seen: dict[str, Any] = {"examples": (torch.randn(6, 4, 4, 4), None)} if method in ("gi", "li") else {}
    assert list(bayesianize(net, method, inducing=4, **seen).layers) == ["0", "3"]
    if seen:
        return
    named: tuple[str | type[nn.Module], ...] = ("1", "1*", nn.Conv2d)
    for key in named:
        assert list(bayesianize(net, method, inducing=4, layers={key: method}).layers) == ["0", "1", "3"]
    assert list(bayesianize(net, method, inducing=4, layers={"*": {"prior_scale": 2.0}}).layers) == ["0", "3"]


@pytest.mark.parametrize("method", ["ffg-w", "ensemble-w", "mc-dropout"])
def test_methods_over_all_weights_have_those_of_depthwise_convolutions_too(method: str) -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 4, 2))
    assert list(bayesianize(net, method).layers) == ["0", "2"]


def test_the_law_of_the_noise_is_exact_where_that_is_as_cheap() -> None:
    network = bayesianize(build("resnet18-cifar"), "ffg-u", inducing=64, start="prior")
    laws = {name: layer.posterior.noise for name, layer in network.layers.items()}
    assert laws["layer1.0.conv1"] == "exact"  # 64 × 576: forming W costs no more than 64 shared filters
    assert laws["layer4.1.conv2"] == "factored"
    depthwise = nn.Sequential(nn.Conv2d(32, 32, 3, groups=32))
    layer = bayesianize(depthwise, "ffg-u", inducing=4, layers={"0": "ffg-u"}).layers["0"]
    assert isinstance(layer.geometry, Conv)
    assert layer.posterior.noise == "exact"


def test_starting_from_the_prior_gives_weights_of_the_priors_size() -> None:
    """With V ~ N(0, I) and λ near 0 an entry of W has M²/(d_in d_out) of the prior's variance."""
    torch.manual_seed(0)
    net = nn.Linear(300, 200, bias=False)
    q = bayesianize(net, "ffg-u", inducing=50, start="prior").layers[""].posterior
    assert isinstance(q, Inducing)
    mean = q.factors().mean(None)
    assert isinstance(mean, Factored)
    share = mean.dense().var() / q.sigma**2
    expected = 50 * 50 / (300 * 200)  # the share of directions that V decides
    assert abs(share - expected) < 0.2 * expected


class Stepwise(nn.Module):
    """Its steps are functions that hold its layers, of which a copy of the network has others."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layer = nn.Linear(4, 3)
        self.steps = [lambda x: layer(x)]

    def forward(self, x: Tensor) -> Any:
        return self.steps[0](x)


def test_functions_that_hold_the_networks_layers_are_refused() -> None:
    """The copy would call the plain layer: all draws would be the same."""
    replaced, hooked = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2))
    replaced.forward = lambda x: replaced[2](replaced[0](x))  # type: ignore[method-assign]
    gate = nn.Linear(8, 8)
    hooked[1].register_forward_hook(lambda module, given, out: out * gate(out))
    cases = (Stepwise(), "the attribute steps"), (replaced, "the attribute forward"), (hooked, "1 has a hook")
    for net, what in cases:
        with pytest.raises(ConversionError, match=f"{what}, a function that holds modules of the network"):
            bayesianize(net, "ffg-w")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")
def test_parts_that_cannot_be_made_bayesian_are_named() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(ConversionError, match="its part '0' is a TorchScript module"):
        bayesianize(nn.Sequential(scripted, nn.Linear(4, 3)), "ffg-w")
    with pytest.raises(ConversionError, match=r"0 \(Linear, of complex numbers\)"):
        bayesianize(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 3)), "ffg-w")


def test_a_norm_over_several_axes_stays_as_it_is() -> None:
    network = bayesianize(nn.Sequential(nn.LayerNorm([2, 4]), nn.Flatten(), nn.Linear(8, 3)), "ffg-w")
    assert list(network.layers) == ["2"]


class ReadsTheNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.conv(x)) * self.norm.weight.view(1, -1, 1, 1)
        return self.head(h.mean((2, 3)))


def test_a_batchnorm_whose_weights_are_read_past_it_is_not_folded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = ReadsTheNorm()
    nn.init.uniform_(net.norm.weight)
    network, x = bayesianize(net, "ffg-w"), torch.randn(2, 1, 6, 6)
    before = predict(network, network.factors(), x, 4, 0, keep_outputs=True).outputs
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(1, 6, 6))))
    served = reside(load(tmp_path / "m.safetensors"), torch.device("cpu"), torch.float32)
    after = served.predict(x, 4, 0, keep_outputs=True).outputs
    assert before is not None
    assert after is not None
    torch.testing.assert_close(after, before)


class ByName(nn.Module):
    """Hands its layers their inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(input=self.norm(input=self.first(input=x)).relu())


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-w"])
def test_layers_may_get_their_inputs_by_name(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = ByName(), torch.randn(40, 6)
    assert last_linear(net, lambda: net(x)) == "head"
    network = bayesianize(net, method, inducing=2)
    set_directions(network, x, 1)
    members = max(1, network.factors().members)
    network.set_feature_bank(FeatureBank.of(nn.functional.normalize(torch.randn(members, 8, 6), dim=-1), "head"))
    expected = predict(network, network.factors(), x, 4, 0).summary
    assert isinstance(expected, Classified)
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(6,))))
    for model in (load(tmp_path / "m.safetensors"), Model(network, load(tmp_path / "m.safetensors").manifest)):
        served = Engine(model, (1, 64))
        served.plans.measure(served._job(x, 0, None), 4)
        (found,) = served.answer([PredictRequest(x.numpy(), 4, 0, 128, 0.05)])
        assert isinstance(found, PredictResult)
        np.testing.assert_allclose(found.columns["probabilities"], expected.probabilities, rtol=1e-4, atol=1e-5)


def test_inducing_points_start_at_inputs_that_layers_get_by_name() -> None:
    examples = torch.randn(20, 6), torch.arange(20) % 3
    assert len(bayesianize(ByName(), "gi", inducing=4, examples=examples).layers) == 2


class AsksTheNorm(ReadsTheNorm):
    def forward(self, x: Tensor) -> Any:
        h = self.norm(self.conv(x)) * self.norm.num_features + self.norm.eps
        return self.head(h.mean((2, 3)))


def test_a_layer_of_which_members_have_copies_tells_what_they_share() -> None:
    x = torch.randn(2, 1, 6, 6)
    net = AsksTheNorm().eval()
    ensemble = bayesianize(net, "ensemble-w", members=2, start="network").eval()
    assert ensemble.mean(x).shape == (2, 3)
    with pytest.raises(ConversionError, match=r"has no one weight\. .* layers={'norm': 'deterministic'}"):
        bayesianize(ReadsTheNorm(), "ensemble-w")(x)
    assert bayesianize(ReadsTheNorm(), "ensemble-w", layers={"norm": "deterministic"})(x).shape == (2, 3)


@pytest.mark.parametrize(("method", "net"), [
    ("mc-dropout", nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 6), nn.Flatten())),
    ("ffg-u", nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.AdaptiveAvgPool2d(1), nn.Flatten())),
])  # fmt: skip
def test_a_method_that_leaves_every_layer_as_it_is_is_refused(method: str, net: nn.Module) -> None:
    """It would answer without doubt, and say nothing of that."""
    with pytest.raises(ConversionError, match=r"dgp leaves every layer .*\. Use another method"):
        bayesianize(net, "dgp")
    with pytest.raises(ConversionError, match=f"{method} leaves every layer of this network as it is.*Name those"):
        bayesianize(net, method)
    assert bayesianize(net, method, layers={"0": method}).layers


TRIED: dict[str, tuple[Any, ...]] = {  # values of each option that are not its default
    "inducing": (2,),
    "members": (2,),
    "lam_max": (0.01,),
    "lam_share": (0.01,),
    "sigma_max": (0.07,),
    "prior_scale": (3.0,),
    "noise": ("exact", "factored"),
    "covariance_limit": (1,),
    "spread": (0.05,),
    "hierarchy": (2,),
    "prior": ("standard",),
    "rate": (0.3,),
    "D": (8,),
    "covariance": ("full",),
    "flows": (1,),
}


@pytest.mark.parametrize("method", METHODS)
def test_the_options_of_a_method_are_those_that_change_its_network(method: str) -> None:
    def outcome(**options: Any) -> Any:
        torch.manual_seed(0)
        full = {"covariance": "full"} if "covariance_limit" in options and "covariance" in options_of(method) else {}
        try:
            network = bayesianize(mlp(5, 12, 3), method, start="prior", **{"inducing": 4, **full, **options})
        except ConversionError as error:
            return str(error)
        entries = {name: layer.entry.model_dump() for name, layer in network.layers.items()}
        return entries, {name: t.tolist() for name, t in network.state_dict().items()}

    names = {"inducing" if name in ("M_out", "M_in") else name for name in known_options()} | {"spread", "hierarchy"}
    assert names == TRIED.keys()
    for name in names:
        if name == "hierarchy" and name not in options_of(method):
            assert "a hierarchy needs" in outcome(hierarchy=2)
            continue
        without = outcome(covariance="full") if name == "covariance_limit" else outcome()
        changed = any(outcome(**{name: value}) != without for value in TRIED[name])
        assert changed == (name in options_of(method)), name
