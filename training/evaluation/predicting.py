"""Predictions of a model on a data set, made as if the inputs came in requests with draws of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dubito.models.errors import DubitoError
from dubito.models.manifest import Input, Predictive
from dubito.models.predictions.adaptive import AT_MOST
from dubito.models.predictions.answers import Rule, closed_rule, rule_for
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import tally_for
from dubito.models.predictions.uncertainty import Classified, ClassTally, Regressed, known_in
from dubito.training.data.data import DataError, Examples, enter
from dubito.training.seeds import stream

REQUESTS = 20  # with draws of their own, since calibration is about the fresh draws of a request
GRID = (1, 2, 4, 8, 16, 20, 32, 64)  # numbers of draws K that are calibrated and measured
ROWS = 1024  # inputs at a time, at most: they may be large pictures
OUTPUTS = 1 << 16  # rows of outputs held at a time

Summary = Classified | Regressed


@dataclass(frozen=True)
class ChosenPredictive:
    """How a model predicts: by sampling with K draws, or by probit, for which K is 0."""

    kind: Predictive
    K: int

    @classmethod
    def of(cls, model: Model, samples: int, kind: Predictive | None) -> "ChosenPredictive":
        """`kind` None: the model's default."""
        kind = model.method if kind is None else kind
        return cls(kind, 0 if kind == "probit" else draws_for(model, samples))

    def rule(self, model: Model, group: str | None = None) -> Rule:
        """Thresholds and quantile of the model's calibration for this predictive."""
        calibration = model.card.calibration
        return closed_rule(calibration, group) if self.kind == "probit" else rule_for(calibration, self.K, group)

    def predict(
        self,
        model: Model,
        x: Tensor,
        seed: int,
        advance: Callable[[int], None] = lambda rows: None,
        *,
        requests: int = REQUESTS,
    ) -> Summary:
        if self.kind == "sampling":
            return predict_grid(model, x, [self.K], seed, advance, requests=requests)[self.K]
        return predict_probit(model, x, advance)


def predict_probit(model: Model, x: Tensor, advance: Callable[[int], None] = lambda rows: None) -> Summary:
    """Predictions in closed form."""
    parts = []
    for piece in x.split(ROWS):
        parts.append(model.predict(enter(piece, declared_by(model)), method="probit").summary)
        advance(len(piece))
    return _joined(parts, torch.arange(len(x)))


def predict_grid(
    model: Model,
    x: Tensor,
    grid: list[int],
    seed: int,
    advance: Callable[[int], None] = lambda rows: None,
    *,
    requests: int = REQUESTS,
) -> dict[int, Summary]:
    """Predictions for each K of an ascending grid, divided into `requests`; smaller K use the first draws of larger.

    Without draws, all requests have the same answers, and one is enough.
    """
    rows = _rows_by_request(len(x), requests if model.factors.random and max(grid) > 0 else 1)
    parts: dict[int, list[Summary]] = {K: [] for K in grid}
    for i, request in enumerate(rows):
        for piece in request.split(min(ROWS, max(1, OUTPUTS // max(1, *grid)))):
            inputs = enter(x[piece], declared_by(model))
            for K, summary in _nested(model, inputs, grid, stream(seed, "request", i)).items():
                parts[K].append(summary)
            advance(len(piece) * max(1, *grid))
    order = torch.cat(rows).argsort()
    return {K: _joined(of_K, order) for K, of_K in parts.items()}


def predict_auto(
    model: Model, x: Tensor, seed: int, advance: Callable[[int], None] = lambda rows: None, *, requests: int = REQUESTS
) -> tuple[Summary, Tensor] | None:
    """Predictions with `samples="auto"`, and each input's number of draws (N,); None for a model without draws."""
    rows = _rows_by_request(len(x), requests)
    parts: list[Summary] = []
    draws: list[Tensor] = []
    for i, request in enumerate(rows):
        for piece in request.split(OUTPUTS // AT_MOST):
            prediction = model.predict(enter(x[piece], declared_by(model)), "auto", stream(seed, "request", i))
            if prediction.settled is None:
                return None
            parts.append(prediction.summary)
            draws.append(prediction.settled.samples)
            advance(len(piece) * GRID[-1])  # about as many draws as that
    order = torch.cat(rows).argsort()
    return _joined(parts, order), torch.cat(draws)[order]


def _rows_by_request(n: int, requests: int) -> list[Tensor]:
    """Rows of each request: row i belongs to request i mod `requests`, which mixes sorted data."""
    return [torch.arange(i, n, requests) for i in range(min(requests, n))]


def _nested(model: Model, x: Tensor, grid: list[int], seed: int) -> dict[int, Summary]:
    if len(grid) == 1:
        return {grid[0]: model.predict(x, grid[0], seed).summary}
    prediction = model.predict(x, grid[-1], seed, keep_outputs=True)
    assert prediction.outputs is not None
    tally, summaries = tally_for(model.network), {}
    for low, high in pairwise([0, *grid]):
        if prediction.read is not None and isinstance(tally, ClassTally):
            tally.add(prediction.outputs[low:high], prediction.read[low:high, :, 0])
        else:
            tally.add(prediction.outputs[low:high])
        summaries[high] = tally.summary()
    return summaries


def _joined(parts: list[Summary], order: Tensor) -> Summary:
    kind = type(parts[0])
    return kind(**{name: torch.cat([vars(part)[name] for part in parts]).cpu()[order] for name in known_in(parts[0])})


def draws_for(model: Model, samples: int) -> int:
    """Number of draws: `samples`, or 1 for a model without randomness."""
    return samples if model.factors.random else 1


def declared_by(model: Model) -> Input:
    """The model's declared input; raises where the artifact has none."""
    if model.card.input is None:
        raise DataError("this artifact does not say what its inputs look like; save it with a card that does.")
    return model.card.input


def check_examples(model: Model, examples: Examples) -> None:
    """Refuse examples whose inputs or targets the model cannot take."""
    check_inputs(model, examples)
    task, y = model.manifest.task, examples.y
    if task.kind == "regression":
        if y.dim() != 2 or y.shape[1] != task.outputs:
            raise DataError(f"targets have shape {tuple(y.shape)}; this model predicts {task.outputs} numbers each.")
        return
    if y.dim() != 1 or y.is_floating_point():
        raise DataError(f"targets came as {y.dtype} of shape {tuple(y.shape)}; this model predicts classes (N,).")
    answer = model.predict(enter(examples.x[:1], declared_by(model)), 1, 0).summary
    classes = answer.probabilities.shape[1] if isinstance(answer, Classified) else 0
    if not 0 <= int(y.min()) <= int(y.max()) < classes:
        raise DataError(
            f"classes run from {int(y.min())} to {int(y.max())}; this model knows 0 to {classes - 1}. "
            "Bring data with the model's classes; as data from outside (--ood), their labels do not matter."
        )


def check_inputs(model: Model, examples: Examples, prefix: str = "") -> None:
    if len(examples) == 0:
        raise DataError(f"{prefix}there are no examples; expected at least one.")
    try:
        enter(examples.x[:1], declared_by(model))
    except DubitoError as error:
        raise DataError(f"{prefix}{error}") from None
