"""Operator fusion for serving: each Bayesian layer with the BatchNorm or layer scale, the residual sum and the ReLU,
GELU or SiLU that follow it is a unit.

A unit can be one kernel; without a kernel it computes the operators one after the other. Layers are shared with the
original network.
"""

import copy
import logging
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from dubito.models.errors import first_line
from dubito.models.network.attention import Attention
from dubito.models.network.features import watched
from dubito.models.network.geometry import Affine, Conv, Execution, Geometry, Linear, absorbs, apply
from dubito.models.network.layers import BayesianLayer, MemberLayer, Run, current
from dubito.models.network.normalisation import FOLDABLE, ScaleShift, folded
from dubito.models.network.window_attention import WindowAttention
from dubito.models.posteriors.protocol import Dense, Factored, Operand
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import evaluating
from dubito.models.tracing.thread_tracer import ThreadTracer

if TYPE_CHECKING:
    from dubito.service.engine.kernels import Ahead, Projected

log = logging.getLogger("dubito")
ADDED = (operator.add, operator.iadd, torch.add)
IN_PLACE = (operator.iadd, "add_")
AGREES = 1e-3  # of the answers' size: units round otherwise
HALF = (torch.bfloat16, torch.float16)
IN_HALF_AGREES = 0.1  # the networks of the tests and of the benchmarks are within 0.02
RECTIFIED = (F.relu, torch.relu, torch.relu_)
IDLE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity)  # in evaluation they do nothing
Activation = Literal["relu", "gelu", "silu"]
FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"relu": F.relu_, "gelu": F.gelu, "silu": F.silu}
TIMES = (operator.mul, operator.imul, torch.mul)
GOES_ON: tuple[Execution, ...] = ("fused", "parted", "mixed")  # executions that can begin the next unit
SIZES = ("shape", "ndim", "dtype", "device", "is_cuda")
RESHAPED = ("reshape", "view", "unsqueeze")
LAST_TO_SECOND, SECOND_TO_LAST = (0, 3, 1, 2), (0, 2, 3, 1)  # axes of channels last, channels first, and back


@dataclass(frozen=True)
class Next:
    """The unit that reads a unit's outputs, of one tap: its first product can be part of the same kernel."""

    unit: "Unit"
    alone: bool  # nothing else reads them


