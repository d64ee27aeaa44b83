"""What sampling and training ask of a posterior, with defaults for a method that has nothing particular."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from dubito.models.posteriors.blocks import Blocks
from dubito.models.posteriors.functions import Functions


@dataclass(frozen=True)
class Dense:
    """K weight matrices outright; one matrix stands for all K where `W` has length 1."""

    W: Tensor  # (K or 1, d_out, d_in)

    def part(self, offset: int, k: int) -> "Dense":
        """The k draws that start at `offset`."""
        return Dense(self.W[offset : offset + k]) if len(self.W) > 1 else self

    def joined(self, others: "list[Dense]") -> "Dense":
        """These draws and those of the others."""
        return Dense(torch.cat([self.W, *(other.W for other in others)]))


@dataclass(frozen=True)
class Factored:
    """K weight matrices that need never be formed: W x = G Bᵀx + e ‖x − B Bᵀx‖."""

    B: Tensor  # (d_in, r)       orthonormal columns, shared by the K draws
    G: Tensor  # (K, d_out, r)
    e: Tensor | None  # (K, d_out)  None: nothing outside the span of B

    def dense(self) -> Tensor:
        """The linear part as matrices: (K, d_out, d_in)."""
        return self.G @ self.B.T.to(self.G.dtype)

    def part(self, offset: int, k: int) -> "Factored":
        """The k draws that start at `offset`."""
        return Factored(self.B, self.G[offset : offset + k], None if self.e is None else self.e[offset : offset + k])


@dataclass(frozen=True)
class Dropped:
    """One weight matrix whose inputs are dropped anew for every row: how a dropout layer trains."""

    W: Tensor  # (1, d_out, d_in)
    rate: float

    def part(self, offset: int, k: int) -> "Dropped":
        return self


Operand = Dense | Factored | Dropped | Blocks | Functions


class Value:
    """A frozen dataclass of tensors and plain values, which can be copied elsewhere."""

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same value elsewhere or in another precision; `self` is left as it is."""
        return self._each(lambda t: t.to(device=device, dtype=dtype if t.is_floating_point() else None))

    def settle(self) -> Self:
        """A copy that no later change of the parameters can reach, in float32 or better.

        Draws are made in that precision whatever type the parameters are stored and the activations run in.
        """
        return self._each(lambda t: t.detach().to(torch.promote_types(t.dtype, torch.float32), copy=True))

    def narrow(self, dtype: torch.dtype) -> Self:
        """With the tensors that activations are multiplied by in their dtype; draws stay in float32 or better."""
        return self

    @property
    def dtype(self) -> torch.dtype:
        return next(t.dtype for t in self._tensors() if t.is_floating_point())

    def _tensors(self) -> Iterator[Tensor]:
        for f in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            part = getattr(self, f.name)
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, Value):
                yield from part._tensors()

    def _each(self, change: Callable[[Tensor], Tensor], seen: dict[Tensor, Tensor] | None = None) -> Self:
        seen = {} if seen is None else seen
        changed = {f.name: _changed(getattr(self, f.name), change, seen) for f in fields(self)}  # type: ignore[arg-type]
        return replace(self, **changed)  # type: ignore[type-var]


def _changed(part: Any, change: Callable[[Tensor], Tensor], seen: dict[Tensor, Tensor]) -> Any:
    match part:
        case Tensor():
            if part not in seen:  # by identity
                seen[part] = change(part)
            return seen[part]
        case Value():
            return part._each(change, seen)
        case tuple():
            return tuple(_changed(p, change, seen) for p in part)
    return part


