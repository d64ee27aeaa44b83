"""Predictions: K posterior draws of a network on some inputs, in one pass or several, and their summary."""

import math
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from dubito.models.errors import InputError, PredictionError
from dubito.models.manifest import Predictive
from dubito.models.network.feature_bank import Nearest
from dubito.models.network.layers import FoldError, Reading, takes_ids
from dubito.models.network.learned import Learned
from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors, Plan, Planner, Shared, Stock
from dubito.models.network.plan import cheapest
from dubito.models.numerics.normals import Normals
from dubito.models.numerics.proof import check
from dubito.models.predictions.stopwatch import Stopwatch
from dubito.models.predictions.uncertainty import (
    Classified,
    ClassTally,
    Reals,
    Regressed,
    ValueTally,
    class_sums,
    on_host,
    probit,
    value_sums,
    wide,
)

Fits = Callable[[int, int], bool]  # whether a pass of B inputs and K draws fits the device's memory


class WholePass(Protocol):
    """A pass of K draws that was prepared as a whole, with the sums over its draws: captured on a GPU, compiled on a
    CPU. It takes up to B inputs, from any device; a compiled one up to K draws."""

    def sums(self, x: Tensor, draws: Draws, normals: Normals) -> Reals:
        """`sums_of` the outputs of these draws, whose normals are the next of the seed."""


GraphFor = Callable[[int, int], WholePass | None]  # the pass for B inputs and K draws, if it was prepared
Divide = Callable[[int, int], int]  # draws of the next pass of B inputs, of so many that are left

MIXED = "the network mixes rows of the batch, so its samples cannot share a pass."
MAX_SAMPLES = 1 << 16
SEED_BITS = 53  # of a seed that we choose: every reader of JSON gets it whole
NOISE = 1 << 26  # normals held at a time: 256 MB


class Passes(TypedDict, total=False):
    """Options of the passes that answer a request."""

    plan: Plan | Planner | None  # None: the fewest multiplications
    max_rows: int | None  # of one pass: inputs times draws; None: by the size of an input
    temperature: float
    buckets: Sequence[int]  # batches are padded to the next of these sizes, so that few shapes are ever met
    watch: Stopwatch | None
    fits: Fits | None  # None: passes that run out of memory are divided
    pause: Callable[[], None] | None  # called between two passes
    pass_rows: int | None  # a second limit like `max_rows`, so that pauses come in time
    pass_draws: Callable[[int], int] | None  # most draws of a pass of so many inputs, likewise


@dataclass(frozen=True)
class Settled:
    """Outcome of `samples="auto"`."""

    samples: Tensor  # (B,) draws of each input
    tolerance: float
    max_samples: int


@dataclass(frozen=True)
class Prediction:
    summary: Classified | Regressed
    samples: int  # K really drawn: 1 for a deterministic network, 0 for the posterior mean (of each member)
    seed: int  # gives the same draws again
    outputs: Tensor | None  # (K, B, ...) logits or means of each draw, where asked for
    settled: Settled | None = None  # of `samples="auto"`, where `samples` is the most that any input needed
    method: Predictive = "sampling"
    read: Tensor | None = None  # (K, B, columns)  what was read off the features, where outputs are asked for


def predict(
    network: BayesianNetwork,
    factors: NetworkFactors,
    x: Tensor,
    samples: int = 20,
    seed: int | None = None,
    *,
    keep_outputs: bool = False,
    **passes: Unpack[Passes],
) -> Prediction:
    """The same K draws for every input of the call; draw k is one function of the input.

    `samples=0` answers with the posterior mean, an ensemble with each member once. Draws and inputs are worked off
    in passes of at most `max_rows` rows, so memory does not grow with either; a seed fixes the draws whatever the
    passes.
    """
    K, noisy = _samples(factors, samples)
    job = Job.of(network, factors, x, seed, most=K, **passes)
    tally = tally_for(network)
    kept: list[Tensor] = []
    chunk, start = job.samples_at_once(job.B), 0
    with evaluating(network), torch.inference_mode(), _told_of_ids(network, x):
        while start < K:
            k = min(chunk, K - start)
            draws = job.draws(start, k, job.B) if noisy else Draws(k, None, job.seed, start)
            start += draws.K
            job.watch.lap("sample")
            outputs = job.outputs(draws)
            job.watch.lap("forward", wait=True)
            add_up(tally, outputs, factors.read)
            job.watch.lap("summarise")
            if keep_outputs:
                kept.append(outputs)
            if start < K:
                job.rest()
        samples = K if noisy or not factors.random else 0
        all_, read = apart(torch.cat(kept), factors.read) if keep_outputs else (None, None)
        return Prediction(finite(tally.summary()), samples, job.seed, all_, read=read)


