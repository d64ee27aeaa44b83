"""From any torch network to a Bayesian one: each Linear and Conv layer gets a posterior, the rest stays as it is.

The projections of torch's attention, and of torchvision's within windows, count as Linear layers.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from dubito.models.conversion.architectures import architecture_of, remember
from dubito.models.conversion.options import Options, Overrides, check_used, names_it, naming, one_of, options_for, pair
from dubito.models.conversion.points import Examples, start_points
from dubito.models.conversion.start import CONVERTIBLE, Start, geometry_of, origin_of, weight_of
from dubito.models.errors import ConversionError, first_line
from dubito.models.manifest import Hierarchy, Layer, Task
from dubito.models.names import some
from dubito.models.network.attention import opened
from dubito.models.network.features import watched
from dubito.models.network.geometry import Linear
from dubito.models.network.layers import BayesianLayer, MemberLayer
from dubito.models.network.network import BayesianNetwork
from dubito.models.network.sequence import InducingInputs
from dubito.models.network.window_attention import WindowAttention, reads_past
from dubito.models.numerics.parameters import owners
from dubito.models.posteriors.dictionary import COMPOSED
from dubito.models.posteriors.entry import Origin
from dubito.models.predictions.prediction import evaluating, predict

QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")
POSITIONS = ("relative_position_bias_table",)  # parameters of attention that no input is multiplied by: Swin, MaxViT
REMOVE = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}  # by the class of the hook


def bayesianize(
    net: nn.Module,
    method: str,
    *,
    inducing: int | tuple[int, int] = 64,
    layers: Overrides | None = None,
    unsupported: Literal["error", "leave"] = "error",
    start: Start = "network",
    hierarchy: int | tuple[int, int] | None = None,
    spread: float | None = None,
    task: Task | None = None,
    data: Iterable[tuple[Tensor, Tensor]] | None = None,
    examples: Examples | None = None,
    **options: Any,
) -> BayesianNetwork:
    """A Bayesian copy of `net`; `net` itself is left alone.

    `start="network"` begins at the weights of `net`: each layer's mean is the best fit that its method has (of rank M,
    or by blocks, which is a poor one: it has to be trained), and the prior of inducing weights has the size of the
    layer's weights, so that `sigma_max` and `spread` are the same share of W in every layer. `start="prior"`
    begins where the papers do, for training from scratch. `layers` changes the method or any option of some layers, by
    module name, glob or layer type; a name beats a glob, a glob beats a type, and later entries beat earlier ones.
    A layer that holds weights but cannot be converted is an error, or left deterministic with `unsupported="leave"`.
    `hierarchy` puts global inducing weights of that size above those of the layers [Ritter21, appendix H].
    `spread` is how wide q(V) starts, of FFG-W and FCG-W q(W): its standard deviation, or how far apart the members of
    Ensemble-U are. What starts narrow around a trained network may stay near it, and doubt little.
    With `data` (batches of inputs and labels) the accuracy before and after is printed, for regression the error.
    The inducing points of gi and li start at some of the `examples`: inputs (N, ...), and classes (N,) or targets
    (N, D) in the network's units, or None.
    """
    _check_network(net)
    if isinstance(given := getattr(net, "_orig_mod", None), nn.Module):  # what torch.compile was given
        net = given
    one_of("start", start, get_args(Start))
    one_of("unsupported", unsupported, ("error", "leave"))
    if spread is not None and not 0 < spread < math.inf:
        raise ConversionError(f"spread is {spread}; expected a positive number.")
    below, method = COMPOSED.get(method, (method, method))
    base = Options(method).changed({"method": method, "inducing": inducing, **options})
    whole, net = net, opened(net)
    if method == "deterministic" and not layers:
        unsupported = "leave"  # nothing is converted
    convertible = _convertible(net, unsupported)
    entries: dict[str, Layer] = {}
    unsuited: dict[str, Callable[[], object]] = {}
    for name, module in convertible.items():
        own = base if name == next(reversed(convertible)) else base.changed(below)
        chosen = options_for(name, module, own, layers or {})
        geometry = geometry_of(module)
        with naming(name):
            entry, layer_method = chosen.entry, chosen.method
            if entry is None:
                continue
            if not (entry.suits(geometry) or names_it(name, module, layers or {})):
                unsuited[name] = partial(entry.describe, chosen.method, chosen.values(entry), geometry)
                continue
            if hierarchy is not None and entry.below is not None:
                _check_shared(chosen, base)
                layer_method = entry.below
            W = weight_of(module) if start == "network" else None
            entries[name] = entry.describe(layer_method, chosen.values(entry), geometry, W)
    if unsuited and not entries:
        name, describe = unsuited.popitem()
        advice = "Use another method, such as ffg-w."
        with suppress(ConversionError):
            describe()
            advice = f'Name those to be made Bayesian, as layers={{"{name}": "{method}"}}, or use another method.'
        which = ", ".join([*unsuited, name])
        raise ConversionError(
            f"{method} leaves every layer of this network as it is, and nothing would doubt: {which}. {advice}"
        )
    members: dict[str, int] = {}
    could_be = convertible
    if base.entry is not None and method in base.entry.copies_rest:
        members = dict.fromkeys(_copied(net, base, layers or {}), base.values(base.entry)["members"])
        could_be = dict(net.named_modules())
    check_used(layers or {}, could_be)
    above = None
    if hierarchy is not None:
        above = _hierarchy(entries, base, *pair(hierarchy))
    points = start_points(net, entries, examples, task)
    for name, seen in points.seen.items():
        entries[name] = entries[name].seeing(seen)
    converted = assemble(whole, entries, members, above, task, start, spread)
    for name, seen in points.seen.items():
        if not seen.outputs.is_meta:
            converted.layers[name].q.observe(seen, start == "network")
    if points.U_0 is not None:
        converted.set_joint(InducingInputs(points.U_0))
        if not points.U_0.is_meta and converted.keeps_apart(points.U_0, converted.factors()) is False:
            raise ConversionError(
                "gi and dgp send inducing inputs through the network beside each batch, and this network mixes rows of "
                "a batch, or gives a layer rows of its own. Use another method, such as ffg-u."
            )
    if data is not None:
        _print_quality(whole, converted, data)
    return converted


def ensemble(networks: Sequence[nn.Module], task: Task | None = None) -> BayesianNetwork:
    """Ensemble-W of networks that were trained apart: everything they hold, BatchNorm included, stays their own."""
    if not networks:
        raise ConversionError("an ensemble needs at least one network.")
    shapes = [{k: v.shape for k, v in n.state_dict().items()} for n in networks]
    if any(s != shapes[0] for s in shapes):
        raise ConversionError("the networks of an ensemble must have the same layers and shapes.")
    converted = bayesianize(networks[0], "ensemble-w", members=len(networks), task=task)
    shared = [name for name in converted.net.state_dict() if name in shapes[0]]
    for name in shared:
        tensors = [n.state_dict()[name] for n in networks]
        if not all(torch.equal(t, tensors[0]) for t in tensors):
            raise ConversionError(
                f"{name!r} differs from network to network, but belongs to a module with layers inside, of which an "
                "ensemble keeps one copy only. Put it into a module of its own."
            )
    parts = [dict(opened(n).named_modules()) for n in networks]
    with torch.no_grad():
        for name, layer in converted.layers.items():
            points = layer.get_parameter("posterior.law.points.value")
            points.copy_(torch.stack([weight_of(p[name]) for p in parts]))
        for name, module in converted.net.named_modules():
            if isinstance(module, MemberLayer):
                for part, own in zip(parts, module.copies, strict=True):
                    own.load_state_dict(part[name].state_dict())
    return converted


def assemble(
    net: nn.Module,
    entries: Mapping[str, Layer],
    members: Mapping[str, int],
    hierarchy: Hierarchy | None,
    task: Task | None,
    start: Start,
    spread: float | None = None,
) -> BayesianNetwork:
    """A copy of `net` with the layers that the entries describe: the part that conversion and loading share."""
    known, net = architecture_of(net), opened(net, entries)
    modules = dict(net.named_modules())
    swaps: dict[nn.Module, nn.Module] = {}
    side_by_side: list[Tensor] = []  # the V's that a hierarchy draws, as each layer's weights want them
    for name, entry in entries.items():
        if type(modules.get(name)) not in CONVERTIBLE:
            raise ConversionError(f"the network has no Linear or Conv layer {name!r}.")
        geometry = geometry_of(modules[name])
        with naming(name):
            entry.check(*geometry.shape)
            origin = origin_of(modules[name], start, spread)
            posterior = entry.start(origin)
        if entry.from_above is not None and origin.trained:
            side_by_side.append(posterior.fit(origin.W))
        swaps[modules[name]] = BayesianLayer(geometry, posterior, entry)
    for name, E in members.items():
        if name not in modules:
            raise ConversionError(f"the network has no layer {name!r}.")
        swaps[modules[name]] = MemberLayer([copy.deepcopy(modules[name]) for _ in range(E)])
    above = None
    if hierarchy is not None:
        sides = Linear(hierarchy.d_in, hierarchy.d_out, bias=False)
        hierarchy.layer.check(*sides.shape)
        V = torch.cat(side_by_side, 1) if side_by_side else next(net.parameters()).new_empty(sides.shape)
        q_V = hierarchy.layer.start(Origin(sides, V, bool(side_by_side), spread, V.clone))
        above = BayesianLayer(sides, q_V, hierarchy.layer)
    # deepcopy with the memo pre-filled: swapped layers stand in the copy wherever the old ones stood, shared ones too
    memo: dict[int, object] = {id(old): new for old, new in swaps.items()}
    try:
        swapped = copy.deepcopy(net, memo)
    except Exception as error:  # whatever the network's objects come up with
        reason = first_line(error)
        if computed := [name for name, m in net.named_modules() if type(vars(m).get("weight")) is Tensor]:
            reason = f"{computed[0]}.weight is computed from other tensors{_apart(modules[computed[0]])}"
        raise ConversionError(f"the network cannot be copied: {reason}.") from None
    remember(swapped, known)
    return BayesianNetwork(swapped, hierarchy=above, task=task)


def _convertible(net: nn.Module, unsupported: str) -> dict[str, nn.Module]:
    """Layers that can be converted, by name; any other layer that holds weights is named in the error."""
    standing = owners(net)
    read: frozenset[str] = getattr(net, "tensors_read", frozenset())  # only a traced network knows
    convertible: dict[str, nn.Module] = {}
    refused: dict[str, str] = {}
    closed: list[str] = []  # modules whose layers stay plain: most use their layers' weights without calling them
    for name, module in net.named_modules():
        if any(name.startswith(f"{c}.") for c in closed):
            continue
        if isinstance(module, WindowAttention):  # positions stay as they are, and layers that compute them
            closed += [f"{name}.{part}".lstrip(".") for part in module.by_place]
            continue
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):  # they have a number for each place, and no matrix
            continue
        own = [p for part, p in module._parameters.items() if p is not None and part not in POSITIONS]
        plain = type(module) in CONVERTIBLE and "weight" in module._parameters and not _hooked(module)
        plain = plain and not any(p.is_complex() for p in own)
        tied = any(standing[p] > 1 for p in own)
        past = any(f"{name}.{tensor}" in read for tensor in module._parameters)
        if plain and not tied and not past:
            convertible[name] = module
        elif (whole := isinstance(module, CONVERTIBLE) or reads_past(module)) or any(_is_matrix(p) for p in own):
            if whole or isinstance(module, nn.MultiheadAttention):
                closed.append(name)
            why = (
                ", tied weights" if tied else ", whose weights are read without calling it" if past else _apart(module)
            )
            refused[name] = f"{name or 'the network itself'} ({type(module).__name__}{why})"
    if refused and unsupported == "error":
        raise ConversionError(
            f"cannot convert {some(list(refused.values()))}: only plain Linear, Conv1d, Conv2d and Conv3d layers can "
            'be made Bayesian. Pass unsupported="leave" to keep these deterministic.'
        )
    return convertible


def _check_network(net: object) -> None:
    if isinstance(net, Mapping):
        raise ConversionError(
            "bayesianize got a dictionary, which may be a state dict; expected the network itself: build it, "
            "load_state_dict(…), and pass it."
        )
    if not isinstance(net, nn.Module):
        came = f"the class {net.__name__}" if isinstance(net, type) else type(net).__name__
        raise ConversionError(f"bayesianize got {came}; expected a network, an instance of nn.Module.")
    for name, module in net.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            came = f"its part {name!r} is" if name else "bayesianize got"
            raise ConversionError(f"{came} a TorchScript module; expected the nn.Module that it was made from.")
        if type(module).__module__.startswith(QUANTISED):
            raise ConversionError(
                f"{name or 'the network'} is quantised ({type(module).__name__}); expected the network in real "
                "numbers. `dubito export --precision int8` rounds the artifact."
            )
        if (held := _holds_function(module)) is not None:
            raise ConversionError(
                f"{name or 'the network'} has {held}, a function that holds modules of the network: a copy of it would "
                "call these, not its own Bayesian layers. Make it a method, which gets them from self."
            )


def _holds_function(module: nn.Module) -> str | None:
    """The name of a function that holds weights in its closure, which no copy of the module replaces."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    named = [(f"the attribute {name}", value) for name, value in vars(module).items() if not name.startswith("_")]
    for name, value in [*named, ("a hook", hooks)]:
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        if any(_calls(one, held) for one in values for held in _held_by(one)):
            return name
    return None


