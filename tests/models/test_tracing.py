"""Networks of one's own: written as data, rebuilt without their class, with the same answers to the bit."""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, predict, save
from dubito.models.artifact.artifact import KEY, digest
from dubito.models.conversion.architectures import FACTORIES
from dubito.models.errors import ArtifactError, ConversionError
from dubito.models.manifest import Card, Input, Precision
from dubito.models.names import METHODS
from dubito.models.network.network import BayesianNetwork
from dubito.models.tracing.operators import MODULES
from dubito.models.tracing.rebuild import TracedNetwork
from dubito.service.engine.fusion import fuse
from tests import forked
from tests.small_models import stored

# networks such as people write


class Scale(nn.Module):
    """A module with a tensor and no other modules, as LayerScale."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(features))

    def forward(self, x: Tensor) -> Any:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.conv(x))
        y += x
        return F.relu(y, inplace=True)


class Own(nn.Module):
    """Loops, branches on sizes, in-place operators, buffers, constants, arguments with defaults."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList(Block(4) for _ in range(2))
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]))
        self.grid: Tensor
        self.register_buffer("grid", torch.linspace(0, 1, 8), persistent=False)
        self.shift = torch.tensor(0.25)  # no buffer: a plain attribute
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor, extra: Tensor | None = None, scale: float = 0.5) -> Any:
        B, C, H, _ = x.shape
        assert C == 3
        assert len(x.shape) == 4
        if H % 2 == 1:
            raise ValueError("an even height is needed")
        x = (x - self.get_buffer("mean").view(1, -1, 1, 1)) * scale + self.shift
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if extra is not None:
            x = x + extra
        weights = torch.arange(H, device=x.device).float() * self.grid[:H]
        edge = torch.zeros(B, 4, dtype=x.dtype, device=x.device)
        edge[:, 1:3] = x[:, 1:3, 0, -1]
        rows = (x * weights[None, None, :, None]).mean((-2, -1)).reshape(len(x), -1)
        rows = rows + rows.topk(2).values.sum(1, keepdim=True) - rows.max(1, keepdim=True)[0]
        return self.head(torch.cat([rows, edge], dim=-1))


class Attention(nn.Module):
    """A small transformer: class token, position embedding, torch's attention and LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = Scale(8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        y, _ = self.attention(x, x, x, need_weights=False)
        q = k = v = self.norm(x + self.scale(y)).unsqueeze(1)
        x = x + F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return self.head(x[:, 0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x).mean(1))


class Causal(nn.Module):
    """A transformer in which no row looks ahead: masks of -infinity as a buffer, and as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1))
        self.ahead = torch.full((5, 5), -math.inf).triu(2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)
        scores = x @ y.transpose(1, 2) + self.ahead
        return self.head(self.norm((scores.softmax(-1) @ y)[:, -1]))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        out, (hidden, _) = self.lstm(x)
        return self.head(out.mean(1) + hidden[-1])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embedding(x.long()).mean(1))


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Sequential(nn.GELU("tanh"), nn.Linear(4, 2)))


OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own": (Own, (3, 8, 8)),
    "attention": (Attention, (1, 8, 8)),
    "encoder": (Encoder, (5, 8)),
    "causal": (Causal, (5, 8)),
    "recurrent": (Recurrent, (5, 8)),
    "words": (Words, (7,)),
    "one layer": (lambda: nn.Linear(4, 2), (4,)),
    "tied": (tied, (4,)),
}
each = pytest.mark.parametrize("name", OWN)


def made(name: str, method: str = "deterministic", **options: Any) -> tuple[BayesianNetwork, tuple[int, ...], Tensor]:
    torch.manual_seed(0)
    make, shape = OWN[name]
    net = make()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.randn(module.num_features)
                module.running_var = torch.rand(module.num_features) + 0.5
    x = torch.randint(0, 10, (3, *shape)).float() if name == "words" else torch.randn(3, *shape)
    network = bayesianize(net.eval(), method, unsupported="leave", **options)
    return network.eval(), shape, x


