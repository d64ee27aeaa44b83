"""A network is tried out on two random inputs before it is saved: what could not be served is refused there."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dubito.models.errors import ArtifactError, first_line
from dubito.models.manifest import Manifest
from dubito.models.network.layers import Structure, takes_ids
from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors
from dubito.models.predictions.prediction import evaluating

SHARES = (
    "outputs are probabilities: positive numbers with a sum of 1. Expected logits, of which dubito takes the softmax "
    "itself: leave out the Softmax at the network's end."
)
SAME = 1e-3  # of the largest output: how far an input's answer may move with the inputs beside it


@dataclass(frozen=True)
class Trial:
    """The answers of a posterior's mean to two random inputs: numbers in [0, 1), or indices where it takes those."""

    factors: NetworkFactors
    x: Tensor
    answer: Tensor  # (2, ...)

    @classmethod
    def of(cls, network: BayesianNetwork, shape: tuple[int, ...]) -> Self:
        factors = replace(network.factors(), read=None)  # what is read off the features is no answer
        numbers = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0)).to(factors.device, factors.dtype)
        errors: list[Exception] = []
        for x in (numbers, numbers.round().long()):
            try:
                return cls(factors, x, _answer(network, factors, x))
            except Exception as error:  # whatever the network's code comes up with
                errors.append(error)
        # of real numbers, unless the network wants indices
        reason = first_line(errors[takes_ids(network.net)])
        raise ArtifactError(f"the network fails on inputs of shape {shape}: {reason}.")

    def check(self, network: BayesianNetwork, manifest: Manifest) -> None:
        """One row of logits or values for each input, whatever inputs come beside it."""
        check_width(tuple(self.answer.shape[1:]), manifest)
        if manifest.task.kind == "classification" and is_shares(self.answer):
            raise ArtifactError(f"the network's {SHARES}")
        again = _answer(network, self.factors, self.x)
        if self._moved(again):
            raise ArtifactError(
                "the network's answer to an input changes from call to call: it draws random numbers or keeps a state. "
                "Expected the same answer in evaluation mode."
            )
        try:
            alone = torch.cat([_answer(network, self.factors, row) for row in self.x.split(1)])
        except ValueError as error:  # of a BatchNorm without statistics of its own, which wants several rows
            reason = first_line(error)
            raise ArtifactError(
                f"the network fails on one input alone: {reason}. A BatchNorm needs running statistics "
                "(track_running_stats=True): an answer must not depend on the other inputs of its batch."
            ) from None
        if self._moved(alone):
            raise ArtifactError(
                "the network's answer to an input depends on the other inputs of its batch. A server computes inputs "
                "of several clients together: compute each row from its own input alone."
            )

    def _moved(self, other: Tensor) -> bool:
        return bool((other - self.answer).abs().max() > SAME * self.answer.abs().max())

    def check_loaded(self, other: BayesianNetwork) -> None:
        """That a network which computes in other numbers than float32 also runs as `load` gives it: all in float32."""
        kinds = {t.dtype for t in (*other.parameters(), *other.buffers()) if t.is_floating_point()}
        if kinds <= {torch.float32}:
            return
        try:
            _answer(other.float(), self.factors, self.x.float() if self.x.is_floating_point() else self.x)
        except Exception as error:  # whatever the network's code comes up with
            names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            raise ArtifactError(
                f"the network holds numbers of the types {names}, and fails in float32, in which a file is loaded: "
                f"{first_line(error)}. Call network.float() before bayesianize, and leave out casts to other types."
            ) from None

    def agrees(self, other: BayesianNetwork) -> bool:
        """Whether a network with the same weights gives the same answers."""
        answer = _answer(other, self.factors, self.x)
        return torch.allclose(answer, self.answer, rtol=1e-4, atol=1e-6, equal_nan=True)


def check_width(shape: tuple[int, ...], manifest: Manifest) -> None:
    """That a network with an answer of this shape to one input does what the manifest says of its task and classes."""
    task, labels = manifest.task, manifest.card.labels
    if len(shape) != 1:
        came = "one number without a dimension of its own" if not shape else f"an array of shape {shape}"
        raise ArtifactError(
            f"the network answers one input with {came}; expected (classes,) logits or (values,). Outputs for each "
            "pixel or each step of a sequence are not served: reduce them to one row for each input."
        )
    (width,) = shape
    if task.kind == "regression":
        if width != task.numbers:
            raise ArtifactError(f"the network answers with {width} values per input; its task says {task.numbers}.")
        return
    if width == 1:
        raise ArtifactError(
            "the network has one output; a classification needs a logit for each class. For yes or no, give two: zero "
            "and the logit, as torch.cat([torch.zeros_like(z), z], 1). For a number, pass task=Regression()."
        )
    if labels is not None and len(labels) != width:
        raise ArtifactError(f"the card names {len(labels)} classes, but the network has {width} outputs.")


@torch.no_grad()
def _answer(network: BayesianNetwork, factors: NetworkFactors, x: Tensor) -> Tensor:
    own = replace(factors, structure=Structure.of(network.net))
    with evaluating(network):
        return own.outputs(network, x, Draws(1, None, 0), lambda B, K: {}, len(x))[0]


def is_shares(answer: Tensor) -> bool:
    """Whether rows are probabilities of classes, which logits are by no chance."""
    sums = answer.double().sum(-1)
    return bool((answer >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4)