def _held_by(function: object) -> list[nn.Module]:
    """The modules in the closure of a function; none of anything else."""
    held = []
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # an empty cell
            held.append(cell.cell_contents)
    return [one for one in held if isinstance(one, nn.Module)]


def _calls(function: Any, module: nn.Module) -> bool:
    """Whether a function that holds a module may use its weights; else it reads a number of it, say."""
    parts = {name for name, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    by_number = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict) or not any(module.children())
    return any(True for _ in module.parameters()) and (by_number or bool(parts & {*function.__code__.co_names}))


def _apart(module: nn.Module) -> str:
    """Why a layer of a kind that can be converted is not plain."""
    if (normed := norm_hook(module)) is not None:
        return f", with hooks of {normed}: call torch.nn.utils.{REMOVE[normed]} first"
    if isinstance(module, LazyModuleMixin):
        return ", without sizes yet: run the network once first"
    if parametrize.is_parametrized(module):
        return ", parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    if any(p.is_complex() for p in module.parameters(recurse=False)):
        return ", of complex numbers"
    if isinstance(module, CONVERTIBLE):
        return ", with hooks" if _hooked(module) else ", a class of its own"
    return ""


def norm_hook(module: nn.Module) -> str | None:
    """The kind of hook that computes a weight anew in each pass, one of `REMOVE`; None: there is none."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *module._backward_hooks.values()]
    return next((kind for hook in hooks if (kind := type(hook).__name__) in REMOVE), None)


def _hooked(module: nn.Module) -> bool:
    """Hooks would not follow a layer into its Bayesian form; that of a bank of features need not."""
    before = len(module._forward_pre_hooks) - watched(module)
    return bool(before or module._forward_hooks or module._backward_hooks)


def _is_matrix(p: Tensor) -> bool:
    """Weights, as against the per-channel numbers of a normalisation layer; not yet known for a lazy layer.

    What has one row for the whole batch is added to it, as positions and class tokens are.
    """
    if isinstance(p, UninitializedParameter):
        return True
    added = p.dim() > 2 and p.shape[0] == 1
    return sum(side > 1 for side in p.shape) > 1 and not added


def _copied(net: nn.Module, base: Options, overrides: Overrides) -> dict[str, nn.Module]:
    """Layers of a whole Ensemble-W that are not weight matrices but hold something: each member has its own.

    Not those whose parameters stand elsewhere too, nor those that an override calls deterministic.
    """
    standing = owners(net)
    leaves = {}
    for name, module in net.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        holds = own or any(b is not None for b in module._buffers.values())
        leaf = not isinstance(module, CONVERTIBLE) and not any(module.children())
        if holds and leaf and all(standing[p] == 1 for p in own):
            leaves[name] = module
    for name, module in leaves.items():
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            raise ConversionError(
                f"{name} is a {type(module).__name__}, which is no layer: {base.method} has copies of layers alone. "
                "Hold its parameters in modules that use them, or take another method, such as ffg-w."
            )
    return {n: m for n, m in leaves.items() if options_for(n, m, base, overrides).method != "deterministic"}


def _check_shared(chosen: Options, base: Options) -> None:
    """A layer whose V is drawn from above has a size and a λ, but no q(V) of its own."""
    assert chosen.entry is not None
    own, shared = ({"method": o.method, **o.values(chosen.entry)} for o in (chosen, base))
    for name in ("method", "members", "sigma_max"):
        if own[name] != shared[name]:
            raise ConversionError(f"under a hierarchy all inducing layers share one q, so {name} cannot differ here.")


def _hierarchy(entries: Mapping[str, Layer], base: Options, M_out: int, M_in: int) -> Hierarchy:
    """Global inducing weights over the V's of all inducing layers, set side by side."""
    shapes = [e.from_above for e in entries.values() if e.from_above is not None]
    if base.entry is None or base.entry.below is None or not shapes:
        raise ConversionError(f"a hierarchy needs an inducing method (ffg-u, fcg-u, ensemble-u), not {base.method!r}.")
    rows = {M for M, _ in shapes}
    if len(rows) != 1:
        raise ConversionError(
            "a hierarchy sets the V's of all inducing layers side by side, so they need one M_out; "
            f"they have {sorted(rows)}."
        )
    d_out, d_in = rows.pop(), sum(M for _, M in shapes)
    options = {**base.values(base.entry), "M_out": M_out, "M_in": M_in, "noise": "exact"}
    top = base.entry.describe(base.method, options, Linear(d_in, d_out, bias=False))
    return Hierarchy(d_out=d_out, d_in=d_in, layer=top.model_copy(update={"sigma": 1.0}))