class Unit(nn.Module):
    """A Bayesian layer, then optionally scale and shift, a residual sum and an activation."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        layer: BayesianLayer,
        norm: ScaleShift | None = None,
        then: Activation | None = None,
        shared: bool = False,
        turned: bool = False,
    ) -> None:
        """`shared`: its inputs are the network's, which are the same for each draw. `turned`: between two permutations
        of the axes."""
        super().__init__()
        self.layer, self.norm, self.then, self.shared, self.turned = layer, norm, then, shared, turned
        self.geometry = layer.geometry
        self.next: Next | None = None
        if norm is not None:  # in float32, for kernels that sum in it
            scale, shift = norm.scale.detach().float(), norm.shift.detach().float()
        else:
            scale, shift = torch.ones(layer.geometry.outputs), torch.zeros(layer.geometry.outputs)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        run = current(self.layer, x)
        execution, begun = run.plan.get(self.layer, "loop"), run.ahead.pop(self, None)
        if execution == "mixed" and begun is None:  # the unit before runs otherwise here
            execution = "factored"
        ahead = self._ahead(run) if execution in GOES_ON else None
        operand = run.operands[self.layer]()
        out = self.compute(x, residual, operand, run.K, execution, run.channels_last, begun, ahead)
        if self.next is not None and ahead is not None:
            run.ahead[self.next.unit] = ahead.made
        return out

    def _ahead(self, run: Run) -> "Ahead | None":
        """What the kernel is to make for the next unit, whose draws may still be under way."""
        if self.next is None or run.plan.get(self.next.unit.layer) != "mixed":
            return None
        layer = self.next.unit.layer
        projection = run.factors[run.structure.names[layer]].projection
        return None if projection is None else self.next.unit.asks(*projection, stored=not self.next.alone)

    def asks(self, B: Tensor, outside: bool, *, stored: bool) -> "Ahead":
        """What the kernel of the unit before is to make for this one."""
        from dubito.service.engine import kernels

        return kernels.Ahead(B, self.geometry.bias, outside, stored)

    def compute(
        self,
        x: Tensor,
        residual: Tensor | None,
        operand: Operand,
        K: int,
        execution: Execution,
        channels_last: bool,
        begun: "Projected | None" = None,
        ahead: "Ahead | None" = None,
    ) -> Tensor:
        """`begun`: what the unit before has made of the inputs, for "mixed"."""
        if execution in ("fused", "parted", "grouped", "mixed"):
            return self._by_kernel(x, residual, operand, execution, begun, ahead)
        within = self.norm is not None and absorbs(self.geometry, x, operand, self.norm.axis)
        affine = Affine(self.scale, self.shift) if within else None
        out = apply(self.geometry, x, operand, K, execution, channels_last, affine)
        if self.norm is not None and affine is None:
            out = self.norm(out)
        if residual is not None:
            out = out + residual
        return out if self.then is None else FUNCTIONS[self.then](out)

    def _by_kernel(
        self,
        x: Tensor,
        residual: Tensor | None,
        operand: Operand,
        execution: Execution,
        begun: "Projected | None",
        ahead: "Ahead | None",
    ) -> Tensor:
        from dubito.service.engine import kernels

        geometry = self.geometry
        after = kernels.Epilogue(self.scale, self.shift, residual, self.then)
        match operand:
            case Factored(B, G, e) if execution != "grouped":
                given = (G.to(x.dtype), None if e is None else e.to(x.dtype), after, ahead)
                if execution == "mixed" and begun is not None:
                    return kernels.mixed(geometry, x, begun, *given)
                if execution == "fused":
                    return kernels.factored(geometry, x, B, *given)
                return kernels.parted(geometry, x, B, *given, shared=self.shared)
            case Factored(B, G, None):
                return kernels.dense(geometry, x, B @ G.mT.to(x.dtype), after)
            case Dense(W):
                return kernels.dense(geometry, x, kernels.tap_by_tap(geometry, W.mT.to(x.dtype)), after)
        raise AssertionError(f"{execution} of {type(operand).__name__}")


def with_units(model: Model) -> Model:
    """The same model, whose Bayesian layers are units."""
    if not model.factors.structure.layers:
        return model
    net, declared = model.network.net, model.card.input is not None
    for turned in (True, False) if declared else (False,):
        with evaluating(model.network):
            form = fuse(net, model.device, turned)
        fused = replace(model, made=replace(model.factors, form=form))
        if form is net or (difference := difference_of(model, fused)) is None:
            return fused
        if not any(isinstance(unit, Unit) and unit.turned for unit in form.modules()):
            break
    # a CPU may be what is wrong in half precision; it is proved next, and then that is said
    half = model.factors.dtype in HALF
    level = logging.INFO if model.device.type == "cpu" and half else logging.WARNING
    log.log(level, "layers are served one by one", extra={"why": f"the network as torch.fx follows it: {difference}"})
    return model


def difference_of(model: Model, changed: Model) -> str | None:
    """How a model's answer to one input differs from that of another form of it. torch.fx does not see, for example,
    that a network draws random numbers."""
    declared = model.card.input
    if declared is None:
        return None
    agrees = IN_HALF_AGREES if model.factors.dtype in HALF else AGREES
    x = torch.randn(1, *declared.shape, generator=torch.Generator().manual_seed(0)).to(model.device)
    expected = model.predict(x, 1, 0, keep_outputs=True).outputs
    assert expected is not None
    try:
        found = changed.predict(x, 1, 0, keep_outputs=True).outputs
    except Exception as error:
        return first_line(error)
    assert found is not None
    apart = float((found - expected).abs().max() / expected.abs().max().clamp_min(1.0))
    return None if apart <= agrees else f"its answer is {apart:.2g} of its size away from the network's own"


class _UnitTracer(ThreadTracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = isinstance(m, BayesianLayer | MemberLayer | ScaleShift | Attention | WindowAttention)
        return ours or super().is_leaf_module(m, module_qualified_name)


def fuse(net: nn.Module, device: torch.device, turned: bool = True) -> nn.Module:
    """The network with units in place of layers, on a device; unchanged where torch.fx cannot trace it.

    A layer whose inputs are recorded as features is not fused, nor are modules with other hooks. `turned`: sums behind
    a permutation are part of a unit, which take values of four axes and leave channels last in memory.
    """
    try:
        return _fused(net, turned).to(device)
    except Exception as error:  # mostly code that branches on its inputs' values or sizes
        log.info("layers are served one by one", extra={"why": f"the network cannot be traced: {str(error)[:200]}"})
        return net


def _fused(net: nn.Module, turned: bool) -> nn.Module:
    graph = _UnitTracer().trace(net)
    root = fx.GraphModule(net, graph)
    _without_idle(root)
    modules = without_hooks(root)
    for number, node in enumerate(list(graph.nodes)):
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, Attention | WindowAttention):
            node.target = f"attention_{number}"
            root.add_submodule(node.target, _with_units(layer))
            continue
        if not isinstance(layer, BayesianLayer) or len(node.args) != 1:
            continue
        follows = _following(root, modules, node, layer, turned)
        given, residual = node.args[0], follows.residual
        unit = Unit(layer, follows.norm, follows.then, _is_shared(given), follows.turned)
        root.add_submodule(name := f"unit_{number}", unit)
        # at the layer's place if that is possible: what it reads may be changed in place later
        with graph.inserting_before(node if residual is None else follows.last.next):
            if residual is not None and follows.turned:
                residual = graph.call_method("permute", (residual, *SECOND_TO_LAST))
            new = graph.call_module(name, (given,) if residual is None else (given, residual))
            if follows.turned:
                new = graph.call_method("permute", (new, *LAST_TO_SECOND))
        follows.last.replace_all_uses_with(new)
        for old in chain(node, follows.last):
            graph.erase_node(old)
    graph.lint()
    root.recompile()
    _link(root)
    return root


def _link(root: fx.GraphModule) -> None:
    """Each unit gets to know the one that reads its outputs, where that has one tap."""
    order = {node: i for i, node in enumerate(root.graph.nodes)}
    units = {node: unit for node in order if (unit := _unit_of(root, node)) is not None}
    for node, unit in units.items():
        readers = [reader for reader in sorted(node.users, key=order.__getitem__) if not _asks_size(reader)]
        for reader in readers:
            other = units.get(reader)
            if other is None:  # it may change them in place
                break
            if reader.args[0] is node and _goes_on(unit.geometry, other.geometry):
                unit.next = Next(other, len(readers) == 1 and reader.args.count(node) == 1)
                break


def _unit_of(root: fx.GraphModule, node: fx.Node) -> Unit | None:
    module = root.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, Unit) else None


def _goes_on(first: Geometry, then: Geometry) -> bool:
    """Whether the rows of one layer's outputs are those of the other's inputs, which has one tap."""
    if isinstance(first, Linear) and isinstance(then, Linear):
        return first.outputs == then.inputs and first.groups == then.groups == 1
    point = isinstance(then, Conv) and then.kernel == then.stride == (1, 1) and then.padding == (0, 0)
    return point and isinstance(first, Conv) and first.outputs == then.inputs and first.groups == then.groups == 1


@dataclass
class _Following:
    """What follows a layer and can be computed with it, up to the node `last`."""

    last: fx.Node
    norm: ScaleShift | None = None
    residual: fx.Node | None = None
    then: Activation | None = None
    turned: bool = False  # a linear layer's channels, which are last, to the second place, before the residual sum


def without_hooks(root: nn.Module) -> dict[str, nn.Module]:
    """The modules that others may stand for."""
    return {name: m for name, m in root.named_modules() if not (m._forward_hooks or m._forward_pre_hooks)}


def _is_shared(node: object) -> bool:
    """Whether a node is the network's input, which nothing else changes or reads but for its sizes."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    return len([user for user in node.users if not _asks_size(user)]) == 1


