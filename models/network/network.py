"""A Bayesian network: somebody's network with Bayesian layers inside, drawn from jointly."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from dubito.models.errors import ConversionError, InputError, PredictionError
from dubito.models.manifest import Classification, Task
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.network.features import is_linear, watch
from dubito.models.network.geometry import Execution, Geometry
from dubito.models.network.layers import (
    BayesianLayer,
    FoldError,
    MemberLayer,
    OnArrival,
    Reading,
    Run,
    Structure,
    layer_by_layer,
    layers_in,
    running,
    takes_ids,
)
from dubito.models.network.learned import Learned
from dubito.models.network.regression_sums import regression_sums
from dubito.models.numerics.parameters import Positive, alike
from dubito.models.numerics.proof import check
from dubito.models.numerics.streams import begin
from dubito.models.posteriors.blocks import Blocks
from dubito.models.posteriors.entry import JointEntry
from dubito.models.posteriors.functions import Functions
from dubito.models.posteriors.protocol import (
    Dense,
    Dropped,
    Factored,
    Factors,
    Group,
    InSequence,
    Operand,
    Posterior,
)

Plan = Mapping[str, Execution]  # how each layer computes its K draws, by its name
Planner = Callable[[int, int], Plan]  # for B inputs and K draws
Stock = Mapping[nn.Module, Operand]  # weights drawn ahead, by layer


@dataclass(frozen=True)
class NetworkFactors:
    """What a prediction asks of a network, answered layer by layer: each layer's factors give its weights.

    Computed once per network and device, owned by the caller, never changed. A network of another kind extends it and
    answers otherwise where its draws differ:

    - A linearised network has no layers; its draws move some weights of a plain network along its Jacobian.
    - Global inducing points draw weights layer after layer, each by what inducing inputs become under the draws of the
      layers before. As they do not depend on the request, `stock` runs the inducing inputs through the network, and
      `outputs` passes its result on in `Draws.stock`.
      Deep GPs do the same with functions, which the inducing inputs' outputs at each layer fix, in place of weights.
    """

    closed_form: ClassVar[bool] = False  # outputs have `moments`, without draws
    ahead: ClassVar[bool] = False  # drawing costs more than a pass: a server makes draws ahead of the requests
    folds: ClassVar[bool] = True  # K draws of B inputs are K·B rows of a pass; False: its B rows serve all draws
    layers: Mapping[str, Factors]
    hierarchy: Factors | None  # draws the V's of all layers at once
    copies: int  # members of the layers that are kept in copies; 0 where there are none
    structure: Structure
    device: torch.device  # of activations
    dtype: torch.dtype  # of activations
    form: nn.Module | None = None  # the network in another form, with the same layers, to be run instead
    groups: Sequence[Group] = ()  # layers that are drawn together
    read: Reading | None = None  # what passes read off the features of the last layer, which is watched

    @cached_property
    def normals(self) -> int:
        """Standard normals that one draw of the whole network needs."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of normals of one draw: the hierarchy's first, then each layer's."""
        above = self.hierarchy.normals if self.hierarchy is not None else 0
        return [above, *(f.normals for f in self.layers.values())]

    @cached_property
    def places(self) -> dict[str, int]:
        """Where the normals of each layer begin."""
        return dict(zip(self.layers, accumulate(self.sizes), strict=False))

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many standard normals each layer needs for a draw."""
        return dict(zip(self.layers, self.sizes[1:], strict=True))

    @cached_property
    def members(self) -> int:
        """The most members that any part cycles through; 0 where nothing does."""
        parts = [self.hierarchy] if self.hierarchy is not None else []
        return max([self.copies, *(f.members for f in [*parts, *self.layers.values()])])

    @cached_property
    def random(self) -> bool:
        """False for a network whose every draw is the same."""
        return self.normals > 0 or self.members > 1

    @property
    def capturable(self) -> bool:
        """Draws come from normals alone, so that a graph can make them: the order of members is the host's."""
        return self.normals > 0 and self.members == 0

    def outputs(self, network: "BayesianNetwork", x: Tensor, draws: "Draws", plan: Planner, rows: int) -> Tensor:
        """(K, B, ...) of the same draws for every block of `rows` inputs; weights are made once for all blocks."""
        run = network.arrange(self, draws, plan(min(rows, len(x)), draws.K), keep=len(x) > rows)
        return torch.cat([network.go(block, run) for block in x.split(rows)], 1)

    def shared(self, network: "BayesianNetwork", x: Tensor, most: int, in_blocks: "InBlocks") -> "Shared | None":
        """Outputs as a function of draws, by what all `most` draws of a request share; None if they share nothing."""
        return None

    def readings(self, network: "BayesianNetwork", x: Tensor) -> Tensor:
        """What `read` reads at the mean, (B, columns): where draws share a pass, features do not depend on them."""
        assert self.read is not None
        with network.learned.changing:
            return network.run(x, self, Draws(1, None, 0), {})[0, :, -self.read.columns :]

    def moments(self, network: "BayesianNetwork", x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the outputs in closed form, both (B, C)."""
        raise InputError("method is 'probit'; only a subnetwork Laplace model has a closed form. Leave it out.")

    def stock(self, network: "BayesianNetwork", draws: "Draws") -> Stock:
        """Weights of these draws, to be kept for requests to come; empty where draws are no layer's weights."""
        return {layer: make() for layer, make in network.arrange(self, draws, {}).operands.items()}

    def gathered(self) -> Self:
        """The same factors, those of layers that can be drawn together side by side in memory.

        On a GPU, launching kernels layer by layer would take longer than they run.
        """
        groups, layers = list[Group](), dict(self.layers)
        classes = {name: type(layer.entry) for name, layer in self.structure.layers.items()}
        for entry in dict.fromkeys(classes.values()):
            own = {name: f for name, f in self.layers.items() if classes[name] is entry}
            of_class, changed = entry.gather(own, self.places)
            groups += of_class
            layers |= changed
        return replace(self, layers=MappingProxyType(layers), groups=tuple(groups))

    def resident(self, net: nn.Module, device: torch.device, dtype: torch.dtype) -> Self:
        """For a copy `net` of the network that runs on the device in `dtype`; draws stay in float32 or better."""
        return replace(
            self,
            layers=MappingProxyType({name: f.narrow(dtype).to(device) for name, f in self.layers.items()}),
            hierarchy=None if self.hierarchy is None else self.hierarchy.to(device),
            structure=Structure.of(net),
            read=None if self.read is None else self.read.to(device),
            device=device,
            dtype=dtype,
        )


@dataclass(frozen=True)
class Draws:
    """What fixes K draws: a row of standard normals each, and a place in the order of the ensemble's members."""

    K: int
    noise: Tensor | None  # (K, normals); None: the posterior mean, or they come from elsewhere, as said below
    seed: int  # orders the members
    start: int = 0  # how many draws came before these
    keys: Tensor | None = None  # training: numbers whose order is that of the members, instead of the seed's
    stock: Stock | None = None  # weights of the seed's first draws, made ahead
    by_graph: bool = False  # a pass prepared as a whole takes or makes the normals itself: `noise` is None
    key: Tensor | None = None  # (seed, first draw) on a GPU that makes normals by their number: instead of `noise`

    @property
    def random(self) -> bool:
        """False: the draws are the posterior mean."""
        return self.by_graph or any(given is not None for given in (self.noise, self.key, self.stock))

    def share(self, offset: int, n: int) -> Tensor | None:
        """The n normals of each draw that start at `offset`; None for the posterior mean."""
        if self.key is None:
            return None if self.noise is None else self.noise[:, offset : offset + n]
        from dubito.models.numerics.normals_kernel import fill

        return fill(torch.empty(self.K, n, device=self.key.device), self.key, offset)

    def part(self, offset: int, k: int) -> "Draws":
        """The k draws that start at `offset`."""
        noise = None if self.noise is None else self.noise[offset : offset + k]
        key = None if self.key is None else self.key + torch.tensor([0, offset], device=self.key.device)
        return replace(self, K=k, noise=noise, start=self.start + offset, key=key)

    def member(self, E: int) -> Tensor:
        """Each draw's member of E: a seeded order, cycled; the mean takes them in turn."""
        device = "cpu" if self.keys is None else self.keys.device
        place = torch.arange(self.start, self.start + self.K, device=device) % E
        if not self.random:
            return place
        if self.keys is not None:
            return self.keys[:E].argsort()[place]
        return torch.randperm(E, generator=torch.Generator().manual_seed(self.seed))[place]


InBlocks = Callable[[Callable[[Tensor], tuple[Tensor, Tensor]]], tuple[Tensor, Tensor]]  # applied block by block
Shared = Callable[[Draws, Tensor | None], Tensor]  # draws, and which inputs (None: all) -> outputs (K, B, C)


class JointPosterior(nn.Module, ABC):
    """A posterior over a network as a whole, in place of one for each layer; `joint.JOINT` lists the kinds."""

    key: ClassVar[str]  # its attribute of the network, its key in manifests, the prefix of its tensors
    over_weights: ClassVar[bool]  # over weights as they stand, so that no BatchNorm may be folded
    not_pruned: ClassVar[str]  # why `prune` refuses it
    entry: JointEntry  # of the manifest

    @property
    def inputs(self) -> Tensor | None:
        """U_0 (M, ...), the inducing inputs by which layers are drawn in sequence; None: there are none."""
        return None

    @abstractmethod
    def prepare(self, plain: NetworkFactors) -> NetworkFactors:
        """What predictions ask, of a network whose layers have the factors `plain`."""

    @abstractmethod
    def check(self, net: nn.Module) -> None:
        """Raises an ArtifactError where tensors of a file do not fit the network."""

    @classmethod
    @abstractmethod
    def blank(cls, entry: Any) -> Self:
        """One of the right size, into which tensors can be loaded."""

    @classmethod
    def sized(cls, size: int) -> Self:
        """For counting, without storage, where it has a size of its own."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def facts(entry: Any, network: "BayesianNetwork | None") -> dict[str, Any]:
        """For `dubito inspect --json`; the network where it is known."""

    @staticmethod
    @abstractmethod
    def lines(facts: Mapping[str, Any], calibration: Mapping[str, Any] | None) -> Iterator[str]:
        """What `dubito inspect` says of these facts."""


class BayesianNetwork(nn.Module):
    """Calling it runs one joint draw of all weights, with gradients: the forward pass of training.

    Answers come from `predict`, which draws many.
    """

    def __init__(self, net: nn.Module, *, hierarchy: BayesianLayer | None = None, task: Task | None = None) -> None:
        super().__init__()
        self.net = net
        self.learned = Learned()
        self.hierarchy = hierarchy  # its "weights" are the V's of all layers, side by side
        self.feature_bank: FeatureBank | None = None  # set by `set_feature_bank`
        self.task: Task = task if task is not None else Classification()
        self.noise: Positive | None = None  # regression: the standard deviation σ of the targets, learned
        self.gain: Tensor | None  # how far the noise follows the input: σ(x) = σ exp(gain · log_ratio(raw))
        self.register_buffer("gain", None)
        if self.task.kind == "regression":
            self.noise = Positive(torch.full((self.task.outputs,), 0.1), 1e-4)
            if self.task.noise == "input":
                self.gain = torch.ones(self.task.outputs)

    @property
    def layers(self) -> dict[str, BayesianLayer]:
        return layers_in(self.net)

    @property
    def joint(self) -> JointPosterior | None:
        """The posterior over the network as a whole; None: each layer has its own, or none."""
        return next((part for part in self.children() if isinstance(part, JointPosterior)), None)

    def set_joint(self, joint: JointPosterior | None) -> None:
        """Takes the place of the one that was there."""
        if (before := self.joint) is not None:
            delattr(self, before.key)
        if joint is not None:
            setattr(self, joint.key, joint)

    @property
    def priors(self) -> list[float]:
        """Scales of the layers' priors, in order."""
        return [layer.entry.sigma for layer in self.layers.values()]

    def set_priors(self, sigmas: Sequence[float]) -> None:
        for layer, sigma in zip(self.layers.values(), sigmas, strict=True):
            layer.set_prior(sigma)

    def forward(self, x: Tensor) -> Tensor:
        return self.sample(x, 1)[0]

    def sample(self, x: Tensor, K: int) -> Tensor:
        """K joint draws from torch's own generator, with gradients: (B, ...) -> (K, B, ...)."""
        return self.sample_with_ratio(x, K)[0]

    def sample_with_ratio(self, x: Tensor, K: int, in_turn: bool = False) -> tuple[Tensor, Tensor]:
        """And the mean of log Q − log P over the draws of layers whose KL has no closed form; `kl` has the rest.

        Members of an ensemble come in random order, or `in_turn`.
        """
        return self._sample(x, K, lambda normals: torch.randn(K, normals, device=x.device), in_turn)

    def mean(self, x: Tensor) -> Tensor:
        """Outputs at the posterior mean: (B, ...)."""
        return self._sample(x, 1, lambda normals: torch.zeros(1, normals, device=x.device))[0][0]

    def sample_linearised(self, x: Tensor, S: int) -> tuple[Tensor, Tensor]:
        """Outputs at the posterior mean, (B, ...), and S draws of their first-order change, (S, B, ...).

        If the network is `gaussian`, its weights are θ = μ + A ε for standard normals ε. A draw is the derivative of
        the outputs along A ε by forward mode: a sample of N(0, J Σ Jᵀ), the law of the linearised network, without J.
        """

        def normals(n: int) -> Tensor:
            dual: Tensor = forward_ad.make_dual(torch.zeros(S, n, device=x.device), torch.randn(S, n, device=x.device))
            return dual

        with warnings.catch_warnings(), forward_ad.dual_level():
            warnings.filterwarnings("ignore", "`torch.jit.script`", FutureWarning)  # by which torch loads its own rules
            mean, change = forward_ad.unpack_dual(self._sample(x, S, normals)[0])
        assert change is not None
        return mean[0], change

    @property
    def gaussian(self) -> bool:
        """Whether the weights are a linear function of standard normals."""
        layers = [*self.layers.values(), *([] if self.hierarchy is None else [self.hierarchy])]
        return self.joint is None and bool(layers) and all(m.q.gaussian and not m.entry.ensemble for m in layers)

    def _sample(
        self, x: Tensor, K: int, normals: Callable[[int], Tensor], in_turn: bool = False
    ) -> tuple[Tensor, Tensor]:
        if x.device.type == "cpu":
            check(x.device, x.dtype)
        layers = self._by_shape()
        kinds = [[layers[i] for i in indices] for indices in alike([layer.q.kind for layer in layers])]
        if self.hierarchy is not None:
            kinds = [[self.hierarchy], *kinds]
        factors = trainable([[layer.q for layer in kind] for kind in kinds])
        noise = normals(sum(f.normals for f in factors))
        copies = self._copies()
        members = max([copies, *(f.members for f in factors)])
        # on the device, so that a captured step draws anew; members kept in copies are chosen by the host
        device = torch.device("cpu") if copies else x.device
        keys = None if not members else (torch.arange if in_turn else torch.rand)(members, device=device)
        draws = Draws(K, noise, 0, keys=keys)
        plan: dict[nn.Module, Execution] = dict.fromkeys(layers, "factored")  # what a draw does not form is not formed
        structure, points = Structure.of(self.net), None if self.joint is None else self.joint.inputs
        operands, on_arrival = self._draw_together(kinds, factors, draws)
        run = Run(K, operands, plan, draws.member, structure, on_arrival=on_arrival)
        if points is not None:
            run, x = replace(run, points=len(points)), torch.cat([points.to(x.dtype), x])
        out = self.go(x, run) if x.is_cuda else self._go(x, run)  # on a CPU, gradients are faster as memory lies
        if K > 1 and self.joint is None:
            self.check_apart(x)
        ratios = [ratio.mean() for _, ratio in run.drawn.values()]
        return out[:, run.points :], torch.stack(ratios).sum().float() if ratios else out.new_zeros(())

    def _draw_together(
        self, kinds: Sequence[Sequence[BayesianLayer]], factors: Sequence[Factors], draws: Draws
    ) -> tuple[dict[nn.Module, Callable[[], Operand]], dict[nn.Module, OnArrival]]:
        """The weights of every layer; layers of a kind are drawn together, a hierarchy first, some on arrival."""
        assert draws.noise is not None
        member = {E: draws.member(E) for E in {f.members for f in factors} if E}
        V: dict[nn.Module, Tensor] = {}
        operands: dict[nn.Module, Callable[[], Operand]] = {}
        on_arrival: dict[nn.Module, OnArrival] = {}
        for kind, f, noise in zip(kinds, factors, draws.noise.split([f.normals for f in factors], dim=1), strict=True):
            if isinstance(f, InSequence):
                on_arrival[kind[0]] = partial(_draw_arriving, f, noise)
                continue
            given = torch.stack([V[layer] for layer in kind], 1) if kind[0] in V else None
            drawn = _with_V(f, given).draw_each(noise.to(f.dtype), member.get(f.members))
            if kind[0] is self.hierarchy:
                V = self._shared_out(as_matrix(drawn[0]))
            operands |= {layer: partial(_as_it_is, W) for layer, W in zip(kind, drawn, strict=True)}
        return operands, on_arrival

    def kl(self, data_size: int | None = None) -> Tensor:
        """KL of the whole posterior; with `data_size` N, λ's term is weighted by min(1, N/d_in) [Ritter21, eq. 45].

        Without the weights of layers that are drawn in sequence, whose part comes with `sample_with_ratio`.
        """
        posteriors = [layer.q for layer in self._by_shape()]
        alike_ = [[posteriors[i] for i in indices] for indices in alike([type(q) for q in posteriors])]
        parts = [type(those[0]).kl_together(those, data_size) for those in alike_]
        if self.hierarchy is not None:
            parts.append(self.hierarchy.q.kl())
        return torch.stack(parts).sum() if parts else next(self.parameters()).new_zeros(())

    def factors(self) -> NetworkFactors:
        """For serving: compute once, keep, and hand to every prediction."""
        layer_factors = {name: layer.q.factors() for name, layer in self.layers.items()}
        above = None if self.hierarchy is None else self.hierarchy.q.factors()
        like, structure = next(self.net.parameters(), torch.empty(0)), Structure.of(self.net)
        read = None if self.feature_bank is None else self.feature_bank.reading()
        layers = MappingProxyType(layer_factors)
        factors = NetworkFactors(layers, above, self._copies(), structure, like.device, like.dtype, read=read)
        return factors if self.joint is None else self.joint.prepare(factors)

    def set_feature_bank(self, bank: FeatureBank | None) -> None:
        """Passes then read the distance of the features to the bank's points, too."""
        self.feature_bank = bank
        if bank is None:
            return
        layer = dict(self.net.named_modules()).get(bank.entry.layer)
        if layer is None or not is_linear(layer) or layer.in_features != bank.entry.features:
            raise ConversionError(
                f"its bank holds {bank.entry.features} features of layer {bank.entry.layer!r}; the network has no such "
                "linear layer."
            )
        watch(layer)

    def _copies(self) -> int:
        """Members of the layers that are kept in copies; 0 where there are none."""
        return max([0, *(len(m.copies) for m in self.net.modules() if isinstance(m, MemberLayer))])

    def run(self, x: Tensor, factors: NetworkFactors, draws: Draws, plan: Plan) -> Tensor:
        """K draws on B inputs, one pass with the draws folded into the batch: (B, ...) -> (K, B, ...)."""
        return self._go(x, self.arrange(factors, draws, plan))

    def arrange(self, factors: NetworkFactors, draws: Draws, plan: Plan, keep: bool = False) -> Run:
        """What a pass needs; with `keep`, operands are made once and kept for further passes with the same draws."""
        layers = factors.structure.layers
        by_layer: dict[nn.Module, Execution] = {layers[name]: execution for name, execution in plan.items()}
        run = Run(
            draws.K,
            {},
            by_layer,
            draws.member,
            factors.structure,
            factors=factors.layers,
            form=factors.form,
            read=factors.read,
        )
        if draws.stock is not None:
            stored = {layer: partial(all_.part, draws.start, draws.K) for layer, all_ in draws.stock.items()}
            return replace(run, operands=stored)
        V: dict[nn.Module, Tensor] = {}
        if factors.hierarchy is not None:
            V = self._shared_out(as_matrix(_draw(factors.hierarchy, 0, factors.sizes[0], draws, None)))
        operands: dict[nn.Module, Callable[[], Operand]] = {}
        on_arrival: dict[nn.Module, OnArrival] = {}
        for name, f in factors.layers.items():
            if isinstance(f, InSequence):
                noise = draws.share(factors.places[name], factors.counts[name])
                on_arrival[layers[name]] = partial(_draw_arriving, f, noise)
                continue
            make = partial(_draw, f, factors.places[name], factors.counts[name], draws, V.get(layers[name]))
            operands[layers[name]] = cache(make) if keep else make
        groups = factors.groups if draws.random else ()
        drawn: list[Callable[[], Sequence[Operand]]] = [
            cache(partial(_draw_group, group, factors, draws)) for group in groups
        ]
        begun: Sequence[Callable[[], object]] = ()
        if draws.key is not None and draws.key.is_cuda:
            begun = drawn = begin(drawn, draws.key.device)
        for group, together in zip(groups, drawn, strict=True):
            operands |= {layers[name]: partial(_among, together, i) for i, name in enumerate(group.names)}
        return replace(run, operands=operands, begun=begun, on_arrival=on_arrival)

    def _shared_out(self, V: Tensor) -> dict[nn.Module, Tensor]:
        """Split the V that a hierarchy drew: the columns of each layer."""
        columns: dict[nn.Module, Tensor] = {}
        offset = 0
        for layer in self.layers.values():
            if (shape := layer.entry.from_above) is not None:
                columns[layer], offset = V[..., offset : offset + shape[1]], offset + shape[1]
        return columns

    def _by_shape(self) -> list[BayesianLayer]:
        """The layers sorted by shape, so that neighbours can be drawn, and their KL computed, together."""
        return sorted(self.layers.values(), key=lambda layer: layer.geometry.shape)

    def go(self, x: Tensor, run: Run) -> Tensor:
        """One pass, (B, ...) -> (K, B, ...); channels last in memory, which is faster, where the network allows it."""
        if x.dim() in (4, 5) and run.structure.convolves and self.learned.channels_last:
            try:
                return self._go(x, run, channels_last=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # a `view`, or whatever else asks how memory lies; or a mistake of another kind
                out = self._go(x, run)
            self.learned.channels_last = False
            return out
        return self._go(x, run)

    def keeps_apart(self, x: Tensor, factors: NetworkFactors, draws: Draws | None = None) -> bool | None:
        """Whether several draws (any two, if none are given) of some inputs can share a pass: the rows of each stay by
        themselves.

        By what arrives at the layers, whatever their weights make of it: where the second of two draws gets other
        inputs, the rows of the first are as before, and as many as in a pass of its own. None: no other inputs are
        known that would show it. True, too, where nothing can be seen: without memory for two draws, or of a network
        that draws random numbers or takes no single input.
        """
        x = x[:1]
        if (other := self._another(x)) is None:
            return None
        if draws is None:
            draws = Draws(2, torch.zeros(2, factors.normals, device=factors.device), 0)
        try:
            with self.learned.evaluating(self), torch.no_grad():
                if factors.ahead and draws.stock is None:
                    draws = replace(draws, noise=None, key=None, start=0, stock=factors.stock(self, draws.part(0, 2)))
                both, alone = (self.arrange(factors, draws.part(0, K), {}) for K in (2, 1))
                one, two = self._arriving(x, x, alone), self._arriving(x, torch.cat([x, x]), both)
                beside = self._arriving(x, torch.cat([x, other]), both)
                if [n for n, _ in one] == [n for n, _ in two] and beside == two:
                    return True
                return two != self._arriving(x, torch.cat([x, x]), both)
        except FoldError:
            return False
        except Exception:
            return True

    def check_apart(self, x: Tensor) -> None:
        """Refuse training with several draws in a step where rows would go to the wrong ones.

        Once for each shape of an input; not while a step is compiled or captured, before which it is to be called.
        """
        shape, captured = tuple(x.shape[1:]), x.is_cuda and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or captured or shape in self.learned.apart:
            return
        with torch.no_grad():
            apart = self.keeps_apart(x, self.factors())
        if apart is False:
            raise FoldError(
                "the network mixes rows of the batch, or gives a layer rows of its own, so several samples cannot "
                "share a training step: some would get the inputs of others. Train with one (fit.samples = 1), or let "
                "the batch be the first axis of what layers get, as with batch_first=True."
            )
        if apart:
            self.learned.apart.add(shape)

    def _arriving(self, x: Tensor, folded: Tensor, run: Run) -> list[tuple[int, float]]:
        """What arrives of the first draw at each layer, in brief."""
        arrived: list[tuple[int, float]] = []
        self._go(x, replace(run, form=None, read=None, arrived=arrived), folded=folded.clone())
        return arrived

    def _another(self, x: Tensor) -> Tensor | None:
        """Other inputs of the kind of these: numbers may be indices, or must be positive, so they go towards 0."""
        if x.is_floating_point():
            if not torch.equal(less := 0.7 * x, x):
                return less
            return None if takes_ids(self.net) else x + 1
        return None if torch.equal(rolled := x.roll(1, -1), x) else rolled

    def _go(self, x: Tensor, run: Run, channels_last: bool = False, folded: Tensor | None = None) -> Tensor:
        """`folded`: K times B inputs, where they are not the same for each draw."""
        if folded is None and run.first_alone:
            like = torch.channels_last if channels_last and x.dim() == 4 else torch.contiguous_format
            folded = torch.empty((run.K * len(x), *x.shape[1:]), dtype=x.dtype, device=x.device, memory_format=like)
            folded[: len(x)].copy_(x)
        elif folded is None:
            # of one draw, too: a network may change its input in place
            times = (run.K, *[1] * (x.dim() - 1))
            folded = x.movedim(1, -1).repeat(times).movedim(-1, 1) if channels_last else x.repeat(times)
        elif channels_last:
            folded = folded.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        self.learned.inputs = tuple(x.shape[1:])
        here = replace(run, B=len(x), channels_last=channels_last, features=[], ahead={})
        with running(here), layer_by_layer(run.structure.attends):
            try:
                out = (self.net if run.form is None else run.form)(folded)
            except IndexError as error:
                raise InputError(
                    f"the network has no such index: {error}. A token id may be beyond its table."
                ) from None
        if not isinstance(out, Tensor) or len(out) != run.K * len(x):
            came = f"a tensor of {len(out)} rows" if isinstance(out, Tensor) else type(out).__name__
            advice = "" if isinstance(out, Tensor) else " Wrap it in an nn.Module that returns the one to be asked for."
            raise PredictionError(f"the network answers with {came}; expected a tensor with one row per input.{advice}")
        if run.read is not None:
            out = torch.cat([out.float(), run.read(here.features[0], run.K, run.member)], 1)
        return out.view(run.K, len(x), *out.shape[1:])


def trainable(kinds: Sequence[Sequence[Posterior]]) -> list[Factors]:
    """The factors of each kind of layers for one training step; kinds of one class are prepared together."""
    prepared: dict[int, Factors] = {}
    for indices in alike([type(kind[0]) for kind in kinds]):
        prepared |= zip(indices, type(kinds[indices[0]][0]).train_together([kinds[i] for i in indices]), strict=True)
    return [prepared[i] for i in range(len(kinds))]


def _with_V(f: Factors, V: Tensor | None) -> Factors:
    return f if V is None else f.given(V)


def _as_it_is(operand: Operand) -> Operand:
    return operand


def _among(all_: Callable[[], Sequence[Operand]], i: int) -> Operand:
    return all_()[i]


def _draw(f: Factors, place: int, n: int, draws: Draws, V: Tensor | None) -> Operand:
    """Draws by n normals each, which begin at `place`."""
    member = draws.member(f.members) if f.members else None
    noise = draws.share(place, n)
    f = _with_V(f, V)
    return f.mean(member) if noise is None else f.draw(noise.to(f.dtype), member)


@dataclass(frozen=True)
class Arrival:
    geometry: Geometry
    inputs: Tensor  # (K, M, ...)

    @property
    def rows(self) -> Tensor:
        columns = self.geometry.columns(self.inputs.flatten(0, 1))
        return columns.reshape(len(self.inputs), -1, columns.shape[-1])

    def sums(self, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        return regression_sums(self.geometry, self.inputs, V, lam)


def _draw_arriving(
    f: InSequence, noise: Tensor | None, geometry: Geometry, inputs: Tensor
) -> tuple[Dense | Functions, Tensor]:
    """Weights of a layer at which inducing inputs (K, M, ...) arrive, and log Q − log P of each draw."""
    with torch.autocast(inputs.device.type, enabled=False):
        return f.draw_given(Arrival(geometry, inputs), noise)


def _draw_group(group: Group, factors: NetworkFactors, draws: Draws) -> Sequence[Operand]:
    if draws.key is not None and group.table is not None:
        return group.draw_by(draws.key, draws.K)
    shares = [draws.share(factors.places[name], factors.counts[name]) for name in group.names]
    return group.draw([share for share in shares if share is not None])


def as_matrix(operand: Operand) -> Tensor:
    """The K matrices themselves: (K, d_out, d_in)."""
    match operand:
        case Dense(W) | Dropped(W, _):
            return W
        case Factored() | Blocks():
            return operand.dense()
        case Functions():
            raise ConversionError("a layer that is a Gaussian process has no weights.")