@contextmanager
def _told_of_ids(network: BayesianNetwork, x: Tensor) -> Iterator[None]:
    """A table of token ids refuses real numbers, in words of its own."""
    try:
        yield
    except IndexError as error:
        if not takes_ids(network.net):
            raise
        raise InputError(f"the network has no such index: {error}. A token id may be beyond its table.") from None
    except RuntimeError as error:
        if not (x.is_floating_point() and takes_ids(network.net) and "scalar types: Long, Int" in str(error)):
            raise
        raise InputError(
            "inputs came as real numbers; this network looks token ids up in a table, which are integers. Commands and "
            "the server hand over real numbers: ask it in Python, by model.predict of a tensor of integers."
        ) from None


def predict_closed(
    network: BayesianNetwork, factors: NetworkFactors, x: Tensor, **passes: Unpack[Passes]
) -> Prediction:
    """The predictive of a network whose outputs have moments in closed form, without draws.

    Classes: softmax(f/√(1 + π/8 · diag(J Σ Jᵀ))), the probit approximation, which does not divide its entropy into what
    the weights and the data are to blame for: both parts are NaN. Values: mean and variance are exact.
    """
    job = Job.of(network, factors, x, 0, **passes)
    with evaluating(network), torch.inference_mode(), _told_of_ids(network, x):
        f, variance = (t / job.temperature**n for n, t in enumerate(job.moments(), 1))
        job.watch.lap("forward", wait=True)
        tally = tally_for(network)
        if isinstance(tally, ValueTally):
            summary: Classified | Regressed = tally.regressed(wide(f), wide(variance))
        else:
            read = job.readings if isinstance(factors.read, Nearest) else None
            summary = probit(f, variance, None if read is None else read[:, 0])
        return Prediction(finite(summary), 0, job.seed, None, method="probit")


def bucket_of(buckets: Sequence[int], rows: int) -> int:
    """The size that so many inputs are padded to."""
    return next((size for size in buckets if size >= rows), rows)


def no_graph(B: int, K: int) -> None:
    """No pass was captured."""


def in_one(B: int, K: int) -> int:
    """All draws that are left in one pass."""
    return K