def _asks_size(node: fx.Node) -> bool:
    """Whether a node asks a value for its size, and not for its numbers."""
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] in SIZES)


def _following(
    root: fx.GraphModule, modules: dict[str, nn.Module], node: fx.Node, layer: BayesianLayer, turned: bool
) -> _Following:
    found = _Following(node)
    if (after := only_user(node)) is not None:
        found.norm = channel_norm(modules.get(str(after.target)), after, layer.geometry.outputs)
        found.last = node if found.norm is None else after
    linear = isinstance(layer.geometry, Linear) and found.norm is None
    after = only_user(node) if linear and turned else None
    if after is not None and permuted(modules.get(str(after.target)), after) == LAST_TO_SECOND:
        behind = _Following(after, turned=True)
        _scale_and_sum(root, behind, layer)
        found = behind if behind.last is not after else found
    if not found.turned:
        _scale_and_sum(root, found, layer)
    if (after := only_user(found.last)) is not None:
        found.then = activation_of(modules.get(str(after.target)), after)
        found.last = found.last if found.then is None else after
    return found


def _scale_and_sum(root: fx.GraphModule, found: _Following, layer: BayesianLayer) -> None:
    """Go on to a product with one number per channel, and to a sum."""
    after = only_user(found.last)
    if found.norm is None and after is not None and (scale := _channel_scale(root, found, after, layer)) is not None:
        axis = -1 if isinstance(layer.geometry, Linear) else 1
        found.norm, found.last = ScaleShift(scale, torch.zeros_like(scale), axis), after
    if (after := only_user(found.last)) is not None and _is_sum(after, found.last):
        first, second = after.args
        found.residual, found.last = (second if first is found.last else first), after  # type: ignore[assignment]


def permuted(module: nn.Module | None, node: fx.Node) -> tuple[object, ...] | None:
    """The axes, where a node puts them in another order."""
    given: object = node.args[1:]
    if node.op == "call_module":
        given = getattr(module, "dims", None) if type(module).__name__ == "Permute" else None
    elif (node.op, node.target) not in (("call_method", "permute"), ("call_function", torch.permute)) or node.kwargs:
        return None
    if isinstance(given, tuple) and len(given) == 1:
        (given,) = given
    return tuple(given) if isinstance(given, tuple | list) else None


