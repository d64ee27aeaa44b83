"""Augmentation of training pictures: torchvision's transforms, with new random numbers for each picture of a batch.

torchvision uses the same random numbers for all pictures of a call, and one call per picture is slow. The transforms
that most recipes use are therefore implemented here for a whole batch, with the same distributions.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.training.config import Data, RecipeError
from dubito.training.data.data import Examples

Transform = Callable[[Tensor], Tensor]  # (B, C, H, W) -> (B, C, H', W')

GROUPS = 4  # of a batch on a GPU, for transforms that draw once per call: each call waits for the host
TRIES = 10  # to find a rectangle that fits the picture, as in torchvision


def augmentation(data: Data, train: Examples) -> Transform | None:
    """The recipe's transforms of torchvision.transforms.v2 in sequence, tested on two pictures; None without any."""
    if not data.augment:
        return None
    stages = [_stage(name, arguments) for entry in data.augment for name, arguments in entry.items()]
    if train.x.dim() != 4:
        shape = tuple(train.x.shape[1:])
        raise RecipeError(f"data.augment is for pictures (channels, height, width); {data.name} holds {shape}.")

    def augment(x: Tensor) -> Tensor:
        for stage in stages:
            x = stage(x)
        return x

    try:
        some = augment(train.x[:2])
    except Exception as error:  # any error of a transform that needs labels, boxes or other pictures
        said = " ".join(str(error).split())
        raise RecipeError(f"data.augment cannot be used on {data.name}: {said}.") from None
    if not isinstance(some, Tensor) or (some.shape[:2], some.dtype) != (train.x[:2].shape[:2], train.x.dtype):
        came = f"{some.dtype} {tuple(some.shape)}" if isinstance(some, Tensor) else type(some).__name__
        raise RecipeError(
            f"data.augment makes {came} of two pictures that were {train.x.dtype} {tuple(train.x[:2].shape)}; expected "
            "as many, with the same channels and the same kind of numbers."
        )
    return augment


def _stage(name: str, arguments: Mapping[str, object]) -> Transform:
    from torchvision.transforms import v2

    kind = getattr(v2, name, None)
    if not (isinstance(kind, type) and issubclass(kind, v2.Transform)):
        raise RecipeError(f"data.augment: torchvision.transforms.v2 has no transform {name!r}.")
    try:
        transform = kind(**arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"data.augment: {name} cannot be made with {dict(arguments)}: {error}.") from None
    match transform:
        case v2.RandomHorizontalFlip():
            return Flip(transform.p)
        case v2.RandomCrop() if not transform.pad_if_needed:
            padding = transform.padding
            pad = None if padding is None else v2.Pad(padding, transform.fill, transform.padding_mode)
            return Crop(transform.size[0], transform.size[1], pad)
        case v2.RandomErasing() if transform.value == [0]:
            return Erase(transform.p, tuple(transform.scale), tuple(transform.ratio))
    return GroupedTransform(transform)


@dataclass(frozen=True)
class GroupedTransform:
    """Any transform, one picture at a time; on a GPU by groups of pictures that share their random numbers."""

    transform: Transform

    def __call__(self, x: Tensor) -> Tensor:
        together = max(1, len(x) // GROUPS) if x.is_cuda else 1
        groups = [self.transform(some) for some in x.split(together)]
        return torch.cat(groups) if all(isinstance(g, Tensor) for g in groups) else groups[0]  # refused by its type


@dataclass(frozen=True)
class Flip:
    p: float

    def __call__(self, x: Tensor) -> Tensor:
        turned = torch.rand(len(x), 1, 1, 1, device=x.device) < self.p
        return torch.where(turned, x.flip(-1), x)


@dataclass(frozen=True)
class Crop:
    height: int
    width: int
    pad: Transform | None

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.pad is None else self.pad(x)
        spare = x.shape[2] - self.height, x.shape[3] - self.width
        if min(spare) < 0:
            raise ValueError(f"a crop of {self.height} x {self.width} does not fit {x.shape[2]} x {x.shape[3]} pixels")
        top, left = (torch.randint(n + 1, (len(x), 1), device=x.device) for n in spare)
        rows = top + torch.arange(self.height, device=x.device)  # (B, height)
        columns = left + torch.arange(self.width, device=x.device)  # (B, width)
        picture = torch.arange(len(x), device=x.device)[:, None, None]
        return x.permute(0, 2, 3, 1)[picture, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Erase:
    """Makes a random rectangle of some pictures black; a picture is unchanged if none of ten rectangles fits."""

    p: float
    scale: tuple[float, float]  # share of the picture's area
    ratio: tuple[float, float]  # height over width

    def __call__(self, x: Tensor) -> Tensor:
        B, _, H, W = x.shape

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(TRIES, B, device=x.device)

        area = uniform(*self.scale) * (H * W)
        ratio = uniform(math.log(self.ratio[0]), math.log(self.ratio[1])).exp()
        height, width = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (height < H) & (width < W)  # (TRIES, B)
        first = fits.int().argmax(0, keepdim=True)
        height, width = height.gather(0, first)[0], width.gather(0, first)[0]
        top = (torch.rand(B, device=x.device) * (H - height + 1)).floor()
        left = (torch.rand(B, device=x.device) * (W - width + 1)).floor()
        rows, columns = torch.arange(H, device=x.device), torch.arange(W, device=x.device)
        inside_rows = (rows >= top[:, None]) & (rows < (top + height)[:, None])  # (B, H)
        inside_columns = (columns >= left[:, None]) & (columns < (left + width)[:, None])
        chosen = (torch.rand(B, device=x.device) < self.p) & fits.any(0)
        erased = inside_rows[:, :, None] & inside_columns[:, None, :] & chosen[:, None, None]
        return x.masked_fill(erased[:, None], 0)