def _print_quality(net: nn.Module, converted: BayesianNetwork, data: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Accuracy, or for regression the root mean squared error in the network's units, before and after."""
    factors = converted.factors()
    before, after, n = 0.0, 0.0, 0
    for x, y in data:
        with evaluating(net), torch.no_grad():
            plain = net(x)
        mean = predict(converted, factors, x, samples=0, keep_outputs=True).outputs
        assert mean is not None
        if converted.task.kind == "regression":
            D = converted.task.outputs  # what follows is the noise
            before += float((plain[:, :D] - y.view(len(y), D)).square().mean(-1).sum())
            after += float((mean.mean(0)[:, :D] - y.view(len(y), D)).square().mean(-1).sum())
        else:
            before += int((plain.argmax(-1) == y).sum())
            after += int((mean.softmax(-1).mean(0).argmax(-1) == y).sum())
        n += len(y)
    if n == 0:
        raise ConversionError("the data given holds no examples; expected batches of inputs and labels.")
    if converted.task.kind == "regression":
        said = f"RMSE {(before / n) ** 0.5:.4g} before, {(after / n) ** 0.5:.4g} after"
    else:
        said = f"accuracy {before / n:.2%} before, {after / n:.2%} after"
    print(f"{said} conversion ({n} inputs, posterior mean)")
