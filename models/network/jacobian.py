"""The Jacobian of a network's outputs at some of its weights, input by input, never held over all weights.

One forward pass keeps what each layer was given; one backward pass for each output gives the gradient of what each
layer made. A layer's part of the Jacobian is the product of the two, formed only where weights were chosen. Weights
that stand elsewhere than in a layer of one input and one output are differentiated one input at a time.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from dubito.models.errors import PredictionError
from dubito.models.network.layers import Structure, layer_by_layer
from dubito.models.network.learned import Learned
from dubito.models.numerics.parameters import owners

AT_ONCE = 1 << 24  # numbers of one layer's gradients that are held at a time
SUMMED = 1 << 28  # of them on a GPU, where squares of all weights are summed: in training, not in predictions
SPARSE = 32  # an entry gathered alone costs as much as so many of a matrix product
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layout(net: nn.Module) -> dict[str, slice]:
    """The slice of each parameter in the vector of all parameters; one with several names comes once."""
    places, offset = {}, 0
    for name, p in net.named_parameters():
        places[name] = slice(offset, offset + p.numel())
        offset += p.numel()
    return places


def chosen_of(net: nn.Module, index: Tensor) -> dict[str, tuple[slice, Tensor]]:
    """For each parameter with chosen weights: their places in the sorted `index` (S,), and in that parameter."""
    whole = layout(net)
    edges = torch.tensor([0, *(place.stop for place in whole.values())])
    bounds = torch.searchsorted(index.cpu(), edges).tolist()
    return {
        name: (slice(low, high), index[low:high] - place.start)
        for (name, place), (low, high) in zip(whole.items(), itertools.pairwise(bounds), strict=True)
        if high > low
    }


class Linearised:
    """A network's outputs for a batch, and the gradient of each output at the chosen weights.

    The network must be in evaluation mode, so that rows do not see each other.
    """

    def __init__(self, net: nn.Module, x: Tensor, index: Tensor, learned: Learned | None = None) -> None:
        """`index` (S,) holds sorted places among all parameters in a row."""
        self.net, self.S = net, len(index)
        self.learned = Learned() if learned is None else learned
        self.chosen = chosen_of(net, index)
        with _differentiating(net, self.learned):
            self.tape = taped(net, x, list(self.chosen), self.learned)
        self.outputs = self.tape.f.detach()  # (B, C)

    def rows(self) -> Iterator[Tensor]:
        """For each output c, ∂f_c/∂w at the chosen weights: (B, S)."""
        tape = self.tape
        B, C = tape.f.shape
        with _differentiating(self.net, self.learned):
            slow = self._slow()
        for c in range(C):
            with _differentiating(self.net, self.learned):
                J = tape.f.new_zeros(B, self.S)
                cotangent = torch.zeros_like(tape.f)
                cotangent[:, c] = 1
                for name, pairs in tape.gradients(cotangent, keep=c < C - 1).items():
                    columns, local = self.chosen[name]
                    J[:, columns] = _entries(*tape.own[name], pairs, local)
                for name, gradients in slow.items():
                    J[:, self.chosen[name][0]] = gradients[:, c]
            yield J.detach()

    def jacobian(self) -> Tensor:
        """All of it: (B, C, S)."""
        return torch.stack(list(self.rows()), 1)

    def _slow(self) -> dict[str, Tensor]:
        """Jacobians (B, C, s) of the parameters outside supported layers."""
        tape = self.tape
        if not tape.others:
            return {}
        by_name: dict[str, list[Tensor]] = {name: [] for name in tape.others}
        for f, parameters in tape.one_by_one():
            for_input: dict[str, list[Tensor]] = {name: [] for name in tape.others}
            for c in range(len(f)):
                for name, g in zip(tape.others, _grad(f[c], parameters), strict=True):
                    for_input[name].append(g.flatten()[self.chosen[name][1]])
            for name, parts in for_input.items():
                by_name[name].append(torch.stack(parts))
        return {name: torch.stack(parts) for name, parts in by_name.items()}


def add_squares(
    net: nn.Module, x: Tensor, roots: Callable[[Tensor], Tensor], into: Tensor, learned: Learned | None = None
) -> None:
    """Adds to `into` (D,) the squared gradients of v·f(x) at every weight, summed over inputs and over the v.

    `roots` makes the v (n, B, C) of the outputs (B, C). Each layer's gradients are formed a few inputs at a time.
    """
    whole, learned = layout(net), Learned() if learned is None else learned
    with _differentiating(net, learned):
        tape = taped(net, x, list(whole), learned)
        cotangents = roots(tape.f.detach())
        for i, v in enumerate(cotangents):
            for name, pairs in tape.gradients(v, keep=i < len(cotangents) - 1).items():
                into[whole[name]] += _squares(*tape.own[name], pairs).flatten()
        if tape.others:
            for b, (f, parameters) in enumerate(tape.one_by_one()):
                for v in cotangents[:, b]:
                    for name, g in zip(tape.others, _grad(f @ v, parameters), strict=True):
                        into[whole[name]] += g.flatten().square()


@dataclass(frozen=True)
class Call:
    """What a layer was given, and where its output stands in the graph, whatever is done to it in place later."""

    x: Tensor
    version: int
    edge: GradientEdge | None  # None: no gradient comes back to it


class Tape:
    """A forward pass with what each layer was given, for gradients at the parameters named."""

    def __init__(self, net: nn.Module, x: Tensor, names: Sequence[str], learned: Learned) -> None:
        _check_apart(net)
        self.net, self.x = net, x.clone() if x.is_inference() else x
        homes = {name: home for name, home in _homes(net).items() if name not in learned.elsewhere}
        self.own = {name: homes[name] for name in names if name in homes}  # (layer, its name for the parameter)
        layers = {layer: None for layer, _ in self.own.values()}
        with_graph = set(names)
        self.parameters = {n: p.detach().requires_grad_(n in with_graph) for n, p in net.named_parameters()}
        self.f, self.calls, odd = self._run(layers)
        if any(call.x._version != call.version for calls in self.calls.values() for call in calls):
            raise PredictionError("the network changes in place what a layer needs for its gradient; use a copy there.")
        seen = self.calls.keys() - odd  # a layer that is not called may be used all the same, by its weights
        self.own = {name: home for name, home in self.own.items() if home[0] in seen}
        self.others = [name for name in names if name not in self.own]

    def _run(self, layers: Mapping[nn.Module, None]) -> tuple[Tensor, dict[nn.Module, list[Call]], set[nn.Module]]:
        calls: dict[nn.Module, list[Call]] = {}
        odd: set[nn.Module] = set()

        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            rows = [t for t in (*given, output) if isinstance(t, Tensor) and len(t) == len(self.x)]
            if named or len(given) != 1 or len(rows) != 2:
                odd.add(module)
                return
            x = given[0].detach()
            edge = get_gradient_edge(output) if output.requires_grad else None
            calls.setdefault(module, []).append(Call(x, x._version, edge))

        with ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
            f = functional_call(self.net, self.parameters, (self.x,))
        if not isinstance(f, Tensor) or f.dim() != 2 or len(f) != len(self.x):
            came = f"shape {tuple(f.shape)}" if isinstance(f, Tensor) else type(f).__name__
            raise PredictionError(f"the network answers with {came}; expected (B, classes) or (B, values).")
        return f, calls, odd

    def gradients(self, cotangent: Tensor, keep: bool) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """For each parameter of a supported layer, the layer's inputs and the gradients of its outputs, by call."""
        calls = [(m, call) for m, of_one in self.calls.items() for call in of_one if call.edge is not None]
        if not calls or not self.f.requires_grad:
            return {}
        edges = [call.edge for _, call in calls if call.edge is not None]
        grads = torch.autograd.grad(self.f, edges, cotangent, retain_graph=keep, allow_unused=True)
        pairs: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        for (module, call), g in zip(calls, grads, strict=True):
            if g is not None:
                pairs.setdefault(module, []).append((call.x, g))
        return {name: pairs[layer] for name, (layer, _) in self.own.items() if layer in pairs}

    def one_by_one(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Each input's outputs (C,) with their graph, and the parameters outside supported layers."""
        wanted = {n: p.detach().requires_grad_(n in set(self.others)) for n, p in self.parameters.items()}
        for row in self.x.split(1):
            yield functional_call(self.net, wanted, (row,))[0], [wanted[name] for name in self.others]


def _grad(f: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    if not f.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    grads = torch.autograd.grad(f, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def _homes(net: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """For each parameter held by one module only, if without children: the module and its name for the parameter."""
    standing, homes = owners(net), {}
    for place, module in net.named_modules():
        if any(module.children()):
            continue
        for own, p in module._parameters.items():
            if p is not None and standing[p] == 1:
                homes[f"{place}.{own}" if place else own] = (module, own)
    return homes


# a layer's part of the Jacobian, input by input


def _entries(layer: nn.Module, own: str, pairs: list[tuple[Tensor, Tensor]], local: Tensor) -> Tensor:
    """The gradient at the chosen entries of one parameter: (B, s)."""
    weight = layer._parameters[own]
    assert weight is not None
    if type(layer) in (nn.Linear, *CONVOLUTIONS):
        if own == "bias":
            return reduce(torch.add, (_columns(layer, g).sum(-1)[:, local] for _, g in pairs))
        if SPARSE * len(local) < weight.numel():
            return reduce(torch.add, (_gathered(layer, x, g, local) for x, g in pairs))
    blocks = []
    for rows in _blocks(weight, pairs, AT_ONCE):
        blocks.append(reduce(torch.add, (_dense(layer, own, x[rows], g[rows]) for x, g in pairs)).flatten(1)[:, local])
    return torch.cat(blocks)


def _squares(layer: nn.Module, own: str, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Squared gradients of one parameter, summed over inputs."""
    weight = layer._parameters[own]
    assert weight is not None
    if type(layer) is nn.Linear and own == "weight" and len(pairs) == 1 and pairs[0][0].dim() == 2:
        x, g = pairs[0]
        return g.square().T @ x.square()
    total = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for rows in _blocks(weight, pairs, SUMMED if weight.is_cuda else AT_ONCE):
        here = [(x[rows], g[rows]) for x, g in pairs]
        if own == "weight" and type(layer) in (nn.Linear, *CONVOLUTIONS):  # one position of the kernel at a time
            by_position = total.view(*total.shape[:2], -1)
            for t, taps in enumerate(zip(*(_taps(layer, x, g) for x, g in here), strict=True)):
                together = reduce(torch.add, taps).square_()
                by_position[..., t] += together.view(len(here[0][0]), *total.shape[:2]).sum(0)
        else:
            total += reduce(torch.add, (_dense(layer, own, x, g) for x, g in here)).square().sum(0)
    return total


def _blocks(weight: Tensor, pairs: list[tuple[Tensor, Tensor]], most: int) -> Iterator[slice]:
    """Slices of the batch: in each, the gradients of all inputs hold at most so many numbers, or it has one input."""
    size = max(1, most // weight.numel())
    return (slice(start, start + size) for start in range(0, len(pairs[0][0]), size))


def _dense(layer: nn.Module, own: str, x: Tensor, g: Tensor) -> Tensor:
    """(b, *shape of the parameter)."""
    if type(layer) not in (nn.Linear, *CONVOLUTIONS):
        gradients: Tensor = vmap(lambda x, g: _together(layer, own, x[None], g[None]))(x, g)
        return gradients  # of a normalisation, an embedding ...
    if own == "bias":
        return _columns(layer, g).sum(-1)
    weight = layer._parameters[own]
    assert weight is not None
    return torch.stack(list(_taps(layer, x, g)), -1).view(len(x), *weight.shape)


def _taps(layer: nn.Module, x: Tensor, g: Tensor) -> Iterator[Tensor]:
    """Gradients of the weight at each position of the kernel, in the kernel's order: (b·G, c_out/G, c_in/G)."""
    G = getattr(layer, "groups", 1)
    left = _columns(layer, g).unflatten(1, (G, -1)).flatten(0, 1).contiguous()  # (b·G, c_out/G, P)
    for plane in _planes(layer, x):
        yield torch.bmm(left, _by_place(plane, G))


def _by_place(plane: Tensor, G: int) -> Tensor:
    """(b·G, P, channels/G), copied into this order: small products of transposed views take far longer."""
    places = plane.movedim(1, -1).flatten(1, -2)
    by_group: Tensor = places.unflatten(-1, (G, -1)).transpose(1, 2)
    return by_group.flatten(0, 1).contiguous()


def _gathered(layer: nn.Module, x: Tensor, g: Tensor, local: Tensor) -> Tensor:
    """A few entries of the weight of a Linear or Conv layer: (B, s)."""
    weight, G = layer._parameters["weight"], getattr(layer, "groups", 1)
    assert weight is not None
    inputs, taps = weight.shape[1], math.prod(weight.shape[2:])
    out, tap = local // (inputs * taps), local % taps
    channel = out // (len(weight) // G) * inputs + local % (inputs * taps) // taps
    columns = _columns(layer, g)
    entries = columns.new_zeros(len(x), len(local))
    most = max(1, AT_ONCE // (len(x) * columns.shape[2]))
    for t, plane in enumerate(_planes(layer, x)):
        for some in (tap == t).nonzero()[:, 0].split(most):
            entries[:, some] = (columns[:, out[some]] * plane[:, channel[some]].flatten(2)).sum(-1)
    return entries


def _columns(layer: nn.Module, g: Tensor) -> Tensor:
    """(B, d_out, P): the gradient at each of the P places where the weights were used."""
    return g.reshape(len(g), -1, g.shape[-1]).mT if isinstance(layer, nn.Linear) else g.flatten(2)


def _planes(layer: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """The inputs under each position of the kernel, in the kernel's order: (B, channels, ...) with P outputs."""
    if isinstance(layer, nn.Linear):
        yield x.reshape(len(x), -1, x.shape[-1]).mT
        return
    assert isinstance(layer, CONVOLUTIONS)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    steps = list(zip(layer.kernel_size, layer.stride, layer.dilation, x.shape[2:], strict=True))
    reach = [(side - d * (k - 1) - 1) // s * s + 1 for k, s, d, side in steps]  # from the first place to the last
    for position in itertools.product(*(range(k) for k, *_ in steps)):
        cut = [slice(i * d, i * d + n, s) for i, (_, s, d, _), n in zip(position, steps, reach, strict=True)]
        yield x[(slice(None), slice(None), *cut)]


# checks


@contextmanager
def turn(net: nn.Module, learned: Learned) -> Iterator[None]:
    """One thread at a time: a pass that swaps a network's weights, or watches its layers, must not meet another."""
    with learned.changing, layer_by_layer(Structure.of(net).attends):
        yield


@contextmanager
def _differentiating(net: nn.Module, learned: Learned) -> Iterator[None]:
    with turn(net, learned), torch.inference_mode(False), torch.enable_grad():
        yield


def _check_apart(net: nn.Module) -> None:
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise PredictionError(
                f"layer {name!r} normalises by the batch that it sees, so an input has no Jacobian of its own; "
                "expected BatchNorm with running statistics, in evaluation mode."
            )


def taped(net: nn.Module, x: Tensor, names: Sequence[str], learned: Learned) -> Tape:
    """A tape; its layers' gradients are checked once per network, shape of the inputs, and parameters.

    A network that turns (B, T, d) to (T, B, d) gives rows to the wrong inputs where T = B, and one that uses a layer's
    weight a second time, past the layer, has a gradient that the layer knows nothing of; nothing else would show it.
    """
    tape, key = Tape(net, x, names, learned), (tuple(x.shape), tuple(names))
    if tape.own and key not in learned.taped:
        lone = Tape(net, x[-1:], names, learned)
        same = tape.own.keys() == lone.own.keys() and all(_same_row(lone, m, of) for m, of in tape.calls.items())
        wrong = _not_whole(tape) if same else set(tape.own)
        if wrong:
            learned.elsewhere.update(wrong)
            tape = Tape(net, x, names, learned)
        learned.taped.add(key)
    return tape


def _not_whole(tape: Tape) -> set[str]:
    """Parameters whose gradient over the whole batch differs from the sum of their layers' gradients."""
    if not tape.f.requires_grad:
        return set()
    v = torch.randn(tape.f.shape, generator=torch.Generator().manual_seed(0)).to(tape.f)
    names = list(tape.own)
    whole = torch.autograd.grad(tape.f, [tape.parameters[n] for n in names], v, retain_graph=True, allow_unused=True)
    pairs, wrong = tape.gradients(v, keep=True), set()
    for name, expected in zip(names, whole, strict=True):
        layer, own = tape.own[name]
        total = torch.zeros_like(tape.parameters[name])
        for x, g in pairs.get(name, []):
            total += _together(layer, own, x, g)
        expected = torch.zeros_like(total) if expected is None else expected
        if float((total - expected).abs().max()) > 1e-2 * max(float(expected.abs().max()), 1e-30):
            wrong.add(name)
    return wrong


def _together(layer: nn.Module, own: str, x: Tensor, g: Tensor) -> Tensor:
    """The gradient of one parameter from one call, summed over inputs."""
    weight = layer._parameters[own]
    assert weight is not None
    back = vjp(lambda w: functional_call(layer, {own: w}, (x,)), weight.detach())[1]
    gradient: Tensor = back(g)[0]
    return gradient.detach()


def _same_row(lone: Tape, layer: nn.Module, calls: list[Call]) -> bool:
    """Whether the layer was given the last input in the last row, as when it came alone."""
    again = lone.calls.get(layer, [])
    return len(again) == len(calls) and all(
        a.x[-1].shape == b.x[0].shape
        and float((a.x[-1] - b.x[0]).double().abs().max()) <= 1e-3 * max(float(b.x[0].double().abs().max()), 1e-30)
        for a, b in zip(calls, again, strict=True)
    )
