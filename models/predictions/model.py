"""A model ready to answer: a network, what is known about it, and its factors, computed once."""

import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.manifest import Card, Manifest, Predictive
from dubito.models.network.network import BayesianNetwork, NetworkFactors
from dubito.models.predictions.adaptive import AT_MOST, TOLERANCE, predict_settled
from dubito.models.predictions.prediction import Passes, Prediction, predict, predict_closed

USUAL = 20  # draws K


@dataclass(frozen=True)
class Model:
    """What `load` returns. The network is not to be trained any more: its factors would not follow."""

    network: BayesianNetwork
    manifest: Manifest
    made: NetworkFactors | None = None  # factors that are there already

    @property
    def card(self) -> Card:
        return self.manifest.card

    @property
    def temperature(self) -> float:
        """As calibrated; 1 where it was not."""
        return 1.0 if self.card.calibration is None else self.card.calibration.temperature

    @property
    def method(self) -> Predictive:
        """Predictive of requests that choose none: as calibrated, else the closed form where there is one."""
        if self.card.calibration is not None:
            return self.card.calibration.method
        return "probit" if self.manifest.closed_form else "sampling"

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device if self.made is None else self.made.device

    @cached_property
    def factors(self) -> NetworkFactors:
        return self.network.factors() if self.made is None else self.made

    def predict(
        self,
        x: Tensor,
        samples: int | Literal["auto"] | None = None,
        seed: int | None = None,
        *,
        method: Predictive | None = None,
        keep_outputs: bool = False,
        max_rows: int | None = None,
        tolerance: float = TOLERANCE,
        max_samples: int = AT_MOST,
    ) -> Prediction:
        """K draws for inputs (B, ...) in the space that the manifest declares; `prediction.predict` says the rest.

        With "auto", as many as each input's answer needs to settle: `adaptive.predict_settled` says how. A linearised
        network answers as `method` says; without one as calibrated, and by draws where `samples` are asked for.
        """
        declared = self.card.input
        if declared is not None and isinstance(x, Tensor) and tuple(x.shape[1:]) != declared.shape:
            raise InputError(
                f"inputs have shape {tuple(x.shape)}; this model takes (B, {', '.join(map(str, declared.shape))})."
            )
        passes: Passes = {"max_rows": max_rows, "temperature": self.temperature}
        if method not in (None, "probit", "sampling"):
            raise InputError(f"method is {method!r}; expected probit, sampling or none.")
        if method is None:
            method = self.method if samples is None and not keep_outputs else "sampling"
        if method == "probit":
            if samples is not None or keep_outputs:
                raise InputError("method is 'probit', which takes no draws; leave samples out, or say 'sampling'.")
            return predict_closed(self.network, self.factors, x, **passes)
        samples = USUAL if samples is None else samples
        if samples == "auto":
            if keep_outputs:
                raise InputError('samples is "auto", so inputs differ in their draws; keep_outputs needs a number.')
            return predict_settled(
                self.network, self.factors, x, seed, tolerance=tolerance, max_samples=max_samples, **passes
            )
        return predict(self.network, self.factors, x, samples, seed, keep_outputs=keep_outputs, **passes)

    def with_card(self, **changes: object) -> "Model":
        """The same model with other things known about it."""
        card = Card.model_validate({**dict(self.card), **changes})
        return replace(self, manifest=self.manifest.model_copy(update={"card": card}))

    def to(self, device: torch.device | str) -> "Model":
        """A copy on another device; its factors are computed there when they are first asked for."""
        return Model(copy.deepcopy(self.network).to(device), self.manifest)
