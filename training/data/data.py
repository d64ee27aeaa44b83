"""Examples, their division into parts by seed, and their conversion to a network's inputs."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from dubito.models.errors import DubitoError
from dubito.models.images import prepare_all
from dubito.models.manifest import Card, Image, Input
from dubito.training.config import Data
from dubito.training.names import PARTS


class DataError(DubitoError):
    """Data that cannot be found, read or used as asked."""


@dataclass(frozen=True)
class Examples:
    x: Tensor  # (N, C, H, W) uint8 pictures, or (N, …) float32
    y: Tensor  # (N,) int64 classes, or (N, D) float32 targets in their own units
    group: NDArray[np.str_] | None = None  # (N,) names, where the data has any

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Tensor | slice) -> "Examples":
        if self.group is None:
            return Examples(self.x[which], self.y[which])
        return Examples(self.x[which], self.y[which], self.group[which if isinstance(which, slice) else which.numpy()])

    def __add__(self, other: "Examples") -> "Examples":
        """Both, without their groups."""
        return Examples(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]))

    def fingerprints(self) -> list[str]:
        """A short hash of each example's input, by which equal inputs are recognised."""
        rows = self.x.flatten(1).numpy()
        return [hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=5).hexdigest() for row in rows]


@dataclass(frozen=True)
class DataSet:
    train: Examples
    test: Examples | None  # None: the set comes undivided
    labels: tuple[str, ...] | None  # None: regression
    columns: tuple[str, ...] | None = None  # of a table: names of the inputs' numbers
    targets: tuple[str, ...] | None = None  # and of what is predicted

    def hash(self) -> str:
        """Hash of all inputs and targets, without names."""
        total = hashlib.sha256()
        for part in (self.train, self.test):
            if part is not None:
                for tensor in (part.x, part.y):
                    total.update(str((tuple(tensor.shape), tensor.dtype)).encode())
                    total.update(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data))
        return total.hexdigest()


@dataclass(frozen=True)
class Parts:
    train: Examples
    validation: Examples
    calibration: Examples
    test: Examples
    labels: tuple[str, ...] | None
    hash: str
    columns: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None


def divide(data: DataSet, validation: float, calibration: float, test: float, seed: int) -> Parts:
    """Divide at random by seed: shares of the training part; `test` of the whole, if the set has no test part."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    whole = data.test
    if whole is None:
        n = max(1, round(test * len(order)))
        whole, order = data.train[order[:n]], order[n:]
    sizes = [max(1, round(share * len(order))) for share in (validation, calibration)]
    if sum(sizes) >= len(order):
        tested = "" if data.test is not None else f", {test} for test"
        raise DataError(
            f"{len(data.train)} examples are too few: with shares of {validation} for validation, {calibration} for "
            f"calibration{tested} nothing is left to train on. Bring more examples, or lower the shares: "
            "data.validation and the like."
        )
    held, calibrating, training = order.split([*sizes, len(order) - sum(sizes)])
    train = data.train
    parts = (train[training], train[held], train[calibrating], whole)
    return Parts(*parts, data.labels, data.hash(), data.columns, data.targets)


def part_of(data: DataSet, card: Card, part: str | None = None, default: str = "test") -> tuple[str, Examples]:
    """Name and examples of a part; the model's own data set is divided as in training.

    Without a name: `default` of the model's own set; of another set its test part if that is the default, else all.
    """
    if part is not None and part not in (*PARTS, "all"):
        raise DataError(f"no part {part!r}; there are: {', '.join(PARTS)}, all.")
    divided = own_parts(data, card) if part != "all" else None
    given = {"train": data.train, "test": data.test} if data.test is not None else {}
    if part is None:
        part = default if divided is not None or (default == "test" and given) else "all"
    if part == "all":
        both = (data.train,) if data.test is None else (data.train, data.test)
        groups = [e.group for e in both if e.group is not None]
        named = np.concatenate(groups) if len(groups) == len(both) else None
        return part, Examples(torch.cat([e.x for e in both]), torch.cat([e.y for e in both]), named)
    if divided is not None:
        return part, getattr(divided, part)
    if part not in given:
        has = f"has the parts {', '.join(given)} and all" if given else "comes undivided: ask for all of it"
        raise DataError(f"this is not the data that the model was trained on, so it has no part {part!r}; it {has}.")
    return part, given[part]


def own_parts(data: DataSet, card: Card) -> Parts | None:
    """The division that the model was trained with; None for other data, or if its recipe is not known."""
    origin = card.provenance
    if origin.recipe is None or origin.data_hash is None or data.hash() != origin.data_hash:
        return None
    shares, seed = data_recipe(card), origin.recipe.get("seed", 0)
    if shares is None or not isinstance(seed, int):
        return None
    return divide(data, shares.validation, shares.calibration, shares.test, seed)


def data_recipe(card: Card) -> Data | None:
    try:
        return Data.model_validate((card.provenance.recipe or {}).get("data"))
    except ValidationError:  # the provenance of a foreign artifact can be anything
        return None


def input_of(train: Examples, recipe: Data | None = None) -> Input:
    """The model's input: pictures are normalised as the recipe says, or else by the training part's moments."""
    shape = tuple(train.x.shape[1:])
    if train.x.dtype != torch.uint8:
        if recipe is not None and (recipe.fitting is not None or recipe.moments is not None):
            raise DataError(f"{recipe.name} holds no pictures, so it takes no size, crop, channels or normalise.")
        return Input(shape=shape)
    fitting, moments = (None, None) if recipe is None else (recipe.fitting, recipe.moments)
    mean, std = _moments_of(train.x) if moments is None else (v * shape[0] if len(v) == 1 else v for v in moments)
    if {len(mean), len(std)} != {shape[0]}:
        raise DataError(
            f"normalise has {len(mean)} means and {len(std)} standard deviations, but pictures {shape[0]} channels; "
            "expected one for each channel, or one for all."
        )
    return Input(shape=shape, image=Image(mean=mean, std=std, fitting=fitting))


def _moments_of(pictures: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel."""
    counts = torch.stack([pictures[:, c].flatten().bincount(minlength=256) for c in range(pictures.shape[1])])
    p = counts / counts.sum(1, keepdim=True, dtype=torch.double)  # (C, 256): how often each value occurs
    values = torch.arange(256, dtype=torch.double) / 255
    mean = p @ values
    std = (p * (values - mean[:, None]).square()).sum(1).sqrt().clamp(min=1e-3)
    return tuple(mean.tolist()), tuple(std.tolist())


def enter(x: Tensor, declared: Input) -> Tensor:
    """A batch as the network's input: (B, …) float32."""
    if declared.image is None or x.dtype != torch.uint8:
        if tuple(x.shape[1:]) != declared.shape:
            raise DataError(f"examples have shape {tuple(x.shape[1:])}; this model takes {declared.shape}.")
        return x.float()
    if tuple(x.shape[1:]) != declared.shape:
        return prepare_all(x.cpu().permute(0, 2, 3, 1), declared).to(x.device)
    mean, std = _moments(declared.image, x.device)
    return (x.float() / 255 - mean) / std


@lru_cache(maxsize=16)
def _moments(image: Image, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation on the device, cached: a copy in each step would wait for the device."""
    mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (image.mean, image.std))
    return mean, std
