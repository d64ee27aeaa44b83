"""Attention whose projections are layers: beside torch's own, converted, saved and served."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from dubito.models import bayesianize, load, save
from dubito.models.conversion.conversion import ensemble
from dubito.models.manifest import Card, Input
from dubito.models.network.attention import Attention, can_open, opened
from dubito.models.predictions.prediction import predict

SHAPES = {"batch": (3, 5, 8), "one": (5, 8)}
MASKS = ("none", "bool", "float", "per head", "padding", "both")


def _masks(kind: str, N: int | None, heads: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(1)
    hidden = torch.rand(5, 5, generator=rng) < 0.3
    hidden.fill_diagonal_(False)
    padded = torch.tensor([False, False, False, True, True])
    padding = padded if N is None else padded.expand(N, 5)
    match kind:
        case "none":
            return {}
        case "bool":
            return {"attn_mask": hidden}
        case "float":
            return {"attn_mask": torch.randn(5, 5, generator=rng)}
        case "per head":
            return {"attn_mask": torch.randn((N or 1) * heads, 5, 5, generator=rng)}
        case "padding":
            return {"key_padding_mask": padding}
    return {"attn_mask": hidden, "key_padding_mask": padding}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_it_computes_what_torchs_attention_does(bias: bool, batch_first: bool, shape: str, mask: str) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first).eval().double()
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
    ours = Attention(theirs)
    x = torch.randn(*SHAPES[shape], dtype=torch.float64)
    if shape == "batch" and not batch_first:
        x = x.transpose(0, 1)
    other = torch.randn_like(x)
    masks = {
        k: m if m.dtype == torch.bool else m.double()
        for k, m in _masks(mask, 3 if shape == "batch" else None, 2).items()
    }
    for (k, v), weights, average in itertools.product(
        [(x, x), (other, other), (x, other)], [True, False], [True, False]
    ):
        expected = theirs(x, k, v, need_weights=weights, average_attn_weights=average, **masks)
        found = ours(x, k, v, need_weights=weights, average_attn_weights=average, **masks)
        torch.testing.assert_close(found[0], expected[0])
        assert (found[1] is None) == (expected[1] is None)
        if weights:
            torch.testing.assert_close(found[1], expected[1])


@pytest.mark.parametrize(
    ("options", "can"),
    [({}, True), ({"kdim": 4}, False), ({"add_bias_kv": True}, False), ({"add_zero_attn": True}, False)],
)
def test_only_attention_of_one_size_without_added_rows_is_opened(options: dict[str, object], can: bool) -> None:
    net = nn.MultiheadAttention(8, 2, **options)
    assert can_open(net) == can
    assert (opened(net) is net) != can


def test_opening_shares_the_parameters_and_leaves_the_network_alone() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    copy = opened(net)
    assert type(net.self_attn) is nn.MultiheadAttention
    assert isinstance(copy.self_attn, Attention)
    assert copy.self_attn.in_proj.weight is net.self_attn.in_proj_weight
    assert {id(p) for p in copy.parameters()} == {id(p) for p in net.parameters()}


def _vit() -> nn.Module:
    torch.manual_seed(0)
    net: nn.Module = VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3)
    nn.init.normal_(net.get_parameter("heads.head.weight"))
    return net


class Encoder(nn.Module):
    """A network of one's own on torch's encoder."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.encoder(x.unflatten(1, (4, 8))).mean(1)
        return self.head(mean)  # type: ignore[no-any-return]


NETWORKS = {"torchvision": (_vit, (3, 16, 16)), "encoder": (Encoder, (32,))}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("method", ["ffg-u", "ffg-w", "ensemble-u", "whvi"])
def test_a_transformer_converts_whole_and_its_mean_is_the_networks_answer(kind: str, method: str) -> None:
    make, shape = NETWORKS[kind]
    torch.manual_seed(0)
    net = make().eval()
    x = torch.randn(2, *shape)
    network = bayesianize(net, method, inducing=32)
    attentions = [name for name, m in net.named_modules() if isinstance(m, nn.MultiheadAttention)]
    assert attentions
    assert {f"{name}.{part}" for name in attentions for part in ("in_proj", "out_proj")} <= set(network.layers)
    drawn = predict(network, network.factors(), x, 5, 0, keep_outputs=True).outputs
    assert drawn is not None
    assert drawn.shape == (5, 2, 3)
    assert float(drawn.std(0).min()) > 0
    if method == "ffg-w":  # the only one of these whose mean is W exactly, whatever its size
        with torch.no_grad():
            torch.testing.assert_close(network.mean(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", NETWORKS)
def test_draws_together_are_draws_one_at_a_time(kind: str) -> None:
    make, shape = NETWORKS[kind]
    torch.manual_seed(0)
    network = bayesianize(make().eval(), "ffg-u", inducing=8, spread=0.3, sigma_max=1.0)
    factors, x = network.factors(), torch.randn(2, *shape)
    together = predict(network, factors, x, 4, 7, keep_outputs=True).outputs
    alone = torch.cat([predict(network, factors, x[i : i + 1], 4, 7, keep_outputs=True).outputs for i in range(2)], 1)  # type: ignore[misc]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", NETWORKS)
def test_an_artifact_of_a_transformer_answers_as_before(kind: str, tmp_path: Path) -> None:
    make, shape = NETWORKS[kind]
    torch.manual_seed(0)
    network = bayesianize(make().eval(), "ffg-u", inducing=8, layers={"*1.*": "deterministic"})
    path = tmp_path / "vit.safetensors"
    save(network, path, card=Card(input=Input(shape=shape)))
    again = load(path)
    x = torch.randn(2, *shape)
    before = predict(network, network.factors(), x, 3, 1, keep_outputs=True).outputs
    after = predict(again.network, again.network.factors(), x, 3, 1, keep_outputs=True).outputs
    assert before is not None
    assert after is not None
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_an_ensemble_of_transformers_is_its_networks() -> None:
    torch.manual_seed(0)
    nets = [Encoder().eval() for _ in range(3)]
    x = torch.randn(2, 32)
    network = ensemble(nets)
    drawn = predict(network, network.factors(), x, 3, 0, keep_outputs=True).outputs
    assert drawn is not None
    with torch.no_grad():
        expected = torch.stack([net(x) for net in nets])
    order = [int((expected - row).abs().flatten(1).sum(1).argmin()) for row in drawn]
    assert sorted(order) == [0, 1, 2]
    torch.testing.assert_close(drawn, expected[order], rtol=1e-5, atol=1e-5)
