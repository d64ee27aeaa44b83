"""Transforms computed for a whole batch have the laws of torchvision's, and draw afresh for each picture."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2

from dubito.training.config import Data, RecipeError
from dubito.training.data.augment import augmentation
from dubito.training.data.data import Examples


def examples(n: int, channels: int = 1, height: int = 6, width: int = 5) -> Examples:
    """One picture, n times, each of its pixels unlike all others and none of them black."""
    picture = 1 + torch.arange(channels * height * width, dtype=torch.uint8).view(1, channels, height, width)
    return Examples(picture.repeat(n, 1, 1, 1), torch.zeros(n).long())


def augmented(n: int, *transforms: dict[str, dict[str, object]], seed: int = 0) -> tuple[Tensor, Tensor]:
    data = Data(name="mnist", augment=transforms)  # type: ignore[arg-type]
    before = examples(n)
    augment = augmentation(data, before)
    assert augment is not None
    torch.manual_seed(seed)
    return before.x, augment(before.x)


def counted(pictures: Tensor) -> dict[tuple[int, ...], int]:
    rows, n = pictures.flatten(1).unique(dim=0, return_counts=True)
    return {tuple(row): int(k) for row, k in zip(rows.tolist(), n, strict=True)}


def test_crops_are_the_windows_of_the_padded_picture_each_as_often() -> None:
    N = 20_000
    before, after = augmented(N, {"RandomCrop": {"size": [6, 5], "padding": 1}})
    wide = v2.functional.pad(before[0], [1, 1, 1, 1])
    windows = {tuple(wide[:, i : i + 6, j : j + 5].flatten().tolist()) for i in range(3) for j in range(3)}
    found = counted(after)
    assert set(found) == windows
    expected = N / len(windows)
    assert max(abs(n - expected) for n in found.values()) < 5 * (expected * (1 - 1 / len(windows))) ** 0.5


def test_a_flip_turns_its_share_of_the_pictures() -> None:
    N, p = 20_000, 0.3
    before, after = augmented(N, {"RandomHorizontalFlip": {"p": p}})
    turned = (after == before.flip(-1)).flatten(1).all(1)
    assert (turned | (after == before).flatten(1).all(1)).all()
    assert abs(int(turned.sum()) - p * N) < 5 * (p * (1 - p) * N) ** 0.5


def test_erased_rectangles_have_the_law_of_torchvision() -> None:
    """Each size and place of a rectangle as often as torchvision, called once a picture, erases it."""
    N, arguments = 6_000, {"p": 0.6, "scale": [0.05, 0.5], "ratio": [0.4, 2.0]}
    before, after = augmented(N, {"RandomErasing": arguments})
    torch.manual_seed(1)
    one_by_one = v2.RandomErasing(0.6, (0.05, 0.5), (0.4, 2.0))
    theirs = torch.stack([one_by_one(picture) for picture in before])
    assert ((after == before) | (after == 0)).all()
    ours, of_torchvision = counted(after), counted(theirs)
    for outcome in {*ours, *of_torchvision}:
        a, b = ours.get(outcome, 0), of_torchvision.get(outcome, 0)
        assert abs(a - b) < 5 * (a + b + 1) ** 0.5  # two counts of about the same mean


def test_other_transforms_draw_for_each_picture_too() -> None:
    _, after = augmented(50, {"RandomRotation": {"degrees": 180}})
    assert len(counted(after)) > 10


def test_no_two_batches_share_their_draws_and_a_seed_repeats_them() -> None:
    transforms: tuple[dict[str, dict[str, object]], ...] = (
        {"RandomCrop": {"size": [6, 5], "padding": 2}},
        {"RandomHorizontalFlip": {}},
        {"RandomErasing": {}},
    )
    once, again, other = (augmented(64, *transforms, seed=s)[1] for s in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_a_crop_larger_than_the_picture_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data\.augment cannot be used on mnist: a crop of 9 x 9 does not fit 6 x 5"):
        augmented(2, {"RandomCrop": {"size": 9}})
