"""A look at a plain network before anything is built on it: does it know these data at all?"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dubito.models.errors import DubitoError
from dubito.models.manifest import Input, Regression, Task
from dubito.models.predictions.prediction import evaluating
from dubito.models.terminal import bar, remark
from dubito.training.config import NORMALISATIONS
from dubito.training.data.data import Examples, Parts, enter
from dubito.training.inputs import describe_input

LOOKED_AT = 2000  # examples
TRIED = 256  # of them, with other normalisations
BATCH = 64
ENOUGH = 3  # standard errors by which the accuracy must be above the most frequent class's share
CLEARLY = 10  # the same for another order of the classes, which is fitted to the examples


class PlainError(DubitoError):
    """A plain network that does not know the data."""


def look_first(net: nn.Module, parts: Parts, declared: Input, task: Task, *, force: bool = False) -> None:
    """Print how good the plain network is on these data, and stop where it is no better than a guess."""
    examples = _some(parts)
    f = outputs_of(net, examples.x, declared, "plain network")
    if isinstance(task, Regression):
        values = f[:, : task.outputs] * torch.tensor(task.scale) + torch.tensor(task.shift)
        error, spread = (values - examples.y).square().mean(0).sqrt(), examples.y.std(0)
        good = bool((error / spread.clamp(min=1e-30)).mean() < 1)
        said = f"plain network: RMSE {_numbers(error)}; the {len(f)} targets' standard deviation is {_numbers(spread)}"
    else:
        right, share, limit = _accuracy(f, examples.y)
        good = right > limit
        said = f"plain network: {right:.1%} of {len(f)} examples right; the most frequent class has {share:.1%}"
    remark(said)
    if good:
        return
    if not force:
        reasons = " ".join(_reasons(net, f, examples, declared, parts.labels))
        raise PlainError(f"{said}: it is no better than a guess. {reasons} --force goes on all the same.")
    remark("It is no better than a guess; --force goes on.")


def _some(parts: Parts) -> Examples:
    """Examples of all parts, the test part first."""
    every = (parts.test, parts.validation, parts.calibration, parts.train)
    x, y = (torch.cat([getattr(e, k)[:LOOKED_AT] for e in every])[:LOOKED_AT] for k in ("x", "y"))
    return Examples(x, y)


@torch.no_grad()
def outputs_of(net: nn.Module, x: Tensor, declared: Input, title: str) -> Tensor:
    """The network's outputs (N, C), on the CPU."""
    device = next(net.parameters()).device
    with evaluating(net), bar(title, len(x)) as advance:
        rows = []
        for some in x.split(BATCH):
            rows.append(net(enter(some.to(device), declared)).float().cpu())
            advance(len(some))
    return torch.cat(rows)


def _accuracy(f: Tensor, y: Tensor, errors: float = ENOUGH) -> tuple[float, float, float]:
    """The accuracy, the most frequent class's share, and what the accuracy must exceed."""
    share = float(y.bincount().max()) / len(y)
    return float((f.argmax(1) == y).double().mean()), share, share + errors * math.sqrt(share * (1 - share) / len(y))


def _numbers(values: Tensor) -> str:
    return ", ".join(f"{v:.4g}" for v in values.tolist())


def _reasons(
    net: nn.Module, f: Tensor, examples: Examples, declared: Input, labels: tuple[str, ...] | None
) -> Iterator[str]:
    """What may be wrong, the likely first."""
    if labels is None:
        yield "Look at the targets' units, which must be the network's, and at the order and units of the columns."
        return
    if declared.image is not None:
        for name, right in _with_other_moments(net, examples[:TRIED], declared).items():
            yield f"With --normalise {name} it has {right:.1%}."
    yield from _other_order(f, examples.y, labels)
    if declared.image is not None:
        yield f"Look at the input ({describe_input(declared)}): --input-size, --crop and --normalise change it."
    yield f"Look at the classes' order ({', '.join(labels[:3])}, …): --labels names them as the network knows them."
    yield "And are these the network's weights?"


def _with_other_moments(net: nn.Module, few: Examples, declared: Input) -> dict[str, float]:
    """Accuracies with the normalisations with which the network does know the examples."""
    assert declared.image is not None
    accuracies, C = {}, declared.shape[0]
    for name, moments in NORMALISATIONS.items():
        if moments is None or len(moments[0]) not in (1, C):
            continue
        mean, std = (v * C if len(v) == 1 else v for v in moments)
        image = declared.image.model_copy(update={"mean": mean, "std": std})
        f = outputs_of(net, few.x, declared.model_copy(update={"image": image}), f"normalised as {name}")
        right, _, limit = _accuracy(f, few.y)
        if right > limit:
            accuracies[name] = right
    return accuracies


def _other_order(f: Tensor, y: Tensor, labels: tuple[str, ...]) -> Iterator[str]:
    """Whether each output stands for a class, only not for that of its number."""
    C = f.shape[1]
    counts = torch.zeros(C, C).index_put_((f.argmax(1), y), torch.ones(len(y)), accumulate=True)
    best = counts.argmax(1)  # the class that each output stands for most often
    found, _, limit = _accuracy(nn.functional.one_hot(best[f.argmax(1)], C), y, CLEARLY)
    if found > limit:
        moved = [c for c in range(C) if best[c] != c and counts[c].sum() > 0][:3]
        pairs = ", ".join(f"output {c} for {labels[int(best[c])]}" for c in moved)
        yield f"The classes seem to be in another order: with {pairs} … it has {found:.1%}."
