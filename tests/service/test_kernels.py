"""What a GPU serves with, as far as that can be told without one; `test_cuda.py` has the rest."""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, save
from dubito.models.conversion.directions import set_directions
from dubito.models.manifest import Card, Input, Manifest
from dubito.models.network.geometry import Execution
from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.network.plan import cheapest
from dubito.models.posteriors.inducing import Inducing
from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import bytes_of, reside
from dubito.service.engine.between import Between, Norm, with_between
from dubito.service.engine.fusion import Unit, fuse, with_units
from dubito.service.engine.graphs import for_gpu, tap_by_tap
from dubito.service.engine.plans import PlanCache, Plans
from tests import forked
from tests.faulty import need
from tests.small_models import bottlenecks, mixed, spoiled

CPU = torch.device("cpu")


@pytest.mark.skipif(find_spec("triton") is None, reason="no triton: the GPU's kernels are not tested")
@pytest.mark.parametrize("words", [["short"], pytest.param([], marks=pytest.mark.slow)], ids=["short", "whole"])
def test_the_kernels_by_tritons_interpreter(words: list[str]) -> None:
    checks = Path(__file__).with_name("interpreted.py").read_text()
    run = forked.run(*words, code=forked.INTERPRET + checks)
    if "triton/runtime/interpreter.py" in run.stderr and "only 0-dimensional arrays can be converted" in run.stderr:
        pytest.skip("this triton's interpreter does not work with this numpy: the GPU's kernels are not tested")
    assert run.returncode == 0, run.stderr


POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no triton: the GPU's kernels are not compiled")
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus_that_are_not_here(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler refuses what the interpreter takes, such as a condition whose types do not agree."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from dubito.models.numerics import hadamard_kernel, normals_kernel
    from dubito.models.posteriors import inducing_kernel
    from dubito.service.engine import kernels, plain_kernels
    from tests.service import interpreted

    compiled: set[tuple[str, str]] = set()

    def compile_it(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        named = dict(zip((parameter.name for parameter in kernel.params), args, strict=True))
        constants = {p.name: named[p.name] for p in kernel.params if p.is_constexpr}
        signature = {name: "constexpr" if name in constants else _type_of(value) for name, value in named.items()}
        source = ASTSource(kernel, signature, constants)
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        compiled.add((kernel.fn.__module__, kernel.fn.__name__))

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what triton 3.9 does without it, after a warning
    monkeypatch.setattr(JITFunction, "run", compile_it)
    half = torch.bfloat16
    checks: list[Callable[[], None]] = [
        *(partial(interpreted.check_convolution, *case, half) for case in interpreted.CASES[2:]),
        partial(interpreted.check_linear, *interpreted.LINEAR[0], half),
        *(partial(interpreted.check_ahead, *case, half) for case in interpreted.AHEAD[::2]),
        *(partial(interpreted.check_class_sums, *case, half) for case in interpreted.SUMMED),
        *(partial(interpreted.check_layer_norm, *case, half) for case in interpreted.NORMED[1:]),
        *(partial(interpreted.check_depthwise, *case, half) for case in interpreted.DEPTHWISE),
        partial(interpreted.check_max_pool, *interpreted.POOLED[0], half),
        partial(interpreted.check_finish, "silu", half),
        partial(interpreted.check_normals, 3, 0, 2, 5000),
        partial(interpreted.check_hadamard, 512, half),
        *(partial(interpreted.check_together, *law, half) for law in interpreted.LAWS),
    ]
    for check in checks:
        with suppress(AssertionError):  # nothing is computed
            check()
    there = {
        (kernel.fn.__module__, kernel.fn.__name__)
        for module in (hadamard_kernel, inducing_kernel, kernels, normals_kernel, plain_kernels)
        for kernel in vars(module).values()
        if isinstance(kernel, JITFunction) and kernel.fn.__name__.endswith("_kernel")
    }
    assert compiled >= there


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def answers(network: BayesianNetwork, x: Tensor, **changes: object) -> Tensor:
    factors = network.factors()
    torch.manual_seed(1)
    draws = Draws(3, torch.randn(3, factors.normals), 0)
    with torch.inference_mode():
        return network.run(x, replace(factors, **changes), draws, cheapest(factors))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("architecture", "units", "normed", "summed"),
    [("residual", 8, 7, 2), ("lenet", 5, 0, 0), ("cnn", 6, 4, 0)],
)
def test_units_answer_as_the_network_does(architecture: str, units: int, normed: int, summed: int) -> None:
    torch.manual_seed(0)
    net = bottlenecks() if architecture == "residual" else build(architecture)
    network = bayesianize(spoiled(net), "ffg-u", inducing=4).eval()
    x = torch.randn(2, 3, 12, 12) if architecture == "residual" else torch.randn(2, 1, 28, 28)
    form = fuse(network.net, CPU)
    found = [m for m in form.modules() if isinstance(m, Unit)]
    assert len(found) == units
    assert sum(unit.norm is not None for unit in found) == normed
    calls = [node for node in form.graph.nodes if "unit" in str(node.target)]  # type: ignore[union-attr]
    assert sum(len(node.args) == 2 for node in calls) == summed
    torch.testing.assert_close(answers(network, x, form=form), answers(network, x), rtol=1e-4, atol=1e-5)


class Branches(nn.Module):
    """Two layers read a third one's outputs, which are changed in place before the second does, or before the first."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.stem, self.first, self.second = (nn.Linear(6, 6) for _ in range(3))
        self.relu, self.early = nn.ReLU(inplace=True), early

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        if self.early:
            return self.first(self.relu(h)) * self.second(h)  # type: ignore[no-any-return]
        return self.first(h) * self.second(self.relu(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("early", "alone"), [(True, []), (False, [False])])
def test_a_unit_begins_the_next_one_only_where_nothing_may_change_its_outputs_first(
    early: bool, alone: list[bool]
) -> None:
    form = fuse(bayesianize(Branches(early), "ffg-u", inducing=2).eval().net, CPU)
    nexts = [unit.next for unit in form.modules() if isinstance(unit, Unit) and unit.next is not None]
    assert [of_next.alone for of_next in nexts] == alone


class ReadTwice(nn.Module):
    """The inputs are read twice, or their size alone besides."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.second, self.twice = nn.Linear(6, 6), nn.Linear(6, 6), twice

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x.mT) if self.twice else out.view(x.shape)


