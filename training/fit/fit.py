"""The fit loop, which can stop after any step and resume later with the same result."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dubito.models.errors import DubitoError
from dubito.models.manifest import Input
from dubito.models.network.layers import BayesianLayer, MemberLayer
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.prediction import predict
from dubito.models.predictions.uncertainty import Classified
from dubito.training.config import Fit
from dubito.training.data.data import Examples, enter
from dubito.training.fit.batches import Batches
from dubito.training.fit.compiling import compiled
from dubito.training.fit.function_space import FunctionSpace
from dubito.training.fit.graphs import StepGraph
from dubito.training.fit.objective import gain, kl_weight, negative_log_likelihood, rate
from dubito.training.fit.ranks import Ranks
from dubito.training.metrics import accuracy, gaussian_nll, nll, rmse
from dubito.training.seeds import sow, stream
from dubito.training.temperature import nll_with_temperature

VALIDATION_SAMPLES = 8
LOOK = 16  # steps between checks of the loss on a GPU: each check waits for the device


class FitError(DubitoError):
    """A training run that cannot continue."""


@dataclass(frozen=True)
class Epoch:
    """One row of the log."""

    epoch: int
    loss: float  # mean over the examples, with the draws of training
    nll: float
    kl: float  # of the whole network, or at the context inputs; at the last step
    kl_weight: float
    accuracy: float | None  # of the training part, with the draws of training; None for regression
    validation_nll: float
    validation_accuracy: float | None
    validation_rmse: float | None  # regression, in the targets' own units
    lr: float
    seconds: float


@dataclass(frozen=True)
class Progress:
    """Values for a progress bar: means over the epoch so far."""

    epoch: int
    step: int  # of the epoch, from 1
    steps: int
    loss: float
    nll: float
    kl: float
    accuracy: float | None


@dataclass(frozen=True)
class FitState:
    """A copy of all that a run needs to resume, as `checkpoint.py` writes it to a file."""

    tensors: dict[str, Tensor]  # of the network, its best state so far, the optimiser, and the epoch's sums
    known: dict[str, Any]  # number of steps, log, priors: JSON


class FitRun:
    """A training run. Randomness in a step depends only on (seed, step), so the state holds no generator."""

    def __init__(
        self,
        network: BayesianNetwork,
        train: Examples,
        validation: Examples,
        declared: Input,
        fit: Fit,
        seed: int,
        device: torch.device,
        augment: Callable[[Tensor], Tensor] | None = None,
        functions: FunctionSpace | None = None,
    ) -> None:
        self.ranks = Ranks.here()
        self.network = network.to(device)
        self._undo = self.ranks.prepare(self.network)
        self.network.set_priors(self.ranks.of_first(self.network.priors, device))
        self.validation, self.declared = validation, declared
        self.fit, self.seed, self.device = fit, seed, device
        self.functions = functions  # of `fit.objective` function-space
        train = Examples(train.x, self._in_units(train.y))
        self.batches = Batches(train, fit.batch, seed, device, augment, self.ranks)
        self.optimiser = _optimiser(self.network, fit)
        self.step = 0  # steps done, in all epochs
        self.log: list[Epoch] = []
        self.sums = torch.zeros(5, device=device)  # over this epoch: loss, NLL, right answers, examples; the last KL
        self.weights = torch.zeros(2, device=device)  # of NLL and KL in this step's loss
        self.best: dict[str, Tensor] | None = None  # state of the network with the best validation NLL, with patience
        self._parts = compiled(self._losses) if fit.compile else self._losses
        self.graphs: StepGraph | None = None
        if fit.graph and device.type == "cuda" and self.ranks.count == 1 and same_every_step(self.network, fit):
            self.graphs = StepGraph(self._update)
        self._norms = [m for m in self.network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self._frozen = False  # whether BatchNorm kept its statistics in the last step
        self._look = LOOK if device.type == "cuda" else 1
        self._start = self.state()  # of this epoch, where all is finite

    @property
    def done(self) -> bool:
        return len(self.log) >= self.fit.epochs or self._impatient()

    def finish(self) -> BayesianNetwork:
        """The trained network, with its own BatchNorms; with patience, its best state."""
        if self.best is not None:
            self.network.load_state_dict(self.best)
        self._undo()
        return self.network.eval()

    def epoch(
        self, show: Callable[[Progress], None] = lambda _: None, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Train to the end of this epoch, or until `stop` returns True; whether the end was reached."""
        started = time.perf_counter()
        number, first = divmod(self.step, len(self.batches))
        for i, (x, y, share) in enumerate(self.batches.epoch(number, first), first + 1):
            self.take_step(enter(x, self.declared), y, share, self.context(x, number, i - 1))
            last = i == len(self.batches)
            if i % self._look and not last:
                continue
            progress = self._progress(number, i)
            if not math.isfinite(progress.loss):
                self._replay(number)
            show(progress)
            if not last and self.ranks.any(stop(), self.device):
                return False
        self._end(number, time.perf_counter() - started)
        return True

    def context(self, batch: Tensor, number: int, i: int) -> Tensor | None:
        """Inputs at which functions are compared with their prior in step i of epoch `number`; None for the ELBO."""
        if self.functions is None:
            return None
        return self.functions.inputs(batch, torch.Generator().manual_seed(stream(self.seed, "context", number, i)))

    def take_step(self, x: Tensor, y: Tensor, share: float, context: Tensor | None = None) -> None:
        """One step on this rank's share of a batch."""
        now = self.step / len(self.batches)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate(self.fit, now))
            else:
                group["lr"] = rate(self.fit, now)
        if self.network.gain is not None:
            self.network.gain.fill_(gain(self.fit, now))
        self._set_modes(frozen=now >= self.fit.frozen_from)
        sow(self._stream(self.step), self.device)  # the same draws on every rank
        weight = kl_weight(self.fit, now) / self.batches.examples / self.ranks.count
        for place, value in zip(self.weights.unbind(), (share, weight), strict=True):
            place.fill_(value)
        arguments = (x, y, self.weights) if context is None else (x, y, self.weights, context)
        if self.fit.compile and (self.fit.samples > 1 or context is not None):
            self.network.check_apart(x)  # what is compiled cannot
        (self._update if self.graphs is None else self.graphs.run)(*arguments)
        self.step += 1

    def _set_modes(self, frozen: bool) -> None:
        """Training mode for all modules; with `frozen`, BatchNorm uses its running statistics, as in predictions.

        Batch statistics remove a shift that a draw causes in all examples of a batch. Predictions do not remove it, so
        the posterior must be trained without batch statistics at the end.
        """
        self.network.train()  # all modules: one in evaluation mode would otherwise stay in it
        for norm in self._norms if frozen else ():
            norm.eval()
        if frozen != self._frozen and self.graphs is not None:
            self.graphs = StepGraph(self._update)  # the old graph is a step in the other mode
        self._frozen = frozen

    def _update(self, x: Tensor, y: Tensor, weights: Tensor, context: Tensor | None = None) -> None:
        """The part of a step that runs on the device."""
        loss, nll, kl, right = self._parts(x, y, weights, context)
        self.optimiser.zero_grad(set_to_none=True)
        if loss.requires_grad:  # else there is nothing to train, as in a network of priors alone
            loss.backward()
        self.ranks.add_gradients(self.network)
        if self.fit.clip is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.fit.clip)
        self.optimiser.step()
        with torch.no_grad():
            rows = torch.full_like(loss, len(y))
            self.sums[:4] += torch.stack([loss * rows / weights[0], nll * rows, right, rows])
            self.sums[4] = kl

    def _losses(
        self, x: Tensor, y: Tensor, weights: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Loss, NLL, KL and right answers of this rank's share; losses and gradients are summed over ranks."""
        amp = self.fit.amp and self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if amp else nullcontext():
            outputs, ratio = self.network.sample_with_ratio(x, self.fit.samples)
            if self.functions is not None and context is not None:
                kl = self.functions.kl(self.network, context)
        nll = negative_log_likelihood(self.network, outputs, y)
        if context is None:
            kl = self.network.kl(self.batches.examples if self.fit.function_space else None) + ratio
        right = torch.zeros_like(nll)
        if self.network.noise is None:
            right = (outputs.detach().float().softmax(-1).mean(0).argmax(-1) == y).sum().to(nll.dtype)
        return weights[0] * nll + weights[1] * kl, nll, kl, right

    def _progress(self, number: int, step: int) -> Progress:
        loss, nll, right, rows, kl = self.ranks.add(self.sums).tolist()
        share = None if self.network.noise is not None else right / rows
        return Progress(number, step, len(self.batches), loss / rows, nll / rows, kl / self.ranks.count, share)

    def _end(self, number: int, seconds: float) -> None:
        means = self._progress(number, len(self.batches))
        bad = [name for name, p in self.network.named_parameters() if not p.isfinite().all()]
        if bad:
            raise FitError(_no_longer_finite(number, len(self.batches), f"parameter {bad[0]!r}", self._too_high()))
        validation = self.validated()
        now = number + 1 - 1 / len(self.batches)  # at the last step
        weight, lr = kl_weight(self.fit, now), rate(self.fit, now)
        trained = (means.loss, means.nll, means.kl, weight, means.accuracy)
        self.log.append(Epoch(number, *trained, *validation, lr, seconds))
        settled = [e.validation_nll for e in self.log if self._settled(e)]
        if self.fit.patience is not None and settled and settled[-1] == min(settled):
            self.best = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        self.sums.zero_()
        self._start = self.state()

    def _settled(self, e: Epoch) -> bool:
        """Whether an epoch has the full ELBO: earlier ones are not compared, since their posterior is too narrow."""
        fit = self.fit
        return e.epoch >= max(fit.likelihood_epochs + fit.warmup_epochs, self.noise_follows)

    @property
    def noise_follows(self) -> int:
        """First epoch in which the target noise depends on the input with a gain of 1."""
        return 0 if self.network.gain is None else 2 * self.fit.noise_epochs

    def _impatient(self) -> bool:
        settled = [e for e in self.log if self._settled(e)]
        if self.fit.patience is None or not settled:
            return False
        best = min(settled, key=lambda e: e.validation_nll)
        return settled[-1].epoch - best.epoch >= self.fit.patience

    def validated(
        self, samples: int = VALIDATION_SAMPLES, *, tempered: bool = False
    ) -> tuple[float, float | None, float | None]:
        """`validate` of the first rank, on all ranks, so that all stop in the same epoch."""
        own = self.validate(samples, tempered=tempered)
        of_first = self.ranks.of_first([math.nan if v is None else v for v in own], self.device)
        nll, accuracy, rmse = (None if v is None else first for v, first in zip(own, of_first, strict=True))
        assert nll is not None
        return nll, accuracy, rmse

    def validate(
        self, samples: int = VALIDATION_SAMPLES, *, tempered: bool = False
    ) -> tuple[float, float | None, float | None]:
        """NLL (`tempered`: of classes at their best T), accuracy and RMSE of the predictive mean over a few draws."""
        x, y = enter(self.validation.x.to(self.device), self.declared), self.validation.y
        predicted = predict(self.network, self.network.factors(), x, samples, self.seed, keep_outputs=tempered)
        summary = predicted.summary
        if isinstance(summary, Classified):
            p = summary.probabilities.cpu()
            if predicted.outputs is not None:
                return nll_with_temperature([(predicted.outputs.cpu(), y)]), accuracy(p, y), None
            return nll(p, y), accuracy(p, y), None
        mean, variance = summary.mean.cpu(), (summary.epistemic_variance + summary.aleatoric_variance).cpu()
        return gaussian_nll(mean, variance, y), None, rmse(mean, y)

    def _in_units(self, y: Tensor) -> Tensor:
        """Regression targets in the network's units."""
        task = self.network.task
        if task.kind == "classification":
            return y
        shift, scale = (torch.tensor(v, device=y.device) for v in (task.shift, task.scale))
        return (y - shift) / scale

    def _replay(self, number: int) -> None:
        """Repeat the epoch to find the first step whose loss is not finite; always raises FitError."""
        self.restore(self._start)
        first = self.step % len(self.batches)
        for i, (raw, y, share) in enumerate(self.batches.epoch(number, first), first):
            x = enter(raw, self.declared)
            before = {k: v.clone() for k, v in self.network.state_dict().items()}
            self.take_step(x, y, share, self.context(raw, number, i))
            if not self.ranks.add(self.sums).isfinite().all():
                self.network.load_state_dict(before)
                raise FitError(self._blame(x, y, number))
        raise FitError(
            f"the loss was not finite in epoch {number + 1}, and was when the epoch was repeated: the device is not "
            "to be trusted, or its kernels are not deterministic. Go on from the checkpoint."
        )

    def _blame(self, x: Tensor, y: Tensor, number: int) -> str:
        """Error message: the first layer or parameter that is not finite in the last step, and a likely cause."""
        first: list[str] = []

        def watch(name: str) -> Callable[[nn.Module, object, object], None]:
            def hook(module: nn.Module, inputs: object, output: object) -> None:
                if not first and isinstance(output, Tensor) and not output.isfinite().all():
                    first.append(name)

            return hook

        parts = {name: m for name, m in self.network.net.named_modules() if isinstance(m, BayesianLayer)}
        inside = {m for layer in parts.values() for m in layer.modules()}
        parts |= {n: m for n, m in self.network.net.named_modules() if m not in inside and not any(m.children())}
        with ExitStack() as hooks, torch.no_grad():
            for name, module in parts.items():
                hooks.enter_context(module.register_forward_hook(watch(name)))
            sow(self._stream(self.step - 1), self.device)
            self.network.sample(x, self.fit.samples)
        bad = [name for name, p in self.network.named_parameters() if not p.isfinite().all()]
        collapsed = [name for name, layer in self.network.layers.items() if not layer.q.kl().isfinite()]
        place, cause = "the loss itself", "the targets are out of range"
        if not x.isfinite().all() or not y.isfinite().all():
            place, cause = "a target" if x.isfinite().all() else "an input", "the data holds NaN or infinity"
        elif bad:
            place, cause = f"parameter {bad[0]!r}", self._too_high()
        elif first:
            place, cause = f"the output of layer {first[0]!r}", self._too_high()
        elif collapsed:
            place, cause = f"the KL of layer {collapsed[0]!r}", "its posterior has collapsed"
        return _no_longer_finite(number, (self.step - 1) % len(self.batches) + 1, place, cause)

    def _too_high(self) -> str:
        return f"the learning rate ({rate(self.fit, (self.step - 1) / len(self.batches)):.3g}) is too high"

    def _stream(self, step: int) -> int:
        return stream(self.seed, "draws", step)

    def state(self) -> FitState:
        tensors = {f"network.{k}": v.detach().clone() for k, v in self.network.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in (self.best or {}).items()}
        tensors["sums"] = self.sums.clone()
        optimiser = self.optimiser.state_dict()
        for index, entry in optimiser["state"].items():
            for key, value in entry.items():
                if value is not None:
                    tensors[f"optimiser.{index}.{key}"] = torch.as_tensor(value).detach().clone()
        log = [dict(vars(e)) for e in self.log]
        return FitState(tensors, {"step": self.step, "log": log, "priors": self.network.priors})

    def restore(self, state: FitState) -> None:
        parts: dict[str, dict[str, Tensor]] = {"network": {}, "best": {}, "optimiser": {}}
        for name, tensor in state.tensors.items():
            kind, _, rest = name.partition(".")
            if kind in parts:
                parts[kind][rest] = tensor
        self.network.load_state_dict(parts["network"])
        self.network.set_priors(state.known["priors"])
        self.best = {k: v.to(self.device) for k, v in parts["best"].items()} or None
        of_optimiser: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimiser"].items():
            index, _, key = name.partition(".")
            of_optimiser.setdefault(int(index), {})[key] = tensor.clone()
        groups = self.optimiser.state_dict()["param_groups"]
        rates = [group["lr"] for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict({"state": of_optimiser, "param_groups": groups})
        for group, lr in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = lr  # the tensor that the graph reads
        if self.graphs is not None:
            self.graphs = StepGraph(self._update)  # the old graph uses the old state
        self.sums = state.tensors["sums"].to(self.device).clone()
        self._start = state
        self.step, self.log = state.known["step"], [Epoch(**e) for e in state.known["log"]]


def _optimiser(network: BayesianNetwork, fit: Fit) -> torch.optim.Optimizer:
    parameters = list(network.parameters())
    cuda = parameters[0].is_cuda
    lr = torch.tensor(fit.lr, device=parameters[0].device) if cuda else fit.lr  # a graph reads the tensor
    if fit.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr, fit.momentum, weight_decay=fit.weight_decay, fused=True)
    return torch.optim.Adam(parameters, lr, weight_decay=fit.weight_decay, fused=True, capturable=cuda)


def _no_longer_finite(epoch: int, step: int, place: str, cause: str) -> str:
    return (
        f"the loss is no longer finite in epoch {epoch + 1}, step {step}: {place} is the first that is not. "
        f"Most likely {cause}: lower fit.lr, set fit.clip, or check the data."
    )


def same_every_step(network: BayesianNetwork, fit: Fit) -> bool:
    """Whether a step can be a CUDA graph: the host may choose nothing in it. It chooses the members of an ensemble,
    unless every member is used in each step."""
    copies = {len(m.copies) for m in network.modules() if isinstance(m, MemberLayer)}
    members = {layer.entry.ensemble or 1 for layer in network.layers.values()}
    return not copies or all(fit.samples % n == 0 for n in copies | members)
