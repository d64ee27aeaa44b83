"""Global inducing points of a network [Ober21]: inputs U_0 by which its layers are drawn one after the other.

U_0 goes through the network in front of the inputs. Each layer of method `gi` draws its weights when U_0 arrives there
(algorithm 1), and each of method `dgp` its function, so that whatever stands between the layers (residual connections,
pooling, activations) needs no code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dubito.models.errors import ArtifactError
from dubito.models.network.network import BayesianNetwork, Draws, JointPosterior, NetworkFactors, Planner, Stock
from dubito.models.network.plan import cheapest
from dubito.models.posteriors.inducing_points import InducingInputsEntry

ROWS = 4096  # inducing inputs times draws that go through the network at a time


@dataclass(frozen=True)
class SequentialFactors(NetworkFactors):
    """A network whose weights are drawn by inducing inputs, whatever the request."""

    capturable: ClassVar[bool] = False
    ahead: ClassVar[bool] = True
    U_0: Tensor = field(kw_only=True)  # (M, ...)

    def outputs(self, network: BayesianNetwork, x: Tensor, draws: Draws, plan: Planner, rows: int) -> Tensor:
        if draws.stock is None:
            draws = replace(draws, noise=None, key=None, start=0, stock=self.stock(network, draws))
        return super().outputs(network, x, draws, plan, rows)

    def stock(self, network: BayesianNetwork, draws: Draws) -> Stock:
        """Weights of all layers: U_0 goes through the network alone, under some of the draws at a time."""
        K, k = draws.K, max(1, ROWS // len(self.U_0))
        others = {layer: make() for layer, make in network.arrange(self, draws, {}).operands.items()}
        parts: list[dict[nn.Module, Any]] = []  # draws of one kind for each layer
        for i in range(0, K, k):
            some = draws.part(i, min(k, K - i))
            run = network.arrange(self, some, cheapest(self))
            known = {layer: partial(operand.part, i, some.K) for layer, operand in others.items()}
            run = replace(run, operands=known, points=len(self.U_0), read=None, form=None)
            network.go(self.U_0, run)
            parts.append({layer: operand for layer, (operand, _) in run.drawn.items()})
        first, *further = parts
        return {**others, **{layer: first[layer].joined([part[layer] for part in further]) for layer in first}}

    def resident(self, net: nn.Module, device: torch.device, dtype: torch.dtype) -> "SequentialFactors":
        """With U_0 in the type of the network's other tensors; in float32 where there are none."""
        others = next((t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()), None)
        U_0 = self.U_0.to(device, torch.float32 if others is None else others.dtype)
        return replace(super().resident(net, device, dtype), U_0=U_0)


class InducingInputs(JointPosterior):
    """U_0, which is trained like V and Λ of the layers."""

    key = "inducing_inputs"
    over_weights = False
    not_pruned = (
        "this model has global inducing points (gi), every one of which takes part in all weights: there is nothing to "
        "prune. Train it with fewer points (posterior.options: inducing)."
    )
    entry: InducingInputsEntry

    def __init__(self, U_0: Tensor) -> None:
        super().__init__()
        self.U_0 = nn.Parameter(U_0)
        self.entry = InducingInputsEntry(points=len(U_0), shape=tuple(U_0.shape[1:]))

    @property
    def inputs(self) -> Tensor:
        return self.U_0

    @classmethod
    def blank(cls, entry: Any) -> "InducingInputs":
        return cls(torch.empty(entry.points, *entry.shape))

    def prepare(self, plain: NetworkFactors) -> SequentialFactors:
        parts = {f.name: getattr(plain, f.name) for f in fields(plain)}
        return SequentialFactors(**parts, U_0=self.U_0.detach().clone())

    def check(self, net: nn.Module) -> None:
        """By sending U_0 through the network that a file describes: V must have a row for every place."""
        network = BayesianNetwork(net)
        network.set_joint(self)
        try:
            with torch.no_grad():
                network.factors().stock(network, Draws(1, None, 0))
        except (RuntimeError, ValueError) as error:
            raise ArtifactError(
                f"its inducing inputs do not fit its network or the pseudo-outputs of a layer: {error}."
            ) from None

    @staticmethod
    def facts(entry: Any, network: BayesianNetwork | None) -> dict[str, Any]:
        """For `dubito inspect`."""
        facts: dict[str, Any] = entry.model_dump(mode="json")
        return {**facts, "numbers": entry.points * prod(entry.shape)}

    @staticmethod
    def lines(facts: Mapping[str, Any], calibration: Mapping[str, Any] | None) -> Iterator[str]:
        shape = " × ".join(map(str, facts["shape"]))
        yield f"M = {facts['points']:,} inducing inputs of {shape}: {facts['numbers']:,} numbers"
        yield "weights do not depend on a request: a server draws them ahead of time"
