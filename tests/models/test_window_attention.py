"""Attention within windows whose projections are layers: beside torchvision's own, converted, saved and served."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)

from dubito.models import bayesianize, build, load, predict, save
from dubito.models.conversion.architectures import OURS, remember
from dubito.models.errors import ArtifactError, ConversionError
from dubito.models.manifest import Architecture, Card, Input
from dubito.models.network.attention import opened
from dubito.models.network.network import BayesianNetwork, Draws, as_matrix
from dubito.models.network.window_attention import WindowAttention, WindowAttentionV2, kind_of
from dubito.models.predictions.prediction import evaluating
from dubito.models.traced import TorchModule
from dubito.models.tracing.modules import construct
from dubito.service.engine.fusion import Unit, with_units

THEIRS: dict[str, tuple[Any, type[WindowAttention]]] = {
    "v1": (ShiftedWindowAttention, WindowAttention),
    "v2": (ShiftedWindowAttentionV2, WindowAttentionV2),
}
SHAPE = (3, 18, 22)  # maps of 9 × 11 and 5 × 6 tokens, which windows of 4 × 4 do not divide


def attention(kind: str, shift: tuple[int, int] = (1, 2), qkv: bool = True, proj: bool = True, **more: Any) -> Any:
    """torchvision's, with windows of 4 × 3, two heads and numbers in all parameters."""
    torch.manual_seed(0)
    net = THEIRS[kind][0](8, [4, 3], list(shift), 2, qkv_bias=qkv, proj_bias=proj, **more).eval().double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.7)
    if kind == "v2":
        nn.init.constant_(net.logit_scale[0], 5.0)  # beyond torchvision's limit, log 100
    return net


def swin(v2: bool = False, classes: int = 5) -> nn.Module:
    parts: dict[str, Any] = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if v2 else {}
    net: nn.Module = SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=classes, **parts).eval()
    return net


def swin_v2(classes: int = 5) -> nn.Module:
    return swin(True, classes)


SWINS: dict[str, Callable[[], nn.Module]] = {"v1": swin, "v2": swin_v2}


def outputs(network: BayesianNetwork, x: Tensor, K: int = 3) -> Tensor:
    out = predict(network, network.factors(), x, K, 1, keep_outputs=True).outputs
    assert out is not None
    return out


# beside torchvision's


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("shift", [(0, 0), (2, 1), (0, 1), (3, 0)])
@pytest.mark.parametrize(("qkv", "proj"), [(True, True), (False, False), (True, False)])
def test_it_computes_what_torchvisions_attention_does(kind: str, shift: tuple[int, int], qkv: bool, proj: bool) -> None:
    theirs = attention(kind, shift, qkv, proj)
    ours = THEIRS[kind][1].of(theirs)
    # whole windows, padding on either side and on both, a map within one window, one as high or as wide as a window
    for size in ((8, 9), (7, 9), (8, 10), (9, 7), (3, 2), (4, 3), (4, 12), (11, 3), (1, 1)):
        x = torch.randn(2, *size, 8, dtype=torch.float64)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", THEIRS)