class Frozen(Protocol):
    """A distribution over a tensor of some shape, as a value: it turns standard normals into draws."""

    @property
    def normals(self) -> int:
        """Standard normals that one draw needs."""

    @property
    def members(self) -> int:
        """How many point masses the draws cycle through; 0 for a continuous distribution."""

    def mean(self, member: Tensor | None) -> Tensor:
        """The mean (1, *shape), or the members asked for (K, *shape)."""

    def draw(self, noise: Tensor, member: Tensor | None) -> Tensor:
        """(K, normals) standard normals, and (K,) members where there are any -> (K, *shape)."""

    def to(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Self: ...

    def settle(self) -> Self: ...


class Distribution(Protocol):
    """q over one tensor (V, W or g), with trainable parameters, which artifacts name `law.…`."""

    def freeze(self) -> Frozen:
        """The distribution as it is now; gradients flow through it where they are wanted."""

    @classmethod
    def freeze_together(cls, laws: Sequence[Self]) -> Frozen:
        """The joint distribution of n of one shape, over (n, *shape), with few kernels."""

    def kl(self, prior: float) -> Tensor:
        """KL to N(0, prior²) per entry, in closed form."""

    @classmethod
    def kl_together(cls, laws: Sequence[Self], prior: float) -> Tensor:
        """The sum of their KLs, with few kernels."""


class Factors(Value, ABC):
    """What a layer's K draws are made from: a value that its caller computes once and owns."""

    @property
    @abstractmethod
    def normals(self) -> int:
        """Standard normals that one draw needs."""

    @property
    def members(self) -> int:
        """Number of point masses that draws cycle through; 0 for a continuous distribution."""
        return 0

    @abstractmethod
    def mean(self, member: Tensor | None) -> Operand:
        """The posterior mean as one draw; for an ensemble, the mean given each of the members asked for."""

    @abstractmethod
    def draw(self, noise: Tensor, member: Tensor | None) -> Operand:
        """K draws from (K, normals) standard normals."""

    def draw_each(self, noise: Tensor, member: Tensor | None) -> Sequence[Operand]:
        """Draws of each of the layers that `train_together` joined into this value."""
        return [self.draw(noise, member)]

    def given(self, V: Tensor) -> Self:
        """The same with V as a hierarchy has drawn it, (K, M_out, M_in); of n layers (K, n, M_out, M_in)."""
        return self

    def factored_is_cheaper(self, groups: int) -> bool:
        """Whether draws act on inputs with the fewest multiplications without W being formed."""
        return False

    @property
    def projection(self) -> tuple[Tensor, bool] | None:
        """B of the draws, which is the same for all, and whether they have noise outside it; None: they have no B."""
        return None

    def tap_by_tap(self, channels: int, bias: bool) -> Self | None:
        """For inputs whose channels lie together at each tap of a kernel; None: only channel by channel."""
        return None


class Arrived(Protocol):
    """What the inducing inputs have become where they arrive at a layer, under K draws of the layers before it."""

    @property
    def rows(self) -> Tensor:
        """(K, n, d_in), without the bias's 1; n is a multiple of M where a layer meets several rows of each input."""

    def sums(self, V: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
        """G = ΦᵀΛΦ (K, d_in, d_in) and h = ΦᵀΛV (K, d_in, d_out) of the features Φ that arrive, the bias's 1 included.

        V (M, places, d_out) are pseudo-outputs, lam (M,) their precisions.
        """


class InSequence(Factors):
    """Factors of weights that are drawn once inducing inputs arrive at the layer, under the draws of those before."""

    @abstractmethod
    def draw_given(self, arrived: Arrived, noise: Tensor | None) -> tuple[Dense | Functions, Tensor]:
        """K draws by normals (K, normals), or their mean, and log Q − log P of each (K,)."""

    def mean(self, member: Tensor | None) -> Operand:
        raise NotImplementedError("such a layer has no mean of its own")

    def draw(self, noise: Tensor, member: Tensor | None) -> Operand:
        raise NotImplementedError("such a layer has no draws of its own")


class Group(Protocol):
    """Layers that are drawn in one go."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def table(self) -> Tensor | None: ...

    def draw(self, noise: Sequence[Tensor]) -> Sequence[Operand]:
        """Each layer's (K, normals) -> each layer's draws."""

    def draw_by(self, key: Tensor, K: int) -> Sequence[Operand]:
        """The same from (seed, first draw), where there is a table."""


@dataclass(frozen=True)
class Seen:
    """What a layer of the plain network gets and gives, of M examples."""

    rows: Tensor  # (M, d_in)  its input at one place of each, the bias's 1 included
    given: Tensor  # (M, d_out)  its output there
    outputs: Tensor  # (M, places, d_out)
    targets: Tensor | None = None  # (M, 1, d_out)  of the examples, at the last layer

    def first(self, M: int) -> "Seen":
        targets = None if self.targets is None else self.targets[:M]
        return Seen(self.rows[:M], self.given[:M], self.outputs[:M], targets)


class Posterior(nn.Module, ABC):
    """q over one layer's weight matrix W (d_out × d_in)."""

    sigma: float  # of the prior
    unprunable = ""  # why there is nothing to prune

    @property
    def noise_in_W(self) -> bool:
        """Whether the draws of this layer alone show how much W varies."""
        return True

    @property
    def gaussian(self) -> bool:
        """Whether W, for each member of an ensemble, is a linear function of standard normals."""
        return True

    @property
    def takes_directions(self) -> bool:
        """Whether `set_directions` changes anything."""
        return False

    @abstractmethod
    def trainable(self) -> Factors:
        """Factors for one training step, differentiable."""

    @torch.no_grad()
    def factors(self) -> Factors:
        """Factors for serving: the same distribution without gradients, kept by the caller."""
        return self.trainable().settle()

    @abstractmethod
    def kl(self, data_size: int | None = None) -> Tensor:
        """KL to the prior; `data_size` is the number of training examples, for methods that weight a term by it."""

    @property
    def kind(self) -> Hashable:
        """Layers of one kind are drawn together in a training step."""
        return self

    @classmethod
    def train_together(cls, kinds: Sequence[Sequence[Self]]) -> Sequence[Factors]:
        """One value for the layers of each kind, for one training step."""
        return [layers[0].trainable() for layers in kinds]

    @classmethod
    def kl_together(cls, layers: Sequence[Self], data_size: int | None = None) -> Tensor:
        """The sum of their KLs."""
        return torch.stack([q.kl(data_size) for q in layers]).sum()

    @classmethod
    def prune(cls, layers: Sequence[tuple[Self, bool]], keep: float) -> None:
        """Keep that share of all that can be pruned in these layers; with each, whether W's last column is a bias."""

    def prunable(self, bias: bool) -> int:
        """How many parameters `prune` may set to zero."""
        return 0

    def fit(self, W: Tensor) -> Tensor:
        """Set the projections for the best fit of W, and return the V of it, for a hierarchy to start from."""
        raise NotImplementedError

    def distil(self, W: Tensor) -> None:
        """Start its members at these weight matrices (members, d_out, d_in), as nearly as it can."""
        raise NotImplementedError

    def observe(self, seen: Seen, trained: bool) -> None:
        """Start at what the layer makes of examples; `trained`: the plain network is to be kept."""

    def set_directions(self, inputs: Tensor, factors: Factors, R: int) -> None:
        """Give the R leading directions of the layer's inputs (n, d_in) noise of their own."""

    def update(self) -> dict[str, Any]:
        """Fields of the layer's entry that changed since it was described."""
        return {}

    def row(self) -> dict[str, Any]:
        """What `inspect --json` says of the trained layer beyond its entry."""
        return {}


Gathered = tuple[Sequence[Group], Mapping[str, Factors]]