@each
def test_a_plain_network_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    network, shape, x = made(name)
    model = stored(network, tmp_path / "m", input=Input(shape=shape))
    with torch.no_grad():
        assert torch.equal(model.network.net(x), network.net(x))
    assert [n for n, _ in model.network.named_parameters()] == [n for n, _ in network.named_parameters()]
    assert model.manifest.format == 4
    assert not any(type(m) in (Own, Block, Attention, Scale, Encoder, Causal, Words) for m in model.network.modules())


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8"])
def test_masks_may_hold_infinity_in_every_precision(precision: Precision, tmp_path: Path) -> None:
    network, shape, x = made("causal", "ffg-u", inducing=2)
    save(network, tmp_path / "m", card=Card(input=Input(shape=shape)), precision=precision)
    model = load(tmp_path / "m")
    masks = [t for name, t in model.network.net.named_buffers() if name.endswith(("mask", "ahead"))]
    assert sorted(int(t.isinf().sum()) for t in masks) == [6, 10]
    outputs = model.predict(x, 4, 0, keep_outputs=True).outputs
    assert outputs is not None
    assert outputs.isfinite().all()


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("mask", math.nan, "'net.mask' holds NaN,"),
        ("norm.running_var", math.inf, "'net.norm.running_var' holds NaN or infinity"),
        ("head.weight", -math.inf, "holds NaN or infinity"),
        ("attention.in_proj_bias", math.inf, "holds NaN or infinity"),
    ],
)
def test_infinity_anywhere_else_is_a_training_that_diverged(
    place: str, value: float, words: str, tmp_path: Path
) -> None:
    """Refused at save, and at load where a file holds it all the same."""
    network, shape, _ = made("causal")
    save(network, tmp_path / "m", card=Card(input=Input(shape=shape)))
    network.net.state_dict()[place].flatten()[0] = value
    with pytest.raises(ArtifactError, match=words):
        save(network, tmp_path / "no", card=Card(input=Input(shape=shape)))
    content = (tmp_path / "m").read_bytes()
    tensors = parse(content)
    (name,) = (key for key in tensors if key.endswith(place))
    tensors[name].flatten()[0] = value
    stated = load(tmp_path / "m").manifest.model_dump(mode="json")
    stated["sha256"] = digest(stated, tensors)
    (tmp_path / "m").write_bytes(serialise(tensors, {KEY: json.dumps(stated)}))
    with pytest.raises(ArtifactError, match="holds NaN"):
        load(tmp_path / "m")


METHOD_OPTIONS: dict[str, dict[str, Any]] = {"fcg-w": {"covariance_limit": 10**6}}


BY_INPUTS = {"gi", "fac-gi", "rand-gi", "dgp"}  # whose layers are drawn by inducing inputs, which BatchNorm would mix
# every method with one network, and two of them with every network; the other pairs are slow
QUICK = {"own": {*METHODS}, "attention": {METHODS[0], *BY_INPUTS}, "encoder": {METHODS[0], "gi"}}
PAIRS = [
    pytest.param(n, m, marks=() if m in QUICK[n] else pytest.mark.slow)
    for n in ("own", "attention", "encoder")
    for m in METHODS
    if not (n == "own" and m in BY_INPUTS)
]


@cache
def plain_and_rebuilt(name: str) -> tuple[nn.Module, nn.Module]:
    plain, shape, _ = made(name)
    with TemporaryDirectory() as folder:
        return plain.net, stored(plain, Path(folder) / "plain", input=Input(shape=shape)).network.net


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_every_method_comes_back_to_the_bit_and_converts_the_rebuilt_network_alike(
    name: str, method: str, tmp_path: Path
) -> None:
    _, shape, x = made(name)
    options = {"inducing": 2, "members": 2} | METHOD_OPTIONS.get(method, {})
    if method in BY_INPUTS:
        options["examples"] = (x, None)
    network, *_ = made(name, method, **options)
    before = predict(network, network.factors(), x, 5, 3, keep_outputs=True).outputs
    after = stored(network, tmp_path / "m", input=Input(shape=shape)).predict(x, 5, 3, keep_outputs=True).outputs
    plain, rebuilt = plain_and_rebuilt(name)
    torch.manual_seed(1)
    one = bayesianize(plain, method, unsupported="leave", **options).eval()
    torch.manual_seed(1)
    other = bayesianize(rebuilt, method, unsupported="leave", **options).eval()
    assert list(one.layers) == list(other.layers)
    outputs = [predict(n, n.factors(), x, 5, 3, keep_outputs=True).outputs for n in (one, other)]
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
    assert outputs[0] is not None
    assert outputs[1] is not None
    assert torch.equal(outputs[0], outputs[1])