def test_gradients_are_torchvisions(kind: str) -> None:
    """In float32 too, where those of V2's keys that are padding would drown the rest."""
    theirs = attention(kind).float()
    ours = THEIRS[kind][1].of(copy.deepcopy(theirs))
    x = torch.randn(2, 7, 8, 8)
    for net in (theirs, ours):
        net(x).square().sum().backward()
    for name, p in theirs.named_parameters():
        found = ours.get_parameter(name).grad
        assert found is not None
        if kind == "v2" and name == "qkv.bias":
            assert float(found[8:16].abs().max()) < 1e-4 * float(p.grad.abs().max())  # the keys' part has no effect
        torch.testing.assert_close(found, p.grad, rtol=1e-3, atol=1e-4 * float(p.grad.abs().max()))


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("shift", [(0, 0), (2, 1)])
def test_dropout_is_for_training(kind: str, shift: tuple[int, int]) -> None:
    theirs = attention(kind, shift, attention_dropout=0.5, dropout=0.25)
    ours, x = THEIRS[kind][1].of(theirs), torch.randn(2, 16, 12, 8, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))
    ours.train()
    out = ours(x)
    kept = out != 0
    assert abs(float(kept.double().mean()) - 0.75) < 0.03
    ours.dropout = 0.0
    assert not torch.allclose(ours(x), theirs(x))
    ours.attention_dropout = 0.0
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("kind", THEIRS)
def test_half_precision_has_no_infinity(kind: str) -> None:
    """Keys of padding are zeros, whose length float16 cannot tell from that of 1e-12."""
    theirs = attention(kind)
    x = torch.randn(2, 7, 8, 8, dtype=torch.float64)
    ours = THEIRS[kind][1].of(theirs).half()
    torch.testing.assert_close(ours(x.half()).double(), theirs.double()(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", SWINS)
def test_opening_shares_the_parameters_and_leaves_the_network_alone(kind: str) -> None:
    net = SWINS[kind]()
    copied = opened(net)
    theirs = [m for m in net.modules() if isinstance(m, ShiftedWindowAttention)]
    assert len(theirs) == 4
    assert not any(isinstance(m, WindowAttention) for m in net.modules())
    ours = [m for m in copied.modules() if type(m) is THEIRS[kind][1]]
    assert len(ours) == 4
    # in the same order too, by which a subnetwork's weights are numbered
    names = [[(name, id(t)) for name, t in (*n.named_parameters(), *n.named_buffers())] for n in (net, copied)]
    assert names[0] == names[1]
    assert not {id(m) for m in net.modules()} & {id(m) for m in copied.modules()}
    x = torch.randn(2, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(copied(x), net(x))


class Extended(ShiftedWindowAttention):  # type: ignore[misc]  # torchvision has no types
    """Computes by torchvision's forward method, with positions of its own."""

    def get_relative_position_bias(self) -> Tensor:
        return torch.zeros(1, 2, 12, 12)


class OwnLinear(nn.Linear):
    """A projection of which torchvision takes the weight, and not what its forward method computes."""


def _replaced() -> nn.Module:
    net: nn.Module = ShiftedWindowAttentionV2(8, [4, 3], [0, 0], 2)
    net.qkv = OwnLinear(8, 24)
    return net


@pytest.mark.parametrize("make", [lambda: Extended(8, [4, 3], [0, 0], 2), _replaced])
def test_what_is_not_torchvisions_own_stays_whole(make: Callable[[], nn.Module]) -> None:
    net = nn.Sequential(make(), nn.Flatten(), nn.Linear(8 * 12, 2))
    assert kind_of(net[0]) is None
    assert opened(net) is net
    with pytest.raises(ConversionError, match=f"cannot convert 0 \\({type(net[0]).__name__}\\)"):
        bayesianize(net, "ffg-u", inducing=2)
    network = bayesianize(net, "ffg-u", inducing=2, unsupported="leave")
    assert list(network.layers) == ["2"]
    assert outputs(network, torch.randn(2, 4, 3, 8)).shape == (3, 2, 2)


# with posteriors


@pytest.mark.parametrize("kind", SWINS)
def test_projections_have_posteriors_and_positions_do_not(kind: str) -> None:
    network = bayesianize(SWINS[kind](), "ffg-u", inducing=4)
    inside = {name.rpartition(".attn.")[2] for name in network.layers if ".attn." in name}
    assert inside == {"qkv", "proj"}
    assert len(network.layers) == 1 + 4 * 4 + 1 + 1  # stem, blocks, a merger of patches, head
    plain = {name for name, _ in network.net.named_parameters() if ".posterior." not in name and "norm" not in name}
    of_positions = ("cpb_mlp", "logit_scale") if kind == "v2" else ("relative_position_bias_table",)
    assert {name for name in plain if ".attn." in name} == {n for n in plain if any(part in n for part in of_positions)}


def maxvit() -> nn.Module:
    from torchvision.models.maxvit import MaxVit

    net: nn.Module = MaxVit((16, 16), 4, 4, [8], [1], 4, 0.1, num_classes=3)
    return net


def swin_of_timm() -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    sizes: dict[str, Any] = {"img_size": 8, "patch_size": 2, "window_size": 2, "embed_dim": 8}
    net: nn.Module = SwinTransformer(**sizes, depths=(2,), num_heads=(2,), num_classes=3)
    return net


@pytest.mark.parametrize(("make", "layers", "side"), [(maxvit, 17, 16), (swin_of_timm, 10, 8)])
def test_attention_that_calls_its_layers_converts_with_positions_left_plain(
    make: Callable[[], nn.Module], layers: int, side: int
) -> None:
    network = bayesianize(make(), "ffg-u", inducing=2).eval()
    assert len(network.layers) == layers
    assert any("relative_position_bias_table" in name for name, _ in network.net.named_parameters())
    assert network.sample(torch.randn(1, 3, side, side), 2).isfinite().all()


def drawn_weights(network: BayesianNetwork, draws: Draws) -> dict[str, Tensor]:
    """Of each layer, (K, d_out, d_in) with the bias as the last column."""
    operands = network.arrange(network.factors(), draws, {}).operands
    return {name: as_matrix(operands[layer]()) for name, layer in network.layers.items()}


@pytest.mark.parametrize("kind", SWINS)
def test_draws_are_torchvisions_networks_with_these_weights(kind: str) -> None:
    K = 3
    torch.manual_seed(0)
    net = SWINS[kind]().double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.2)
    network = bayesianize(net, "ffg-u", inducing=8, lam_max=0.0, spread=0.5, sigma_max=1.0).double()
    factors = network.factors()
    draws = Draws(K, torch.randn(K, factors.normals, dtype=torch.float64), 0)
    x = torch.randn(2, *SHAPE, dtype=torch.float64)
    with evaluating(network), torch.no_grad():
        found = network.run(x, factors, draws, {})
        weights = drawn_weights(network, draws)
        assert float(weights["features.1.0.attn.qkv"][:, 16:32, -1].std(0).min()) > 1e-3  # keys have a bias in V2 too
        for k in range(K):
            own = copy.deepcopy(net)
            for name, W in weights.items():
                layer: Any = own.get_submodule(name)
                assert type(layer) in (nn.Linear, nn.Conv2d)
                if layer.bias is not None:
                    layer.bias.copy_(W[k, :, -1])
                layer.weight.copy_(W[k, :, : layer.weight[0].numel()].view_as(layer.weight))
            assert any(isinstance(m, ShiftedWindowAttention) for m in own.modules())
            torch.testing.assert_close(found[k], own(x), rtol=1e-6, atol=1e-8)
    assert float(found.std(0).min()) > 1e-3


@pytest.mark.parametrize("kind", SWINS)
def test_training_reaches_the_projections(kind: str) -> None:
    network = bayesianize(SWINS[kind](), "ffg-u", inducing=4).train()
    network.sample(torch.randn(2, *SHAPE), 2).square().mean().backward()
    grads = {name: p.grad for name, p in network.named_parameters() if p.requires_grad}
    assert [name for name, grad in grads.items() if grad is None or not grad.isfinite().all()] == []


# stored and served

IN_SHORT = [pytest.param("v1", marks=pytest.mark.slow), "v2"]  # which does all that V1 does, and more


@pytest.mark.parametrize("kind", IN_SHORT)
@pytest.mark.parametrize("declared", [True, False])
def test_an_artifact_of_ones_own_network_answers_as_before(kind: str, declared: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = bayesianize(SWINS[kind](), "ffg-u", inducing=4, layers={"features.1.0.*": "deterministic"})
    manifest = save(network, tmp_path / "m", card=Card(input=Input(shape=SHAPE) if declared else None))
    assert manifest.traced is not None
    assert manifest.traced.input is None  # it takes maps of any size
    again = load(tmp_path / "m")
    for shape in (SHAPE, (3, 16, 24)):
        x = torch.randn(2, *shape)
        assert torch.equal(outputs(network, x), outputs(again.network, x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SWINS)
def test_a_stored_network_converts_as_the_original_does(kind: str, tmp_path: Path) -> None:
    net = SWINS[kind]()
    save(bayesianize(net, "deterministic"), tmp_path / "m", card=Card(input=Input(shape=SHAPE)))
    stored = load(tmp_path / "m").network.net
    assert bayesianize(stored, "ffg-u", inducing=4).layers.keys() == bayesianize(net, "ffg-u", inducing=4).layers.keys()
    x = torch.randn(2, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(stored(x), net(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", SWINS)
def test_a_network_with_a_name_is_stored_by_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OURS, "small-swin", SWINS[kind])
    network = bayesianize(build("small-swin", classes=3), "ffg-u", inducing=4)
    manifest = save(network, tmp_path / "m", card=Card(input=Input(shape=SHAPE)))
    assert (manifest.format, manifest.architecture.name, manifest.traced) == (1, "small-swin", None)
    again, x = load(tmp_path / "m"), torch.randn(2, *SHAPE)
    assert torch.equal(outputs(network, x), outputs(again.network, x))
    remember(network.net, Architecture(name="custom"))  # the same posterior as one's own network
    save(network, tmp_path / "own", card=Card(input=Input(shape=SHAPE)))
    assert torch.equal(outputs(load(tmp_path / "own").network, x), outputs(network, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin_t", "swin_v2_t"])
def test_torchvisions_networks_by_name(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = bayesianize(build(f"torchvision/{name}", classes=7), "ffg-u", inducing=16, lam_max=0.0)
    assert len(network.layers) == 1 + 12 * 4 + 3 + 1
    x = torch.randn(1, 3, 64, 64)
    manifest = save(network, tmp_path / "m", card=Card(input=Input(shape=(3, 64, 64))))
    assert manifest.traced is None
    before = outputs(network, x)
    assert float(before.std(0).min()) > 0
    assert torch.equal(before, outputs(load(tmp_path / "m").network, x))


@pytest.mark.parametrize("kind", IN_SHORT)
@pytest.mark.parametrize("lam_max", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
def test_the_form_that_is_served_answers_as_the_network_does(kind: str, lam_max: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = bayesianize(SWINS[kind](), "ffg-u", inducing=4, lam_max=lam_max)
    save(network, tmp_path / "m", card=Card(input=Input(shape=SHAPE)))
    model = load(tmp_path / "m")
    fused = with_units(model)
    form = fused.factors.form
    assert form is not None
    assert form is not model.network.net
    assert sum(isinstance(m, Unit) for m in form.modules()) == len(network.layers)
    served = [m for name, m in form.named_modules() if isinstance(m, WindowAttention) and name.startswith("attention_")]
    assert len(served) == 4
    assert all(m.fixed_bias is not None for m in served)
    assert all(m.fixed_bias is None for m in model.network.net.modules() if isinstance(m, WindowAttention))
    x = torch.randn(2, *SHAPE)
    one, other = (m.predict(x, 3, 1, keep_outputs=True).outputs for m in (fused, model))
    assert other is not None
    assert float(other.std(0).min()) > 0
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


BAD: dict[str, dict[str, Any]] = {
    "a window without width": {"window_size": [2]},
    "no window": {"window_size": [0, 2]},
    "a window of everything": {"window_size": [1 << 24, 1 << 24]},
    "backwards": {"shift_size": [-1, 0]},
    "no heads": {"num_heads": 0},
    "heads that do not divide": {"num_heads": 3},
}


@pytest.mark.parametrize("kind", ["WindowAttention", "WindowAttentionV2"])
@pytest.mark.parametrize("case", BAD)
def test_a_file_with_other_sizes_is_refused(kind: str, case: str) -> None:
    sizes: dict[str, Any] = {"dim": 4, "window_size": [2, 2], "shift_size": [0, 0], "num_heads": 2}
    with torch.device("meta"):
        construct(TorchModule(kind=kind, arguments=sizes))
        with pytest.raises(ArtifactError, match=f"its network has {kind} with"):
            construct(TorchModule(kind=kind, arguments=sizes | BAD[case]))