def _channel_scale(root: fx.GraphModule, found: _Following, node: fx.Node, layer: BayesianLayer) -> Tensor | None:
    """The numbers, one per channel, that `node` multiplies the value before it with."""
    times = (node.op == "call_function" and node.target in TIMES) or (
        node.op == "call_method" and node.target in ("mul", "mul_")
    )
    if not times or len(node.args) != 2 or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return None
    first, second = node.args
    scale = constant(root, second if first is found.last else first)  # type: ignore[arg-type]
    if scale is None or scale.numel() != layer.geometry.outputs or not scale.is_floating_point():
        return None
    behind = 2 if found.turned else layer.geometry.dims  # axes behind the channels
    ranks = (1,) if not found.turned and isinstance(layer.geometry, Linear) else (behind + 1, behind + 2)
    fits = scale.dim() in ranks and scale.shape[-behind - 1] == layer.geometry.outputs
    return scale.detach().flatten().clone() if fits else None


def constant(root: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """The value of a node that depends on no input: a parameter, as it is or in another shape."""
    if node.op == "get_attr":
        value = operator.attrgetter(str(node.target))(root)
        return value if isinstance(value, Tensor) else None
    if node.op != "call_method" or node.target not in RESHAPED or not isinstance(node.args[0], fx.Node):
        return None
    sizes = node.args[1:]
    value = constant(root, node.args[0]) if all(isinstance(n, int) for n in sizes) and not node.kwargs else None
    return None if value is None else getattr(value, str(node.target))(*sizes)


def chain(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes from the last back to the first."""
    nodes = [first]
    while nodes[0] is not last:
        (after,) = nodes[0].users
        nodes.insert(0, after)
    return nodes


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def channel_norm(module: nn.Module | None, node: fx.Node, channels: int) -> ScaleShift | None:
    """A BatchNorm of so many channels as scale and shift; one of a linear layer's tokens may be by place."""
    if node.op != "call_module" or len(node.args) != 1:
        return None
    if type(module) in FOLDABLE and module.running_mean is not None:  # type: ignore[union-attr]
        module = folded(module)  # type: ignore[arg-type]
    return module if isinstance(module, ScaleShift) and len(module.scale) == channels else None


def _is_sum(node: fx.Node, last: fx.Node) -> bool:
    """Of `last` and another value. A sum in place changes its first operand, which may be read again unless it is
    `last`."""
    called = (node.op == "call_function" and node.target in ADDED) or (
        node.op == "call_method" and node.target in ("add", "add_")
    )
    if node.target in IN_PLACE and node.args[:1] != (last,):
        return False
    two = len(node.args) == 2 and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args)
    return called and two and node.args[0] is not node.args[1]


def activation_of(module: nn.Module | None, node: fx.Node) -> Activation | None:
    if node.op == "call_module":
        if type(module) in (nn.ReLU, nn.SiLU):
            return "relu" if type(module) is nn.ReLU else "silu"
        return "gelu" if type(module) is nn.GELU and module.approximate == "none" else None
    if (node.op == "call_function" and node.target in RECTIFIED) or (
        node.op == "call_method" and node.target in ("relu", "relu_")
    ):
        return "relu"
    if node.op == "call_function" and node.target is F.silu:
        return "silu"
    exact = node.op == "call_function" and node.target is F.gelu and node.kwargs in ({}, {"approximate": "none"})
    return "gelu" if exact and len(node.args) == 1 else None


def _without_idle(root: fx.GraphModule) -> None:
    """Leave out calls that do nothing in evaluation, so that they do not part a layer from what follows it."""
    for node in list(root.graph.nodes):
        if _is_idle(root, node):
            node.replace_all_uses_with(node.args[0])
            root.graph.erase_node(node)


def _is_idle(root: fx.GraphModule, node: fx.Node) -> bool:
    if node.kwargs:
        return False
    if node.op == "call_function":  # torchvision's, which torch.fx does not look into: input, p, mode, training
        theirs = getattr(sys.modules.get("torchvision.ops.stochastic_depth"), "stochastic_depth", None)
        return node.target is theirs and len(node.args) == 4 and node.args[3] is False
    if node.op != "call_module" or len(node.args) != 1:
        return False
    module = root.get_submodule(str(node.target))
    return type(module) in IDLE and not module.training


def _with_units(attention: Attention | WindowAttention) -> nn.Module:
    """The same attention, whose Bayesian projections are units; the bias of places is computed once."""
    twin = copy.copy(attention)
    twin._modules = dict(attention._modules)  # its own, so that the original keeps its layers
    for name, layer in attention._modules.items():
        if isinstance(layer, BayesianLayer) and not watched(layer):
            twin._modules[name] = Unit(layer)
    if isinstance(twin, WindowAttention):
        twin.fix_positions()
    return twin