@dataclass(frozen=True)
class Job:
    """A request, checked: what each of its passes needs."""

    network: BayesianNetwork
    factors: NetworkFactors
    given: Tensor  # (B, ...)  inputs where they came from: a graph fetches them itself
    device: torch.device
    dtype: torch.dtype  # of inputs on the device
    seed: int
    normals: Normals  # the seed's stream
    plan: Planner
    max_rows: int
    most_draws: Callable[[int], int]  # of a pass of so many inputs
    temperature: float
    buckets: Sequence[int]
    watch: Stopwatch
    most: int = 1  # draws that any input may take
    stock: Stock | None = None  # the seed's first draws, drawn ahead: `most` or more
    graph_for: GraphFor = no_graph
    divide: Divide = in_one
    fits: Fits | None = None
    pause: Callable[[], None] | None = None

    @classmethod
    def of(
        cls,
        network: BayesianNetwork,
        factors: NetworkFactors,
        x: Tensor,
        seed: int | None,
        *,
        plan: Plan | Planner | None = None,
        max_rows: int | None = None,
        temperature: float = 1.0,
        buckets: Sequence[int] = (),
        watch: Stopwatch | None = None,
        most: int = 1,
        stock: Stock | None = None,
        graph_for: GraphFor = no_graph,
        divide: Divide = in_one,
        normals: Normals | None = None,
        finite: bool = False,
        fits: Fits | None = None,
        pause: Callable[[], None] | None = None,
        pass_rows: int | None = None,
        pass_draws: Callable[[int], int] | None = None,
    ) -> "Job":
        """`finite`: the inputs are known to be, and the network to be as its factors say; to look again takes time.

        `normals`: the seed's, where they were made before.
        """
        seed = seed_of(seed)
        x, device, dtype = _checked(network, factors, x, finite)
        places = math.prod(x.shape[2:]) if device.type == "cpu" and x.dim() == 4 else math.inf
        memory = _rows(factors, x, device) if max_rows is None else max_rows
        rows = min(memory, pass_rows or sys.maxsize)
        one = cheapest(factors, places) if plan is None else plan
        planner = one if callable(one) else lambda B, K: one
        return cls(
            network=network,
            factors=factors,
            given=x,
            device=device,
            dtype=dtype,
            seed=seed,
            normals=Normals(seed, device) if normals is None else normals,
            plan=planner,
            max_rows=rows,
            most_draws=lambda B: rows // B if pass_draws is None else min(memory // B, pass_draws(B)),
            temperature=temperature,
            buckets=buckets,
            watch=Stopwatch(device) if watch is None else watch,
            most=most,
            stock=stock,
            graph_for=graph_for,
            divide=divide,
            fits=fits,
            pause=pause,
        )

    @property
    def B(self) -> int:
        return len(self.given)

    @cached_property
    def x(self) -> Tensor:
        """The inputs as the network takes them."""
        return self.given.to(self.device, self.dtype)

    def draws(self, start: int, k: int, rows: int) -> Draws:
        """The seed's k draws from `start` on, for so many inputs; to be asked for in order.

        Fewer where there is no memory for all.
        """
        if self.stock is not None:
            return Draws(k, None, self.seed, start, stock=self.stock)
        if self.graph_for(self._bucket(rows), k) is not None:
            return Draws(k, None, self.seed, start, by_graph=True)
        try:
            return Draws(k, self.normals.rows(k, self.factors.normals), self.seed, start)
        except torch.OutOfMemoryError:  # nothing was drawn yet
            if k == 1:
                raise
        return self.draws(start, k // 2, rows)

    def rest(self) -> None:
        """Let others use the device before the next pass."""
        if self.pause is not None:
            self.pause()
            self.watch.go_on()

    def samples_at_once(self, rows: int) -> int:
        B, K = self._bucket(rows), max(1, NOISE // max(1, self.factors.normals))
        if not self.factors.folds:
            return K
        K = max(1, min(self.most_draws(B), K))
        while K > 1 and self.fits is not None and self.graph_for(B, K) is None and not self.fits(B, K):
            K //= 2
        return K

    def next_draws(self, rows: int, left: int) -> int:
        """Draws of the next pass of so many inputs, of those that are left."""
        return self.divide(self._bucket(rows), min(self.samples_at_once(rows), left))

    def _rows_at_once(self, B: int, K: int) -> int:
        """Rows (of K draws each of some of the B inputs) of one pass: `max_rows`, or as many as fit."""
        at_once = most = min(B, max(1, self.max_rows // K))
        while at_once > 1 and self.fits is not None and not self.fits(at_once, K):
            at_once = max((size for size in self.buckets if size < at_once), default=at_once // 2)
        return self.max_rows if at_once == most else at_once * K

    def _bucket(self, rows: int) -> int:
        return bucket_of(self.buckets, rows)

    def outputs(self, draws: Draws, rows: Tensor | None = None) -> Tensor:
        """Logits or means (K, B, ...) of these draws, which no graph makes, for all of the inputs or some."""
        if draws.noise is not None and self._shared is not None:
            return self._beside(self._shared(draws, rows) / self.temperature, rows)
        x, B = self._padded(rows)
        return self._beside(self._outputs(x, draws)[:, :B], rows)

    def _beside(self, outputs: Tensor, rows: Tensor | None) -> Tensor:
        """Outputs with the columns that are read once for all draws."""
        if self.readings is None:
            return outputs
        read = self.readings if rows is None else self.readings[rows.to(self.readings.device)]
        return torch.cat([outputs.float(), read.expand(len(outputs), *read.shape)], -1)

    @cached_property
    def readings(self) -> Tensor | None:
        """What is read off the features of the mean, where passes do not read it: (B, columns)."""
        if self.factors.folds or self.factors.read is None:
            return None
        x, _ = self._padded(None)
        blocks = x.split(self._rows_at_once(len(x), 1))
        return torch.cat([self.factors.readings(self.network, block) for block in blocks])[: self.B]

    def sums(self, draws: Draws, rows: Tensor | None = None) -> Reals:
        """The sums over these draws, for all inputs or for the given rows."""
        if draws.by_graph:
            x = self.given if rows is None else self.given[rows.to(self.given.device)]
            graph = self.graph_for(self._bucket(len(x)), draws.K)
            assert graph is not None
            return graph.sums(x, draws, self.normals)
        sums: Reals = sums_of(self.network, self.factors.read)(self.outputs(draws, rows)).cpu().double().numpy()
        return sums

    def _padded(self, rows: Tensor | None) -> tuple[Tensor, int]:
        """Inputs padded to the next bucket, and their number without the padding."""
        x = self.x if rows is None else self.x[rows.to(self.x.device)]
        more = self._bucket(len(x)) - len(x)
        return (torch.cat([x, x[:1].expand(more, *x.shape[1:])]) if more else x), len(x)

    @cached_property
    def _shared(self) -> Shared | None:
        """Computed once for all draws of the request, where the network has that."""
        return self.factors.shared(self.network, self.x, self.most, self._in_blocks)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance (B, C) of the outputs in closed form."""
        return self._in_blocks(partial(self.factors.moments, self.network))

    def _in_blocks(self, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Outputs (B, C) of the network, and what is computed beside them."""
        x, _ = self._padded(None)
        first, second = _in_halves(compute, x, self._rows_at_once(len(x), 1))
        _check_outputs(self.network, first[None])
        return first[: self.B], second[: self.B]

    def _outputs(self, x: Tensor, draws: Draws) -> Tensor:
        network = self.network
        if not self.factors.folds:
            return self._folded(x, draws)
        if draws.K > 1 and network.learned.folds:
            try:
                return self._folded(x, draws)
            except FoldError:
                network.learned.folds = False  # one draw at a time, then: slower, and right
        return torch.cat([self._folded(x, draws.part(k, 1)) for k in range(draws.K)])

    def _folded(self, x: Tensor, draws: Draws) -> Tensor:
        folds = self.factors.folds
        rows = self._rows_at_once(len(x), draws.K if folds else 1)
        outputs = self._forward(x, draws, rows)
        read = self.factors.read if folds else None
        _check_outputs(self.network, outputs, 0 if read is None else read.columns)
        if folds and draws.K > 1 and tuple(x.shape) not in self.network.learned.folded:
            self._check_folding(x, draws, outputs)
        return tempered(outputs, self.temperature, read)

    def _forward(self, x: Tensor, draws: Draws, max_rows: int) -> Tensor:
        """In passes of at most `max_rows` rows, or of fewer where memory is short; the draws stay as they are."""
        rows = max(1, max_rows // (draws.K if self.factors.folds else 1))
        try:
            return self.factors.outputs(self.network, x, draws, self.plan, rows)
        except torch.OutOfMemoryError:
            if min(rows, len(x)) == 1 and draws.K == 1:
                raise
        if draws.K == 1:
            return self._forward(x, draws, min(rows, len(x)) // 2)
        half = draws.K // 2
        halves = (draws.part(0, half), draws.part(half, draws.K - half))
        return torch.cat([self._forward(x, part, max(1, max_rows // 2)) for part in halves])

    def _check_folding(self, x: Tensor, draws: Draws, outputs: Tensor) -> None:
        """Once per network and shape: do the rows of each draw stay apart, and is the last one what it is alone?

        A network that turns (B, T, d) to (T, B, d) would give rows to the wrong draws, with nothing else to show it.
        """
        learned = self.network.learned
        if (shape := tuple(x.shape[1:])) not in learned.apart:
            apart = self.network.keeps_apart(x, self.factors, draws)
            if apart is False:
                raise FoldError(MIXED)
            if apart:
                learned.apart.add(shape)
        last = draws.part(draws.K - 1, 1)
        alone = self.factors.outputs(self.network, x[-1:], last, self.plan, 1)[0, 0].float()
        folded = outputs[-1, -1].float()
        if alone.isfinite().all() and folded.isfinite().all():
            size = max(float(alone.abs().max()), float(outputs.float().abs().max()), 1e-30)
            if float((alone - folded).abs().max()) > (1e-3 if x.dtype == torch.float32 else 0.1) * size:
                raise FoldError(MIXED)
        if shape in learned.apart:  # else the next input may show it
            learned.folded.add(tuple(x.shape))


def tempered(outputs: Tensor, temperature: float, read: Reading | None) -> Tensor:
    """Outputs over the temperature, and what was read off the features as it is."""
    if temperature == 1:
        return outputs
    first, rest = apart(outputs, read)
    return first / temperature if rest is None else torch.cat([first / temperature, rest], -1)


def apart(outputs: Tensor, read: Reading | None) -> tuple[Tensor, Tensor | None]:
    """Logits or means (K, B, …), and what was read off the features (K, B, columns)."""
    if read is None:
        return outputs, None
    return outputs[..., : -read.columns], outputs[..., -read.columns :]


def with_distances(outputs: Tensor, read: Reading | None) -> tuple[Tensor, Tensor | None]:
    """Logits (K, B, C), and the distances (K, B) of the features to the bank, where a pass has read them."""
    logits, rest = apart(outputs, read)
    return logits, rest[..., 0] if rest is not None and isinstance(read, Nearest) else None


def _samples(factors: NetworkFactors, samples: int) -> tuple[int, bool]:
    """How many passes K really are, and whether they are draws (else the mean)."""
    if isinstance(samples, bool) or not isinstance(samples, int) or not 0 <= samples <= MAX_SAMPLES:
        raise InputError(
            f"samples is {samples!r}; expected a whole number from 0 (the posterior mean) to {MAX_SAMPLES:,}."
        )
    if not factors.random:
        return 1, False
    if samples == 0:
        return max(1, factors.members), False
    return samples, True


def seed_of(seed: int | None) -> int:
    """As it was given; a fresh one where it was not."""
    if seed is None:
        return secrets.randbits(SEED_BITS)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise InputError(f"seed is {seed!r}; expected a whole number from 0 to 2**63 − 1, or none for a fresh one.")
    return seed


def _checked(
    network: BayesianNetwork, factors: NetworkFactors, x: Tensor, finite: bool
) -> tuple[Tensor, torch.device, torch.dtype]:
    """The inputs, and where and as what the network takes them."""
    if not isinstance(x, Tensor):
        raise InputError(f"inputs came as {type(x).__name__}; expected a torch tensor (torch.as_tensor makes one).")
    like = None if finite else next(network.net.parameters(), None)
    device, dtype = (factors.device, factors.dtype) if like is None else (like.device, like.dtype)
    if not finite:
        check(device, dtype)
    indices = not x.is_floating_point() and takes_ids(network.net)
    dtype = x.dtype if indices else dtype
    if x.dim() < 2 or len(x) == 0:
        raise InputError(f"inputs have shape {tuple(x.shape)}; expected (B, ...) with at least one input.")
    if not finite:
        x = x.to(device, dtype)
        if not x.sum().isfinite():  # one pass; too large a sum tells nothing yet
            rows = x.isfinite().flatten(1).all(1)
            if not rows.all():
                bad = int((~rows).nonzero()[0])
                raise InputError(f"input {bad} holds NaN or infinity; expected finite numbers only.")
    return x, device, dtype


def _rows(factors: NetworkFactors, x: Tensor, device: torch.device) -> int:
    """Rows of one pass: few on a CPU where each takes much memory, which is where a convolution meets a large map."""
    if device.type != "cpu":
        return max(1024, min(8192, (1 << 23) // x[0].numel()))
    return max(32, min(4096, 32 * 1024 // math.prod(x.shape[2:]))) if factors.structure.convolves else 4096


def _in_halves(compute: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Computed for `rows` inputs at a time, or for fewer where memory is short."""
    try:
        blocks = [compute(block) for block in x.split(rows)]
    except torch.OutOfMemoryError:
        if min(rows, len(x)) == 1:
            raise
        return _in_halves(compute, x, min(rows, len(x)) // 2)
    return torch.cat([first for first, _ in blocks]), torch.cat([second for _, second in blocks])


def _check_outputs(network: BayesianNetwork, outputs: Tensor, beside: int = 0) -> None:
    if outputs.dim() != 3:
        raise PredictionError(
            f"the network answers with shape {tuple(outputs.shape[1:])}; expected (B, classes) or (B, values)."
        )
    if network.task.kind == "regression" and outputs.shape[2] - beside != network.task.numbers:
        raise PredictionError(
            f"the network answers with {outputs.shape[2] - beside} values per input; "
            f"its task says {network.task.numbers}."
        )


def finite(summary: Classified | Regressed) -> Classified | Regressed:
    answer = summary.probabilities if isinstance(summary, Classified) else summary.mean
    fine = np.isfinite(on_host(answer)).all(1)
    if not fine.all():
        raise PredictionError(
            f"the network's answer to input {int(fine.argmin())} is not finite: its weights or this input are out "
            "of the range that it was trained for, or too large for the number type that it runs in."
        )
    return summary


def sums_of(
    network: BayesianNetwork, read: Reading | None = None, counted: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """The function that sums a pass's outputs (K, B, ...) over its draws, or those `counted` (K,) with a 1, so that
    passes can be added."""
    if network.task.kind == "classification":
        return lambda outputs: class_sums(*with_distances(outputs, read), counted)
    return partial(value_sums, D=network.task.outputs, gain=network.gain, counted=counted)


def add_up(tally: ClassTally | ValueTally, outputs: Tensor, read: Reading | None) -> None:
    """Adds a pass's outputs (K, B, ...) to a tally."""
    if isinstance(tally, ClassTally):
        tally.add(*with_distances(outputs, read))
    else:
        tally.add(outputs)


def tally_for(network: BayesianNetwork) -> ClassTally | ValueTally:
    """What adds up the network's outputs, draw by draw, to an answer."""
    if network.task.kind == "classification":
        return ClassTally()
    assert network.noise is not None
    noise = network.noise()
    shift, scale = (torch.tensor(v, device=noise.device) for v in (network.task.shift, network.task.scale))
    return ValueTally(noise.detach(), shift, scale, network.gain)


def units_of(network: BayesianNetwork) -> ValueTally | None:
    """An empty tally with the noise and units of a regression, on the host; None for classification."""
    if network.task.kind == "classification":
        return None
    known = network.learned.noise  # kept on the host: the device may be busy
    if known is None:
        assert network.noise is not None
        known = network.noise().detach().cpu(), None if network.gain is None else network.gain.cpu()
    return ValueTally(known[0], torch.tensor(network.task.shift), torch.tensor(network.task.scale), known[1])


def never_train(network: BayesianNetwork) -> None:
    """Put the network into evaluation mode for good, so that no later call has to check its modules' modes."""
    network.eval()
    if (units := units_of(network)) is not None:
        network.learned.noise = units.noise, units.gain
    network.learned.trained = False


def evaluating(network: nn.Module) -> AbstractContextManager[None]:
    """BatchNorm and dropout as they are when a network is used, not trained; the last thread to leave restores them."""
    learned = network.learned if isinstance(network, BayesianNetwork) else Learned()
    return learned.evaluating(network)
