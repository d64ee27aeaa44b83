"""Where inducing points start: at examples of the data, and at what the plain network makes of them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dubito.models.conversion.architectures import architecture_of, input_of
from dubito.models.conversion.start import geometry_of
from dubito.models.errors import ConversionError, first_line
from dubito.models.manifest import Layer, Task
from dubito.models.network.layers import first_input
from dubito.models.numerics.normals import normals
from dubito.models.posteriors.protocol import Seen
from dubito.models.predictions.prediction import evaluating

Examples = tuple[Tensor, Tensor | None]  # inputs (N, ...); classes (N,), or targets (N, D) in the network's units
JITTER = 0.1  # of examples that are taken more than once, in standard deviations over all of them


@dataclass(frozen=True)
class Start:
    """U_0 of a network, and what examples are at the layers of the plain network that start there."""

    U_0: Tensor | None  # (M, ...)  None: no layer is drawn in sequence
    seen: Mapping[str, Seen]


def start_points(net: nn.Module, entries: Mapping[str, Layer], examples: Examples | None, task: Task | None) -> Start:
    """Send examples through the network as it is, and look at the layers with inducing points.

    Without examples, inducing inputs are random, and layers with inputs of their own start without any.
    """
    global_ = [name for name, entry in entries.items() if entry.in_sequence]
    sizes = {name: entry.examples for name, entry in entries.items() if entry.examples}
    if not sizes or (examples is None and not global_):
        return Start(None, {})
    if len({sizes[name] for name in global_}) > 1:
        raise ConversionError(
            f"layers of methods gi and dgp share their inducing inputs, so they need one number of them; they have "
            f"{sorted({sizes[name] for name in global_})}."
        )
    if global_:
        _check_rows_apart(net)
    x, y = chosen(net, max(sizes.values()), examples)
    seen, last = look(net, x, sizes)
    targets = None if examples is None else examples[1]
    if targets is not None and y is not None and not x.is_meta:
        _check_targets(targets, seen[last].outputs.shape[-1], task)
        seen[last] = with_targets(seen[last], y, task)
    return Start(x[: sizes[global_[0]]] if global_ else None, {name: seen[name].first(M) for name, M in sizes.items()})


def _check_rows_apart(net: nn.Module) -> None:
    norms = [name for name, m in net.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if norms:
        raise ConversionError(
            f"gi and dgp send inducing inputs through the network beside each batch, and {norms[0]!r} is a BatchNorm, "
            "which would mix them with it. Use a network without BatchNorm, or another method, such as ffg-u."
        )


def look(net: nn.Module, x: Tensor, names: Collection[str]) -> tuple[dict[str, Seen], str]:
    """What these layers get and give of the inputs, and the last layer that was reached."""
    modules = dict(net.named_modules())
    calls: list[str] = []
    seen: dict[str, Seen] = {}

    def at(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
            calls.append(name)
            seen[name] = seen_at(module, first_input(given, named), output, len(x))

        return hook

    hooks = [modules[name].register_forward_hook(at(name), with_kwargs=True) for name in names]
    try:
        with evaluating(net), torch.no_grad():
            net(x)
    except RuntimeError as error:
        raise ConversionError(
            f"the network fails on inputs of shape {tuple(x.shape)}: {first_line(error)}. Give examples= that it takes."
        ) from None
    finally:
        for hook in hooks:
            hook.remove()
    for name in names:
        if calls.count(name) != 1:
            raise ConversionError(
                f"layer {name!r} is used {calls.count(name)} times in a pass; inducing points need it once. Leave it "
                f"out with layers={{{name!r}: 'deterministic'}}."
            )
    return seen, calls[-1]


def chosen(net: nn.Module, M: int, examples: Examples | None) -> tuple[Tensor, Tensor | None]:
    """M of the examples at random; where there are fewer, some are taken again and moved a little."""
    like = next(net.parameters())
    if examples is None:
        known = input_of(architecture_of(net))
        if known is None:
            raise ConversionError(
                "gi and dgp need inputs to start from: give examples=(inputs, targets) of the training data."
            )
        return normals(like, M, *known.shape), None
    x, y = examples
    if x.dim() < 2 or len(x) == 0 or (y is not None and len(y) != len(x)):
        came = f"{tuple(x.shape)} and {None if y is None else tuple(y.shape)}"
        raise ConversionError(f"examples have shapes {came}; expected inputs (N, ...) and as many targets, or none.")
    order = torch.cat([torch.randperm(len(x)) for _ in range(-(-M // len(x)))])[:M].to(x.device)
    U_0 = x[order].to(like.device, like.dtype)
    if M > len(x) > 1 and not U_0.is_meta:
        U_0[len(x) :] += JITTER * x.std(0).to(U_0) * torch.randn_like(U_0[len(x) :])
    return U_0, None if y is None else y[order]


def seen_at(module: nn.Module, x: Tensor, output: Tensor, M: int) -> Seen:
    """The layer's outputs at all places, and what it got at one place of each point, chosen at random."""
    geometry = geometry_of(module)
    if len(x) % M:
        raise ConversionError(
            f"a layer ({geometry}) gets {len(x)} rows of {M} examples: the network mixes rows of the batch, so no rows "
            "of it are those of an inducing point. Use another method, such as ffg-u."
        )
    outputs = (output.movedim(1, -1) if geometry.dims else output).reshape(M, -1, geometry.outputs)
    if outputs.is_meta:
        return Seen(outputs.new_empty(M, geometry.shape[1]), outputs[:, 0], outputs)
    place = torch.randint(outputs.shape[1], (M,), device=x.device)
    per = len(x) // M  # rows of the layer for each point
    rows = [geometry.patches(x[i * per : (i + 1) * per])[p] for i, p in enumerate(place.tolist())]
    return Seen(torch.stack(rows), outputs[torch.arange(M, device=x.device), place], outputs)


def _check_targets(y: Tensor, C: int, task: Task | None) -> None:
    """Of all examples, not only of those that points start at, for a network of C outputs."""
    if task is None or task.kind == "classification":
        if y.dim() != 1 or y.is_floating_point() or not 0 <= int(y.min()) <= int(y.max()) < C:
            raise ConversionError(f"the targets of the examples are no classes from 0 to {C - 1}, as one row (N,).")
    elif y.numel() != len(y) * task.outputs or task.outputs > C:
        raise ConversionError(f"targets have shape {tuple(y.shape)}; expected (N, {task.outputs}).")


def with_targets(seen: Seen, y: Tensor, task: Task | None) -> Seen:
    """Pseudo-outputs of the last layer that are the targets themselves, classes as one-hot; others stay at 0."""
    V = torch.zeros_like(seen.outputs[:, 0])
    if task is None or task.kind == "classification":
        V = F.one_hot(y.long(), V.shape[1]).to(V)
    else:
        V[:, : task.outputs] = y.view(len(y), -1).to(V)
    return replace(seen, targets=V[:, None])