@pytest.mark.parametrize("twice", [True, False])
def test_inputs_that_are_read_in_another_form_are_not_one_layers_alone(twice: bool) -> None:
    form = fuse(bayesianize(ReadTwice(twice), "ffg-u", inducing=2).eval().net, CPU)
    assert any(unit.shared for unit in form.modules() if isinstance(unit, Unit)) == (not twice)


def transformer() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    net: nn.Module = VisionTransformer(32, 8, 2, 2, 16, 32, dropout=0.1, num_classes=5)
    return net


def convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    net: nn.Module = ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=5)
    return net


def swin() -> nn.Module:
    from torchvision.models.swin_transformer import SwinTransformer

    net: nn.Module = SwinTransformer([4, 4], 16, [2], [2], [4, 4], num_classes=5)
    return net


def test_what_runs_between_layers_answers_as_the_network_does() -> None:
    """By torch here; `test_cuda.py` and triton's interpreter have the kernels."""
    torch.manual_seed(0)
    network = bayesianize(spoiled(mixed()), "ffg-u", inducing=4).eval()
    form = with_between(fuse(network.net, CPU))
    found = [type(m).__name__ for m in form.modules() if isinstance(m, Between)]
    assert found.count("Depthwise") == 4  # two of them with LayerNorm, one with BatchNorm and SiLU
    assert found.count("MaxPool") == 1
    assert found.count("Norm") == 3  # two of them behind a convolution
    calls = [node for node in form.graph.nodes if node.op != "placeholder"]  # type: ignore[union-attr]
    assert not [node for node in calls if "layer_norm" in str(node.target)]
    x = torch.randn(2, 3, 11, 10)
    torch.testing.assert_close(answers(network, x, form=form), answers(network, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lam_max", [0.0, 0.3])
@pytest.mark.parametrize(("build_net", "layers", "summed"), [(transformer, 10, 2), (convnext, 7, 2), (swin, 10, 2)])
def test_units_of_transformers(build_net: Callable[[], nn.Module], layers: int, summed: int, lam_max: float) -> None:
    """Projections of attention are units too; GELU is part of one, and a sum behind dropout that does nothing."""
    torch.manual_seed(0)
    net = build_net().eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.2)  # heads and layer scales of a new network are next to nothing
    network, x = bayesianize(net, "ffg-u", inducing=4, lam_max=lam_max).eval(), torch.randn(2, 3, 32, 32)
    form = fuse(network.net, CPU)
    found = [m for m in form.modules() if isinstance(m, Unit)]
    assert len(found) == len(network.layers) == layers
    assert sum(unit.then == "gelu" for unit in found) == 2
    calls = [node for node in form.graph.nodes if "unit" in str(node.target)]  # type: ignore[union-attr]
    assert sum(len(node.args) == 2 for node in calls) == summed
    expected = answers(network, x)
    assert float(expected.std(0).min()) > 0
    torch.testing.assert_close(answers(network, x, form=form), expected, rtol=1e-4, atol=1e-5)
    reordered = tap_by_tap(network.factors(), form)
    torch.testing.assert_close(
        answers(network, x, form=form, layers=reordered.layers),
        expected,
        rtol=1e-4,
        atol=1e-4 * float(expected.abs().max()),
    )


class Odd(nn.Module):
    """A layer used twice, one whose sum is with itself, a BatchNorm that two read, and a ReLU that comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(self.a(x).relu())
        y = self.norm(self.b(x))
        z = self.c(y + y)
        out: Tensor = (z + z + y).flatten(2).mean(-1)
        return out


def test_units_of_an_odd_network() -> None:
    torch.manual_seed(0)
    network = bayesianize(spoiled(Odd()), "ffg-u", inducing=4).eval()
    x = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(answers(network, x, form=fuse(network.net, CPU)), answers(network, x))


class Shared(nn.Module):
    """Adds in place to what is read again, by another name or through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = y.view(-1, 2, 2)
        y.add_(self.b(x))
        z.view(-1, 4).add_(self.c(x))
        return y + z.flatten(1) + self.c(x)  # type: ignore[no-any-return]


class Aliased(nn.Module):
    """torch.fx takes `+=` for a sum of its own, which leaves `z` as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = z = self.a(x)
        y += self.b(x)
        return z.relu() + y  # type: ignore[no-any-return]


class Noisy(nn.Module):
    """Draws random numbers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + torch.rand(4)  # type: ignore[no-any-return]


def test_sums_in_place_change_what_else_is_read() -> None:
    torch.manual_seed(0)
    network, x = bayesianize(Shared(), "ffg-u", inducing=2).eval(), torch.randn(3, 6)
    torch.testing.assert_close(answers(network, x, form=fuse(network.net, CPU)), answers(network, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("net", [Noisy, Aliased])
def test_a_network_that_its_units_do_not_follow_is_served_as_it_is(
    net: type[nn.Module], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """The random numbers of one would be the same in every answer."""
    need(dtype)
    torch.manual_seed(0)
    network = bayesianize(net(), "ffg-u", inducing=2).eval()
    model = Model(network, Manifest.model_construct(card=Card(input=Input(shape=(6,))), subnetwork=None))
    assert fuse(network.net, CPU) is not network.net
    with caplog.at_level(logging.INFO, "dubito"):
        assert with_units(reside(model, CPU, dtype)).factors.form is None
    assert caplog.records[0].levelno == (logging.WARNING if dtype == torch.float32 else logging.INFO)
    assert "away from the network's own" in vars(caplog.records[0])["why"]


class Mobile(nn.Module):
    """A depthwise convolution whose inputs, or outputs, are changed in place behind it."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 3)
        self.norm, self.batch, self.relu, self.change = nn.LayerNorm(8), nn.BatchNorm2d(8), nn.ReLU(True), change

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h)
        if self.change == "input":
            h.add_(1)
        elif self.change == "by a module":
            self.relu(h)
        if self.change == "view":
            return self.c(y.view(x.shape[0], -1, 8).mean(1))  # type: ignore[no-any-return]
        y = self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if self.change == "input" else self.batch(y)
        return self.c((y + h).mean((2, 3)))  # type: ignore[no-any-return]


class Turned(nn.Module):
    """A linear layer over channels that are put first again, then a sum."""

    def __init__(self, added: tuple[int, ...] | None, views: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.views = nn.Conv2d(3, 8, 1), nn.Linear(8, 8), nn.Linear(8, 3), views
        self.added = None if added is None else nn.Parameter(torch.randn(added))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.b(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = h + y if self.added is None else y + self.added
        return self.c(y.view(x.shape[0], 8, -1).mean(2) if self.views else y.mean((2, 3)))  # type: ignore[no-any-return]


class Overwritten(nn.Module):
    """Adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(self.a(x))
        return self.b(x)  # type: ignore[no-any-return]


ODD: list[tuple[Callable[[], nn.Module], tuple[int, ...], str]] = [
    (partial(Mobile, "input"), (3, 6, 6), "Depthwise"),
    (partial(Mobile, "by a module"), (3, 6, 6), "Depthwise"),
    (partial(Mobile, "view"), (3, 6, 6), "Depthwise"),
    (partial(Turned, (8, 1, 1), False), (3, 6, 6), "Unit"),
    (partial(Turned, (6,), False), (3, 6, 6), "Unit"),
    (partial(Turned, None, True), (3, 6, 6), "Unit"),
    (Overwritten, (6,), "Unit"),
]


@pytest.mark.parametrize(("make", "shape", "has"), ODD)
def test_networks_that_depend_on_order_and_layout_are_served_as_they_are(
    make: Callable[[], nn.Module], shape: tuple[int, ...], has: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And with units and what a GPU may compute between them."""
    torch.manual_seed(0)
    network = bayesianize(spoiled(make()), "ffg-u", inducing=4).eval()
    model = reside(
        Model(network, Manifest.model_construct(card=Card(input=Input(shape=shape)), subnetwork=None)),
        CPU,
        torch.float32,
    )
    x = torch.randn(2, *shape)
    expected = model.predict(x, 4, 0, keep_outputs=True).outputs
    with caplog.at_level(logging.INFO, "dubito"):
        changed = for_gpu(model)
    assert not caplog.records
    assert changed.factors.form is not None
    assert has in {type(m).__name__ for m in changed.factors.form.modules()}
    assert expected is not None
    torch.testing.assert_close(changed.predict(x, 4, 0, keep_outputs=True).outputs, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_stand_between_layers_is_left_as_it_is() -> None:
    hooked = nn.LayerNorm(8)
    hooked.register_forward_hook(lambda module, given, out: 2 * out)
    pools = nn.MaxPool2d(13, 1, 6), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d((2, 3)), nn.MaxPool2d(2, dilation=2)
    convolutions = nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(8, 8, 9, groups=8), nn.Conv2d(8, 8, 3, groups=8, dilation=2)
    for module in (hooked, nn.LayerNorm([4, 8]), *pools, *convolutions):
        form = with_between(fuse(nn.Sequential(module, nn.Flatten()), CPU))
        assert not [m for m in form.modules() if isinstance(m, Between)], module


def test_the_inputs_of_a_network_are_shared_where_nothing_changes_them() -> None:
    for net, shared in ((Overwritten(), [False, False]), (build("lenet"), [True, False, False, False, False])):
        form = fuse(bayesianize(net, "ffg-u", inducing=2).eval().net, CPU)
        assert [m.shared for m in form.modules() if isinstance(m, Unit)] == shared


class Scarce(Norm):
    """For whose kernel there is too little memory."""

    def suits(self, x: Tensor) -> bool:
        return True

    def compute(self, x: Tensor, execution: Execution) -> Tensor:
        if execution != "loop":
            raise torch.OutOfMemoryError("no memory")
        return super().compute(x, execution)


def test_without_memory_for_a_kernel_the_operator_is_torchs() -> None:
    norm, plans = Scarce(8, None, None, 1e-5), Plans({}, PlanCache(None, CPU), 1.0)
    plans._choose_between(norm, (torch.randn(3, 8),))
    assert dict(norm.chosen) == {3: "loop"}
    assert not norm.wrong
    assert not plans.cache.executions


@pytest.mark.parametrize("build_net", [bottlenecks, transformer, convnext, swin])
def test_in_bfloat16_units_are_told_from_rounding(
    build_net: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    need(torch.bfloat16)
    torch.manual_seed(0)
    network = bayesianize(spoiled(build_net()), "ffg-u", inducing=4).eval()
    model = Model(network, Manifest.model_construct(card=Card(input=Input(shape=(3, 32, 32))), subnetwork=None))
    with caplog.at_level(logging.INFO, "dubito"):
        assert with_units(reside(model, CPU, torch.bfloat16)).factors.form is not None
    assert not caplog.records


class Peeks(nn.Module):
    """What it does depends on its input, so that it cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else -self.a(x)  # type: ignore[no-any-return]


def test_a_network_that_cannot_be_followed_stays_as_it_is() -> None:
    net = bayesianize(Peeks(), "ffg-u", inducing=2).net
    assert fuse(net, CPU) is net


def drawing(lam_max: float) -> BayesianNetwork:
    """Layers of every size, with λ halfway to its cap and further directions where there is noise."""
    torch.manual_seed(0)
    network = bayesianize(spoiled(bottlenecks()), "ffg-u", inducing=4, lam_max=lam_max, noise="factored")
    if lam_max:
        for layer in network.layers.values():
            assert isinstance(layer.posterior, Inducing)
            assert layer.posterior.lam is not None
            nn.init.zeros_(layer.posterior.lam.raw)
        set_directions(network, torch.randn(2, 3, 12, 12), 3)
    return network.eval()


@pytest.mark.parametrize("lam_max", [0.0, 0.3])
def test_layers_drawn_together_are_what_they_are_alone(lam_max: float) -> None:
    network, x = drawing(lam_max), torch.randn(2, 3, 12, 12)
    factors = network.factors()
    together = factors.gathered()
    assert sum(len(group.names) for group in together.groups) == 8
    assert {group.beyond for group in together.groups} == {lam_max > 0}  # type: ignore[attr-defined]
    own = (together.layers, together.groups)
    assert bytes_of(own) < 1.1 * bytes_of(factors.layers)  # the group's matrices are the layers' own
    expected = answers(network, x)
    atol = 1e-4 * float(expected.abs().max())  # float32 through eight layers
    torch.testing.assert_close(
        answers(network, x, layers=together.layers, groups=together.groups), expected, rtol=1e-4, atol=atol
    )


@pytest.mark.parametrize("execution", ["loop", "batch", "unfold", "factored"])
@pytest.mark.parametrize("lam_max", [0.0, 0.3])
def test_filters_that_lie_channels_last(lam_max: float, execution: Execution) -> None:
    """As a GPU keeps them: the same answers whichever way they are used, and no second copy."""
    network, x = drawing(lam_max), torch.randn(2, 3, 12, 12)
    factors = network.factors()
    found = tap_by_tap(factors, fuse(network.net, CPU))
    assert bytes_of(found.layers) == bytes_of(factors.layers)
    draws = Draws(3, torch.randn(3, factors.normals), 0)
    plan = dict.fromkeys(factors.layers, execution)
    with torch.inference_mode():
        expected = network.run(x, factors, draws, plan)
        atol = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(network.run(x, found, draws, plan), expected, rtol=1e-4, atol=atol)


@pytest.mark.slow
def test_a_gpu_holds_less_than_a_third_of_the_plain_network(tmp_path: Path) -> None:
    """Factors, units and what is drawn together, in two bytes: each storage once."""
    plain = build("resnet50-cifar")
    network = bayesianize(plain, "ffg-u", inducing=64, start="prior", lam_max=0.0).eval()
    save(network, tmp_path / "m.safetensors", card=Card(input=Input(shape=(3, 32, 32))))
    model = for_gpu(reside(load(tmp_path / "m.safetensors"), CPU, torch.float16))
    assert bytes_of((model.factors, model.network)) < 0.3 * 2 * sum(p.numel() for p in plain.parameters())
