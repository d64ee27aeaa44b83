"""Many requests answered together: those that may share draws share passes, and none is hurt by another's failure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dubito.models.adaptive import answer_each
from dubito.models.model import Model
from dubito.models.prediction import Job, Prediction, Settled, predict
from dubito.models.stopwatch import Stopwatch
from dubito.models.uncertainty import Classified, Regressed


@dataclass(frozen=True)
class Ask:
    """One request, parsed: inputs in the model's input space, and how to answer them."""

    x: Tensor  # (B, ...) float32, on the host
    samples: int | Literal["auto"]
    seed: int | None  # None: any draws will do, another request's too
    max_samples: int  # of "auto"
    tolerance: float
    keep: bool = False  # the draws themselves are wanted

    @property
    def work(self) -> int:
        """Rows times samples, at most."""
        return len(self.x) * max(1, self.most)

    @property
    def most(self) -> int:
        return self.max_samples if self.samples == "auto" else self.samples


@dataclass(frozen=True)
class Answered:
    prediction: Prediction  # on the host
    seconds: Mapping[str, float]  # of the passes that it came from, by stage


Answer = Answered | Exception


class Broken(Exception):
    """The device answers nothing any more; what comes of it is no request's fault."""


class Engine:
    """A model on its device."""

    def __init__(self, model: Model, buckets: Sequence[int]) -> None:
        self.model, self.buckets = model, buckets
        self.T = 1.0 if model.card.calibration is None else model.card.calibration.temperature

    def answer(self, asks: Sequence[Ask]) -> list[Answer]:
        """In order. Requests of one group share a pass; where a group fails, each of its requests is tried alone."""
        groups: dict[object, list[int]] = {}
        for i, ask in enumerate(asks):
            groups.setdefault(self._group(ask, i), []).append(i)
        found: dict[int, Answer] = {}
        for members in groups.values():
            found |= zip(members, self._answer_group([asks[i] for i in members]), strict=True)
        return [found[i] for i in range(len(asks))]

    def warm(self, samples: int) -> None:
        """Every bucket once, with draws as a request would have them; raises what a request would."""
        declared = self.model.card.input
        assert declared is not None
        for rows in self.buckets:
            x = torch.zeros(rows, *declared.shape)
            once = self._job(x, 0, None).samples_at_once(rows)
            K = min(samples, once + samples % once)  # whole passes, and what is left over
            (found,) = self.answer([Ask(x, K, None, max(1, K), 0.5)])
            if isinstance(found, Exception):
                raise found

    def _group(self, ask: Ask, i: int) -> object:
        """Requests with the same key may share passes. One with a seed is alone: its answer is the same to the bit
        whoever else asks."""
        if ask.keep or ask.seed is not None:
            return i
        if ask.samples == 0 or self.model.factors.normals == 0:
            return ("repeatable", ask.samples)
        return "drawn"

    def _answer_group(self, asks: list[Ask]) -> list[Answer]:
        try:
            return list(self._together(asks))
        except torch.AcceleratorError as error:
            raise Broken from error
        except Exception as error:  # whatever one request's inputs made of the pass
            if len(asks) == 1:
                return [error]
        return [a for ask in asks for a in self._answer_group([ask])]

    def _together(self, asks: list[Ask]) -> list[Answered]:
        first, model = asks[0], self.model
        x = torch.cat([ask.x for ask in asks]) if len(asks) > 1 else first.x
        watch = Stopwatch(self._device)
        normals, members = model.factors.normals, max(1, model.factors.members)
        if first.keep or first.samples == 0 or normals == 0:
            samples = members if first.samples == "auto" else first.samples
            whole = predict(
                model.network,
                model.factors,
                x,
                samples,
                first.seed,
                keep_outputs=first.keep,
                temperature=self.T,
                buckets=self.buckets,
                watch=watch,
            )
            outputs = None if whole.outputs is None else whole.outputs.cpu()  # kept for a request alone
            made = [Prediction(part, whole.samples, whole.seed, outputs) for part in _split(whole.summary, asks)]
        else:
            made = self._drawn(asks, self._job(x, first.seed, watch))
        watch.lap("summarise")
        seconds = watch.seconds()
        return [Answered(prediction, seconds) for prediction in made]

    def _drawn(self, asks: list[Ask], job: Job) -> list[Prediction]:
        most = torch.cat([torch.full((len(ask.x),), ask.most) for ask in asks])
        tolerance = torch.cat([torch.full((len(a.x),), a.tolerance if a.samples == "auto" else 0.0) for a in asks])
        summary, drawn = answer_each(job, most, tolerance)
        made = []
        for ask, part, K in zip(asks, _split(summary, asks), drawn.split([len(a.x) for a in asks]), strict=True):
            settled = Settled(K, ask.tolerance, ask.max_samples) if ask.samples == "auto" else None
            made.append(Prediction(part, int(K.max()), job.seed, None, settled))
        return made

    def _job(self, x: Tensor, seed: int | None, watch: Stopwatch | None) -> Job:
        model = self.model
        return Job.of(model.network, model.factors, x, seed, None, None, self.T, self.buckets, watch)

    @property
    def _device(self) -> torch.device:
        return next(self.model.network.parameters()).device


def _split(summary: Classified | Regressed, asks: list[Ask]) -> list[Classified | Regressed]:
    kind, sizes = type(summary), [len(ask.x) for ask in asks]
    columns = [tensor.cpu().split(sizes) for tensor in vars(summary).values()]
    return [kind(*parts) for parts in zip(*columns, strict=True)]


def joined(parts: Sequence[Answered]) -> Answered:
    """The parts of one request as one answer."""
    if len(parts) == 1:
        return parts[0]
    predictions = [part.prediction for part in parts]
    first = predictions[0]
    columns = zip(*(vars(p.summary).values() for p in predictions), strict=True)
    summary = type(first.summary)(*(torch.cat(column) for column in columns))
    settled = None
    if first.settled is not None:
        drawn = torch.cat([p.settled.samples for p in predictions if p.settled is not None])
        settled = Settled(drawn, first.settled.tolerance, first.settled.max_samples)
    outputs = None
    if first.outputs is not None:
        outputs = torch.cat([p.outputs for p in predictions if p.outputs is not None], 1)
    seconds = {stage: sum(part.seconds.get(stage, 0.0) for part in parts) for stage in parts[0].seconds}
    made = Prediction(summary, max(p.samples for p in predictions), first.seed, outputs, settled)
    return Answered(made, seconds)