@each
def test_a_rebuilt_network_gives_the_same_file(name: str, tmp_path: Path) -> None:
    network, shape, _ = made(name)
    model = stored(network, tmp_path / "first", input=Input(shape=shape))
    save(model, tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_rebuilt_network_with_another_head_is_traced_again(tmp_path: Path) -> None:
    network, shape, x = made("own")
    model = stored(network, tmp_path / "first", input=Input(shape=shape))
    model.network.net.head = nn.Linear(8, 2)
    again = stored(model.network, tmp_path / "second", input=Input(shape=shape))
    with torch.no_grad():
        assert torch.equal(again.network.net(x), model.network.net(x))
    assert again.network.net(x).shape == (3, 2)


def test_folded_batchnorms_and_copies_of_members_come_back(tmp_path: Path) -> None:
    for options in ({"batchnorm": "fold"}, {"batchnorm": "keep"}):
        network, shape, x = made("own", "ensemble-w", members=3)
        save(network, tmp_path / "m", card=Card(input=Input(shape=shape)), **options)  # type: ignore[arg-type]
        before = predict(network, network.factors(), x, 3, 0, keep_outputs=True).outputs
        model = load(tmp_path / "m")
        after = model.predict(x, 3, 0, keep_outputs=True).outputs
        assert before is not None
        assert after is not None
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
        save(model, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "m").read_bytes()


def test_the_engine_fuses_a_rebuilt_network(tmp_path: Path) -> None:
    network, shape, _ = made("own", "ffg-u", inducing=2)
    model = stored(network, tmp_path / "m", input=Input(shape=shape))
    fused = fuse(model.network.net, torch.device("cpu"))
    assert sum(type(m).__name__ == "Unit" for m in fused.modules()) == 4  # the stem, two blocks and the head


def test_a_rebuilt_network_can_be_trained(tmp_path: Path) -> None:
    network, shape, x = made("own", "ffg-u", inducing=2)
    again = stored(network, tmp_path / "m", input=Input(shape=shape)).network.train()
    loss = again.sample(x, 2).square().mean() + again.kl()
    loss.backward()
    assert all(p.grad is not None for p in again.parameters() if p.requires_grad)


def test_every_module_of_the_list_can_be_read_off_and_built(tmp_path: Path) -> None:
    """Those whose arguments follow from defaults and one or two sizes."""
    from dubito.models.tracing.modules import construct, describe, parameters_of

    sizes: dict[str, Any] = {
        "num_groups": 2,
        "num_channels": 4,
        "kernel_size": 3,
        "groups": 2,
        "output_size": 2,
        "padding": 1,
    }
    sizes |= {"upscale_factor": 2, "downscale_factor": 2, "num_heads": 2, "embed_dim": 4, "d_model": 4, "nhead": 2}
    sizes |= {"window_size": (2, 2), "shift_size": (1, 1)}
    sizes |= {"unflattened_size": (2, 2), "dim": 2, "norm_type": 2.0, "threshold": 0.1, "value": 2.0, "size": 4}
    checked = 0
    for kind, cls in MODULES.items():
        if kind in ("TransformerEncoder", "ScaleShift"):
            continue
        needed = [name for name, default in parameters_of(kind).items() if type(default) is object]
        module = cls(**{name: sizes.get(name, 4) for name in needed})
        entry = describe(module)
        assert entry is not None, kind
        assert repr(construct(entry)) == repr(module)
        checked += 1
    assert checked > 90


# what cannot be written as data


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        if x.mean() > 0:
            return self.a(x)
        return self.b(x)


class ByRows(Branching):
    def forward(self, x: Tensor) -> Any:
        return self.a(x) if len(x) > 2 else self.b(x)


class Random(Branching):
    def forward(self, x: Tensor) -> Any:
        return self.a(F.dropout(x, 0.5))


class Asking(Branching):
    def forward(self, x: Tensor) -> Any:
        return self.a(x) if isinstance(x, Tensor) else self.b(x)


class Several(Branching):
    def forward(self, x: Tensor) -> Any:
        return self.a(x), self.b(x)


class Two(Branching):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return self.a(x) + self.b(y)


class Counting(Branching):
    def forward(self, x: Tensor) -> Any:
        self.a.bias.add_(1)
        return self.a(x)


class Exotic(Branching):
    def forward(self, x: Tensor) -> Any:
        return self.a(torch.linalg.inv(x))


REFUSED: dict[str, tuple[type[nn.Module], str]] = {
    "values": (Branching, r"test_tracing.py, line \d+, in forward: `if x.mean\(\) > 0:`: it needs the numbers"),
    "rows": (
        ByRows,
        r"`return self.a\(x\) if len\(x\) > 2 else self.b\(x\)`: it needs the number of inputs in a batch",
    ),
    "random numbers": (Random, "changes from call to call: it draws random numbers or keeps a state"),
    "types": (Asking, "answers differently .* ask for the type of its input"),
    "several outputs": (Several, "forward method returns a tuple; expected one tensor. Wrap it in"),
    "several inputs": (Two, r"takes several inputs \(x, y\); expected one"),
    "state": (Counting, r"line \d+, in forward: `self.a.bias.add_\(1\)`: it changes 'a.bias' in place"),
    "other functions": (
        Exotic,
        r"`return self.a\(torch.linalg.inv\(x\)\)`: the function 'linalg_inv' is not on the list",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_that_cannot_be_traced_is_refused_with_its_line(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, reason = REFUSED[case]
    network = bayesianize(make(), "deterministic")
    with pytest.raises(ArtifactError, match=reason) as caught:
        save(network, tmp_path / "m", card=Card(input=Input(shape=(4,))))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


NORMS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "weight norm": (nn.utils.weight_norm, "remove_weight_norm(layer)"),
    "spectral norm": (nn.utils.spectral_norm, "remove_spectral_norm(layer)"),
    "parametrised": (nn.utils.parametrizations.weight_norm, "parametrize.remove_parametrizations(layer, 'weight')"),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_computes_a_layers_weight_in_each_pass_is_named_after_training_too(norm: str, tmp_path: Path) -> None:
    """Such a hook leaves a tensor with a gradient's history, of which there is no copy."""
    make, remove = NORMS[norm]
    net = nn.Sequential(make(nn.Linear(4, 4)), nn.Linear(4, 2))
    with torch.no_grad():
        net(torch.rand(3, 4))
    network = bayesianize(net, "ffg-w", unsupported="leave")
    network(torch.rand(3, 4)).sum().backward()
    with pytest.raises(ArtifactError, match=re.escape(f"torch.nn.utils.{remove} keeps them as they are")):
        save(network, tmp_path / "m", card=Card(input=Input(shape=(4,))))


class Keeps(Branching):
    """Keeps a result of the last pass."""

    def forward(self, x: Tensor) -> Any:
        self.last = self.a(x)
        return self.last + self.b(x)


class KeepsList(Branching):
    def forward(self, x: Tensor) -> Any:
        self.last = [self.a(x)]
        return self.last[0] + self.b(x)


def test_results_that_a_network_keeps_are_left_out(tmp_path: Path) -> None:
    network = bayesianize(Keeps(), "ffg-w")
    network(torch.rand(3, 4)).sum().backward()
    save(network, tmp_path / "m", card=Card(input=Input(shape=(4,))))
    x = torch.rand(3, 4)
    expected = predict(network, network.factors(), x, 2, 0, keep_outputs=True).outputs
    assert expected is not None
    torch.testing.assert_close(load(tmp_path / "m").predict(x, 2, 0, keep_outputs=True).outputs, expected)
    network = bayesianize(KeepsList(), "ffg-w")
    network(torch.rand(3, 4)).sum().backward()
    with pytest.raises(ArtifactError, match="the network cannot be copied: Only Tensors created explicitly"):
        save(network, tmp_path / "n", card=Card(input=Input(shape=(4,))))


@pytest.mark.parametrize("method", ["deterministic", "mc-dropout", "ffg-u"])
def test_a_network_in_float64_is_written_as_one_in_float32(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    network = bayesianize(net, method)
    save(network, tmp_path / "m", card=Card(input=Input(shape=(1, 6, 6))))
    assert {t.dtype for t in network.parameters()} == {torch.float64}
    x = torch.rand(3, 1, 6, 6)
    expected = predict(network, network.factors(), x, 2, 0, keep_outputs=True).outputs
    assert expected is not None
    loaded = load(tmp_path / "m")
    assert type(loaded.network.get_submodule("net.1")) is nn.BatchNorm2d
    torch.testing.assert_close(
        loaded.predict(x, 2, 0, keep_outputs=True).outputs, expected, check_dtype=False, rtol=1e-4, atol=1e-4
    )


class Mixed(nn.Module):
    """Computes its last layer in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3).double()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).double())


def test_a_network_that_would_fail_in_float32_is_refused(tmp_path: Path) -> None:
    """A Bayesian layer computes in the type of what it gets."""
    card = Card(input=Input(shape=(4,)))
    with pytest.raises(ArtifactError, match="types float32, float64, and fails in float32, in which a file is loaded"):
        save(bayesianize(Mixed(), "deterministic"), tmp_path / "m", card=card)
    save(bayesianize(Mixed(), "ffg-w"), tmp_path / "m", card=card)
    load(tmp_path / "m").predict(torch.rand(2, 4), 2, 0)


def test_a_network_by_its_factory_keeps_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Branches(Mixed):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x if x.mean() > 0 else -x)

    monkeypatch.setitem(FACTORIES, "tests:branches", Branches)
    save(bayesianize(build("tests:branches"), "deterministic"), tmp_path / "m", card=Card(input=Input(shape=(4,))))
    load(tmp_path / "m").predict(torch.rand(2, 4), 2, 0)


class Part(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.t = nn.Linear(6, 6), torch.rand(6)

    def forward(self, x: Tensor) -> Any:
        return self.a(x) * self.t


class NamedLikeOurs(nn.Module):
    """Its tensors and modules have names that those of posteriors have."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor
        self.copies = nn.ModuleList([Part(), Part()])
        self.keep, self.directions = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
        self.head = nn.Linear(6, 3)
        self.register_buffer("mask", torch.rand(6))
        self.head.register_buffer("keep", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Any:
        for part in self.copies:
            x = part(x)
        return self.head(x * self.keep * self.directions + self.mask) * self.head.keep


@pytest.mark.parametrize("method", ["deterministic", "ffg-u", "ensemble-w"])
def test_names_that_we_use_ourselves_are_free(method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = bayesianize(NamedLikeOurs(), method, inducing=2, layers={"head": "deterministic"})
    x = torch.rand(3, 6)
    expected = predict(network, network.factors(), x, 2, 0, keep_outputs=True).outputs
    assert expected is not None
    save(network, tmp_path / "m", card=Card(input=Input(shape=(6,))))
    found = load(tmp_path / "m").predict(x, 2, 0, keep_outputs=True).outputs
    torch.testing.assert_close(found, expected, rtol=0, atol=0)  # nothing was rounded


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"times": 2}

        def set_extra_state(self, state: Any) -> None: ...

    network = bayesianize(nn.Sequential(Extra(4, 4), nn.Linear(4, 2)), "ffg-w", unsupported="leave")
    with pytest.raises(ArtifactError, match=r"^0 keeps a state that is no tensor \(get_extra_state\)"):
        save(network, tmp_path / "m")


class Called(nn.Linear):
    def __call__(self, x: Tensor) -> Any:
        return 3 * super().__call__(x)


def test_what_a_network_does_around_its_forward_method_is_not_lost(tmp_path: Path) -> None:
    """Without a declared input no answers are compared."""
    with pytest.raises(ArtifactError, match="Called has a __call__ of its own"):
        save(bayesianize(Called(4, 2), "deterministic"), tmp_path / "m")
    network = bayesianize(nn.Sequential(Called(4, 4), nn.Linear(4, 2)), "deterministic")
    save(network, tmp_path / "m")
    x = torch.rand(2, 4)
    torch.testing.assert_close(load(tmp_path / "m").network(x), network(x))


def test_a_part_whose_name_cannot_be_kept_is_to_get_another(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"'.xfcber', which is taken or no plain name .* Give that part another"):
        save(bayesianize(Around("über"), "deterministic"), tmp_path / "m")
    with pytest.raises(ArtifactError, match="'calls', which is taken"):
        save(bayesianize(Around("calls"), "deterministic"), tmp_path / "m")


class Around(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, 2))
        self.name = name

    def forward(self, x: Tensor) -> Any:
        return getattr(self, self.name)(x) + 1


def test_branches_on_sizes_need_a_shape(tmp_path: Path) -> None:
    network, *_ = made("own")
    with pytest.raises(ArtifactError, match="the shape of an input is known: save"):
        save(network, tmp_path / "m")


def test_what_was_traced_for_one_shape_declares_that_shape(tmp_path: Path) -> None:
    network, shape, _ = made("own")
    assert save(network, tmp_path / "m", card=Card(input=Input(shape=shape))).traced.input == shape  # type: ignore[union-attr]
    network, shape, _ = made("attention")
    assert save(network, tmp_path / "m", card=Card(input=Input(shape=shape))).traced.input is None  # type: ignore[union-attr]


def test_an_input_that_does_not_fit_is_noticed_at_save(tmp_path: Path) -> None:
    network, *_ = made("attention")
    with pytest.raises(ArtifactError, match=r"cannot take inputs of shape \(1, 9, 4\)"):
        save(network, tmp_path / "m", card=Card(input=Input(shape=(1, 9, 4))))


# elsewhere

ELSEWHERE = """
import sys, torch
from dubito.models import load
model = load(sys.argv[1])
torch.manual_seed(0)
out = model.predict(torch.randn(3, 3, 8, 8), 4, 1, keep_outputs=True).outputs
print([v.hex() for v in out.flatten().tolist()])
print(sorted(m for m in sys.modules if m.startswith(("tests.models", "torchvision", "timm"))))
"""


def test_it_loads_where_its_class_is_not(tmp_path: Path) -> None:
    network, shape, _ = made("own", "ffg-u", inducing=2)
    save(network, tmp_path / "m", card=Card(input=Input(shape=shape)))
    torch.manual_seed(0)
    x = torch.randn(3, 3, 8, 8)
    expected = predict(network, network.factors(), x, 4, 1, keep_outputs=True).outputs
    assert expected is not None
    said = forked.run(tmp_path / "m", code=ELSEWHERE)
    assert said.stdout.splitlines() == [str([v.hex() for v in expected.flatten().tolist()]), "[]"], said.stderr


class Past(Branching):
    """Reads the weight of one of its layers without calling that layer, as attention of torchvision's Swin does."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.a.weight, self.a.bias) + self.b(x)


def test_a_layer_whose_weight_is_read_past_it_stays_as_it_is(tmp_path: Path) -> None:
    network = bayesianize(Past(), "deterministic", layers={"a": "deterministic"})
    save(network, tmp_path / "m", card=Card(input=Input(shape=(4,))))
    traced = load(tmp_path / "m").network.net
    with pytest.raises(ConversionError, match=r"a \(Linear, whose weights are read without calling it\)"):
        bayesianize(traced, "ffg-u", inducing=2)
    left = bayesianize(traced, "ffg-u", inducing=2, unsupported="leave")
    assert list(left.layers) == ["b"]
    assert predict(left, left.factors(), torch.randn(3, 4), 2).samples == 2


def test_an_earlier_artifact_of_ones_own_network_takes_a_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Format 1 says `custom` and no more: the caller brings the network, or names the one factory that makes it."""
    network, shape, x = made("attention")
    manifest = save(network, tmp_path / "m", card=Card(input=Input(shape=shape)))
    content = (tmp_path / "m").read_bytes()
    before = manifest.model_copy(update={"format": 1, "traced": None})
    signed = before.model_copy(update={"sha256": digest(before.model_dump(mode="json"), parse(content))})
    (tmp_path / "m").write_bytes(serialise(parse(content), {KEY: signed.model_dump_json()}))
    with pytest.raises(
        ArtifactError, match="says nothing of its network: give the factory that makes it with --network"
    ):
        load(tmp_path / "m")
    for permitted in list(FACTORIES):  # by other tests
        monkeypatch.delitem(FACTORIES, permitted)
    monkeypatch.setitem(FACTORIES, "tests:Attention", Attention)
    again = load(tmp_path / "m").network.net
    assert isinstance(again, Attention)
    with torch.no_grad():
        assert torch.equal(again(x), network.net(x))
    monkeypatch.setitem(FACTORIES, "tests:Own", Own)
    with pytest.raises(ArtifactError, match="says nothing of its network"):
        load(tmp_path / "m")


def test_named_networks_are_saved_by_their_names_as_before(tmp_path: Path) -> None:
    manifest = save(bayesianize(build("mlp", inputs=4, hidden=[3], outputs=2), "ffg-w"), tmp_path / "m")
    assert (manifest.format, manifest.architecture.name, manifest.traced) == (1, "mlp", None)


def test_a_traced_network_is_its_calls(tmp_path: Path) -> None:
    network, shape, _ = made("attention")
    net = stored(network, tmp_path / "m", input=Input(shape=shape)).network.net
    assert isinstance(net, TracedNetwork)
    assert not math.isnan(len(net.calls.steps))


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "networks.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, flags=re.S | re.M)[0]
    ended = forked.begin(code, [], tmp_path, tmp_path).end()
    assert ended.returncode == 0, ended.stderr
    assert load(tmp_path / "mine.safetensors").card.labels == ("cat", "dog")
