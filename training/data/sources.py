"""Data sets by name: the embedded digits, torchvision's, UCI's, and one's own pictures, arrays and tables."""

import csv
import os
import warnings
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.images import SUFFIXES, fitted, is_shown, read_pixels
from dubito.models.manifest import Fitting, Manifest
from dubito.models.numerics.text import number_in
from dubito.models.remote.address import Address, Place, place_of
from dubito.models.remote.cache import local_copy
from dubito.models.terminal import remark
from dubito.training.data.data import DataError, DataSet, Examples, data_recipe
from dubito.training.names import DATA, OWN_DATA, TORCHVISION

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

ARRAYS = ("x", "y", "x_test", "y_test", "group", "group_test")  # of an .npz file
DIVIDERS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # of tables that are not divided by commas
UNREAD = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".tga", ".ico", ".psd", ".dng", ".cr2", ".nef", ".pdf")
MOST_LETTERS = 100  # of a group's name
UCI = {"uci": "standard", "uci-gap": "gap"}  # divided at random; or the middle third of one feature is the test part
JITTER = 1e-8  # of its size, by which a column that is nearly constant may vary
TELLS_APART = 0.05  # of their standard deviation, by which float32 may move numbers
MOST_CLASSES = 1 << 16  # larger whole numbers are not classes
PEEKED = 100  # pictures whose size is looked at before they are read
MOST_BYTES = 1 << 34  # of pictures in the size of the first one, if the recipe gives no size


def read_for(
    manifest: Manifest,
    name: str,
    root: Path | None = None,
    *,
    download: bool = False,
    labelled: bool = True,
    grouped: bool = False,
) -> DataSet:
    """Read a data set as the model's own was read (target column, split, picture size), with the model's classes.

    `labelled=False`: the targets do not matter. `grouped`: a table must have the model's column of groups; without it,
    one that lacks that column is read without groups.
    """
    recipe, declared, regression = data_recipe(manifest.card), manifest.card.input, manifest.task.kind == "regression"
    image = None if declared is None else declared.image
    if name.startswith("folder:") and declared is not None and image is None:
        raise DataError(
            f"{name} has pictures, but this model does not say how they become its inputs: save it with "
            f"Card(input=Input(shape={declared.shape}, image=Image(mean=..., std=...)))."
        )
    shape = None if declared is None or image is None else declared.shape
    fitting = None if image is None else image.fitting
    target = None if recipe is None else recipe.target
    if target is None and name.startswith("csv:") and manifest.card.targets is not None:
        (target, *_) = manifest.card.targets
    data = read_data(
        name,
        root,
        download=download,
        regression=regression if labelled else None,
        target=target,
        labelled=labelled,
        trained=False,
        columns=None if declared is None else declared.columns,
        group=None if recipe is None else recipe.group,
        grouped=grouped,
        size=None if shape is None else (shape[1], shape[2]),
        channels=None if shape is None or fitting is None else shape[0],
        fitting=fitting,
        split=recipe.split if recipe is not None and recipe.name == name else 0,
    )
    if not labelled:
        return data
    if regression != (data.labels is None):
        kinds = ("classes", "numbers")
        raise DataError(f"{name} has {kinds[not regression]} for targets; this model predicts {kinds[regression]}.")
    return data if manifest.card.labels is None else numbered(data, name, manifest.card.labels)


def numbered(data: DataSet, name: str, known: tuple[str, ...]) -> DataSet:
    """Number the classes as the model does: by name if it knows all names, else by position if there are as many."""
    labels = data.labels
    if labels is None or labels == known:
        return data
    if set(labels) <= set(known):
        place = torch.tensor([known.index(label) for label in labels])
        both = (data.train, data.test)
        train, test = (None if part is None else Examples(part.x, place[part.y], part.group) for part in both)
        assert train is not None
        return replace(data, train=train, test=test, labels=known)
    numbers = labels == tuple(map(str, range(len(labels))))
    places = numbers and not name.startswith(("csv:", "folder:"))  # classes of arrays are places, those of tables names
    shared = tuple(label for label in labels if label in known)
    if shared and not places and (numbers or len(labels) == len(known)):
        raise DataError(
            f"{name} has the classes {_some(labels)}, this model {_some(known)}: only {_some(shared)} are the same. "
            "Expected the model's names, in any order."
        )
    if len(labels) == len(known) and not numbers and known != tuple(map(str, range(len(known)))):
        pairs = _some(tuple(f"{one} for {other}" for one, other in zip(labels, known, strict=True)))
        remark(f"{name} and the model name their classes differently: they are taken in order, {pairs}")
    if len(labels) == len(known) or (len(labels) < len(known) and numbers):
        return replace(data, labels=known)
    raise DataError(
        f"{name} has {len(labels)} classes ({_some(labels)}); this model tells {len(known)} apart ({_some(known)}). "
        "Bring data with the model's classes; as data from outside (--ood), their labels do not matter."
    )


def _some(labels: tuple[str, ...]) -> str:
    return ", ".join(labels[:5]) + (", …" if len(labels) > 5 else "")


def read_data(
    name: str,
    root: Path | None = None,
    *,
    download: bool = False,
    regression: bool | None = None,
    target: str | None = None,
    group: str | None = None,
    grouped: bool = True,
    labelled: bool = True,
    columns: tuple[str, ...] | None = None,
    trained: bool = True,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    fitting: Fitting | None = None,
    split: int = 0,
) -> DataSet:
    """Read a data set by name; `regression` decides about targets that could be either (None: words and integers are
    classes). With a `fitting`, all pictures are brought to `size` and `channels`; without one, those of folders. Unless
    `grouped`, a table may lack the column `group`, and unless `labelled` that of the target. With `columns`, a table
    gives these, whatever others it has. Unless it is `trained` on, its numbers may be nearly alike."""
    kind, colon, place = name.partition(":")
    if name == "digits":
        return _brought(_digits(), size, channels, fitting)
    if name in TORCHVISION:
        return _brought(_torchvision(name, root, download), size, channels, fitting)
    if name.partition("/")[0] in UCI and "/" in name:
        return _uci(name, root, split)
    if not colon or kind not in OWN_DATA:
        raise DataError(f"no data set {name!r}; there are: {', '.join(DATA)}.")
    with local_copy(own_place(kind, place)) as path:
        if kind == "folder":
            return _folder(path, size, channels or 3, fitting or Fitting())
        if kind == "npz":
            return _brought(_npz(path, regression, trained), size, channels, fitting)
        return _csv(path, regression, target, group, grouped, labelled, columns, trained)


def own_place(kind: str, text: str) -> Place:
    """The path of one's own data, which must exist, or its address."""
    if "://" not in text:
        path = Path(os.path.expanduser(text))  # Path.expanduser and .exists raise where these do not
        if not text or not os.path.exists(path):
            raise DataError(f"{kind}:{text}: there is no file or folder {text!r}; expected {kind}:PATH.")
        return path
    address = place_of(text)
    assert isinstance(address, Address)
    if kind == "folder":
        raise DataError(
            f"folder:{address} is an address; expected a folder here. Copy it first, or save its pictures as one .npz "
            "file and name that as npz:ADDRESS."
        )
    if address.signed:
        raise DataError(
            f"{kind}:{address} has a query, which the artifact would record with the data's name; expected an address "
            f"without one. Download the file and name it as {kind}:PATH."
        )
    return address


def _brought(data: DataSet, size: tuple[int, int] | None, channels: int | None, fitting: Fitting | None) -> DataSet:
    """The data set with its pictures brought to a size and number of channels, if there is a fitting."""
    if fitting is None or data.train.x.dtype != torch.uint8:
        return data

    def whole(part: Examples) -> Examples:
        c, *own = part.x.shape[1:]
        wanted = channels or c
        sides = (own[0], own[1]) if size is None else size
        return replace(part, x=torch.stack([fitted(x, (wanted, *sides), fitting) for x in part.x]))

    return replace(data, train=whole(data.train), test=None if data.test is None else whole(data.test))


def _digits() -> DataSet:
    """1797 handwritten digits of 8 × 8 pixels (E. Alpaydin, C. Kaynak, 1998; UCI repository, CC BY 4.0)."""
    with files("dubito.training").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        x, y = arrays["x"], arrays["y"]
    pixels = torch.from_numpy((x.astype(np.uint16) * 255 // 16).astype(np.uint8))[:, None]
    return DataSet(Examples(pixels, torch.from_numpy(y.astype(np.int64))), None, tuple("0123456789"))


def _torchvision(name: str, root: Path | None, download: bool) -> DataSet:
    import torchvision.datasets

    if root is None:
        raise DataError(f"{name}: say where the data lies with --data-root (and --download to fetch it there).")
    maker = getattr(torchvision.datasets, TORCHVISION[name])
    parts: list[Examples] = []
    classes: tuple[str, ...] = ()
    for train in (True, False):
        choice = {"split": "train" if train else "test"} if name == "svhn" else {"train": train}
        try:
            data_set = maker(str(root), download=download, **choice)
        except ImportError as error:
            raise DataError(f"{name} cannot be read: {_reason(error)}. Install that package.") from None
        except Exception as error:  # torchvision raises many kinds, all of them about files and downloads
            if not download and "not found" in str(error):
                raise DataError(f"{name} is not in {root}, or is damaged; pass --download to fetch it there.") from None
            raise DataError(
                f"{name} cannot be read from {root}: {_reason(error)}. Remove damaged files; --download fetches them."
            ) from None
        labels = data_set.labels if name == "svhn" else data_set.targets
        parts.append(_arrays(root, np.asarray(data_set.data), np.asarray(labels), False))
        classes = tuple(str(c) for c in getattr(data_set, "classes", range(10)))
    if any(int(part.y.max()) >= len(classes) for part in parts):
        raise DataError(f"{name} in {root} is damaged: it has labels beyond its {len(classes)} classes.")
    return DataSet(parts[0], parts[1], classes)


def _uci(full_name: str, root: Path | None, split: int) -> DataSet:
    """UCI regression sets with the published splits: `data.txt` and index files.

    The table is in the folder of the standard splits; the gap splits have index files of their own.
    """
    kind, _, name = full_name.partition("/")
    if root is None:
        raise DataError(f"{full_name}: say with --data-root which folder holds UCI/{UCI[kind]}/{name}/data/.")
    every = root / "UCI" / UCI[kind]
    folder, home = every / name / "data", root / "UCI" / "standard" / name / "data"
    if not name or not os.path.isdir(folder):
        known = ", ".join(f"{kind}/{p.parent.name}" for p in sorted(every.glob("*/data")))
        raise DataError(f"there is no {full_name} in {root}; there {f'are: {known}' if known else f'is no {every}'}.")
    splits = splits_in(folder)
    if not 0 <= split < splits:
        raise DataError(f"{full_name} has the splits 0 to {splits - 1}, not {split}: set data.split to one of them.")
    try:
        table = _numbers(home / "data.txt", 2)
        features, target = (_indices(home / f"index_{k}.txt", table.shape[1]) for k in ("features", "target"))
        rows = [_indices(folder / f"index_{part}_{split}.txt", len(table)) for part in ("train", "test")]
    except (OSError, ValueError) as error:
        raise DataError(f"{full_name}, split {split}, cannot be read from {folder}: {_reason(error)}.") from None
    train, test = (_arrays(folder, table[r][:, features], table[r][:, target], True) for r in rows)
    return DataSet(train, test, None)


def splits_in(folder: Path) -> int:
    return len(list(folder.glob("index_train_*.txt")))


def _numbers(file: Path, dims: Literal[1, 2]) -> NDArray[np.float64]:
    with warnings.catch_warnings(action="ignore"):  # of an empty file
        numbers: NDArray[np.float64] = np.loadtxt(file, ndmin=dims)
    if not numbers.size:
        raise ValueError(f"{file.name} is empty")
    return numbers


def _indices(file: Path, end: int) -> NDArray[np.int64]:
    """Indices below `end`, which the published files write as floats."""
    indices = _numbers(file, 1)
    if indices.ndim != 1 or not ((indices >= 0) & (indices < end) & (indices == np.floor(indices))).all():
        raise ValueError(f"{file.name} must hold whole numbers from 0 to {end - 1}")
    return indices.astype(np.int64)


def _folder(path: Path, size: tuple[int, int] | None, channels: int, fitting: Fitting) -> DataSet:
    """One folder of pictures per class; or such folders inside `train` and, where there is one, `test`."""
    if not _is_divided(path):
        train, classes, _ = _pictures(path, size, channels, fitting)
        return DataSet(train, None, classes)
    train, classes, size = _pictures(path / "train", size, channels, fitting)
    if not (path / "test").is_dir():
        return DataSet(train, None, classes)
    test, others, _ = _pictures(path / "test", size, channels, fitting)
    if classes != others:
        raise DataError(
            f"{path}: train has the classes {', '.join(classes)}, but test {', '.join(others)}; expected the same."
        )
    return DataSet(train, test, classes)


def _is_divided(path: Path) -> bool:
    try:
        folders = {p.name for p in path.iterdir() if p.is_dir() and is_shown(p.name)}
        if "train" not in folders:
            return False
        if "test" not in folders and not any(p.is_dir() for p in (path / "train").iterdir()):
            return False  # `train` is a class
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; expected one folder of pictures per class.") from None
    if folders - {"train", "test"}:
        raise DataError(
            f"{path} has the folders {', '.join(sorted(folders))}; expected train and test with one folder per class "
            "inside, or one folder per class."
        )
    return True


def _pictures(
    path: Path, size: tuple[int, int] | None, channels: int, fitting: Fitting
) -> tuple[Examples, tuple[str, ...], tuple[int, int]]:
    from rich.console import Console
    from rich.progress import track

    folder = _image_folder(path)
    _tell_left_out(path, folder.classes)
    pixels: list[Tensor] = []
    console = Console(stderr=True)
    unseen = not console.is_terminal
    for file, _ in track(folder.samples, f"reading {path}", transient=True, console=console, disable=unseen):
        picture = _picture(file, fitting)
        if size is None:
            size = (picture.shape[1], picture.shape[2])
            needed = channels * size[0] * size[1] * len(folder.samples)
            if needed > MOST_BYTES:
                raise DataError(
                    f"{path}: {len(folder.samples)} pictures of {size[0]} × {size[1]}, the size of the first, need "
                    f"{needed / 1e9:.0f} GB. Set data.size, such as [224, 224]."
                )
        try:
            pixels.append(fitted(picture, (channels, *size), fitting))
        except InputError as error:
            raise DataError(f"{file}: {error}") from None
    assert size is not None
    return Examples(torch.stack(pixels), torch.tensor(folder.targets)), tuple(folder.classes), size


def _image_folder(path: Path) -> "ImageFolder":
    """Classes and pictures, but not what is hidden there: `.ipynb_checkpoints`, `__MACOSX`, `._1.jpg`."""
    from torchvision.datasets import ImageFolder

    class Shown(ImageFolder):  # type: ignore[misc]  # torchvision has no types
        def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
            names = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and is_shown(entry.name))
            if not names:
                raise FileNotFoundError("it has no folders")
            return names, {name: i for i, name in enumerate(names)}

    def is_picture(file: str) -> bool:
        return file.lower().endswith(SUFFIXES) and is_shown(os.path.relpath(file, path))

    try:
        return Shown(str(path), is_valid_file=is_picture)
    except OSError as error:
        kinds = ", ".join(SUFFIXES)
        raise DataError(f"{path}: {_reason(error)}; expected one folder of pictures per class ({kinds}).") from None


def _tell_left_out(path: Path, classes: Sequence[str]) -> None:
    """Say so where pictures of the classes are of kinds that are not read."""
    every = (
        os.path.join(folder, file) for one in classes for folder, _, names in os.walk(path / one) for file in names
    )
    others = Counter(os.path.splitext(file)[1].lower() for file in every if is_shown(os.path.relpath(file, path)))
    if left := tuple(f"{others[kind]} of {kind}" for kind in UNREAD if others[kind]):
        remark(f"{path}: pictures are left out ({_some(left)}); those that are read: {', '.join(SUFFIXES)}")


def count_pictures(path: Path) -> tuple[int, int, tuple[int, int], int]:
    """Number of pictures, of those of a test part, median height and width of some, and number of classes."""
    from PIL import Image

    divided = _is_divided(path)
    train = _image_folder(path / "train" if divided else path)
    tested = len(_image_folder(path / "test")) if divided and (path / "test").is_dir() else 0
    if len(train.classes) < 2:
        raise DataError(
            f"folder:{path} has one class only ({train.classes[0]!r}); expected two or more folders, one per class."
        )
    sizes = []
    for file, _ in train.samples[:: max(1, len(train) // PEEKED)]:
        try:
            with Image.open(file) as picture:
                sizes.append((picture.height, picture.width))
        except (OSError, ValueError):  # reading the data says which, and why
            continue
    height, width = np.median(sizes or [(1, 1)], axis=0).astype(int).tolist()
    return len(train), tested, (height, width), len(train.classes)


def _picture(file: str, fitting: Fitting) -> Tensor:
    """A picture as (channels, H, W) uint8, read as `dubito predict` reads it."""
    try:
        pixels = torch.from_numpy(read_pixels(file, fitting))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {_reason(error)}. Replace the picture, or remove it.") from None
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)


def _npz(path: Path, regression: bool | None, trained: bool) -> DataSet:
    """Arrays `x` (uint8 pictures, channels first or last, or floats) and `y`; optionally `x_test` and `y_test`.

    `group` and `group_test` name the group of each example by a word or a whole number.
    """
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is no .npz file, or a damaged one; write it with numpy.savez(path, x=…, y=…).")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            names = arrays.files
            contents = {key: np.asarray(arrays[key]) for key in ARRAYS if key in names}
    except Exception as error:  # numpy and zipfile raise many kinds, all of them about the file
        raise DataError(f"cannot read {path}: {_reason(error)}; expected arrays of numbers.") from None
    if not {"x", "y"} <= contents.keys() or ("x_test" in contents) != ("y_test" in contents):
        raise DataError(f"{path} holds {', '.join(names) or 'nothing'}; expected arrays x and y (and x_test, y_test).")
    train, test = _arrays(path, contents["x"], contents["y"], regression, trained=trained), None
    if "x_test" in contents:
        test = _arrays(path, contents["x_test"], contents["y_test"], train.y.dim() == 2, trained=trained)
        if (train.x.shape[1:], train.x.dtype, train.y.shape[1:]) != (test.x.shape[1:], test.x.dtype, test.y.shape[1:]):
            came = ", ".join(f"{key} {array.dtype} {array.shape}" for key, array in contents.items())
            raise DataError(f"{path} holds {came}; expected training and test examples of one kind and shape.")
        test = replace(test, group=_groups(path, contents.get("group_test"), len(test)))
    train = replace(train, group=_groups(path, contents.get("group"), len(train)))
    if train.y.dim() == 2:
        return DataSet(train, test, None)
    most = max(int(part.y.max()) for part in (train, test) if part is not None)
    seen = torch.cat([part.y for part in (train, test) if part is not None]).unique()
    if len(seen) < most + 1:
        absent = [c for c in range(most + 1) if c not in set(seen.tolist())]
        remark(
            f"{path}: y goes up to {most}, but has no example of class {_some(tuple(map(str, absent)))}. To predict "
            "numbers: --set task=regression (--task regression with weights); classes are numbered from 0 without gaps"
        )
    return DataSet(train, test, tuple(map(str, range(most + 1))))


def _groups(path: Path, names: NDArray[Any] | None, n: int) -> NDArray[np.str_] | None:
    if names is None:
        return None
    if names.dtype.kind not in "Uiub" or names.shape != (n,):
        raise DataError(
            f"{path}: group holds {names.dtype} of shape {names.shape}; expected a word or a whole number for each of "
            f"{n} examples."
        )
    groups = names.astype(np.str_)
    if (longest := max(map(len, groups.tolist()))) > MOST_LETTERS:
        raise DataError(f"{path}: a group has a name of {longest} letters; expected {MOST_LETTERS} at most.")
    return groups


def _arrays(
    path: Path,
    x: NDArray[Any],
    y: NDArray[Any],
    regression: bool | None,
    names: Sequence[str] = (),
    trained: bool = False,
) -> Examples:
    """`names` of the columns and of the target, of a table."""
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
        raise DataError(f"{path}: x holds {x.dtype} and y {y.dtype}; expected numbers.")
    if not 2 <= x.ndim <= 5 or y.ndim < 1 or len(x) != len(y) or 0 in x.shape or 0 in y.shape:
        raise DataError(
            f"{path}: x has shape {x.shape} and y {y.shape}; expected some inputs (N, …) of one to four axes each, "
            "and as many targets."
        )
    y = y[:, 0] if y.shape[1:] == (1,) else y
    if regression is None:
        regression = y.dtype.kind == "f" or y.ndim > 1
    inputs = _pixels(path, x) if x.dtype == np.uint8 and x.ndim in (3, 4) else _floats(path, "x", x)
    targets = _floats(path, "y", y)
    if x.ndim == 2 and trained:
        _check_steps(path, x, JITTER, names[:-1] or [f"x[:, {i}]" for i in range(x.shape[1])])
    if regression and trained:
        _check_steps(path, y.reshape(len(y), -1), 0, names[-1:] or [f"y[:, {i}]" for i in range(y.size // len(y))])
    if regression:
        return Examples(inputs, targets.reshape(len(y), -1))
    if y.ndim != 1 or y.min() < 0 or y.max() >= MOST_CLASSES or (y != np.floor(y)).any():
        raise DataError(
            f"{path}: y has shape {y.shape} and values from {y.min()} to {y.max()}; expected classes 0, 1, 2, … of "
            "shape (N,). To predict numbers: --set task=regression."
        )
    return Examples(inputs, torch.from_numpy(y.astype(np.int64)))


def _pixels(path: Path, x: NDArray[np.uint8]) -> Tensor:
    """(N, H, W), (N, H, W, C) or (N, C, H, W) -> (N, C, H, W)."""
    x = x[:, None] if x.ndim == 3 else x
    if x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.shape[1] not in (1, 3):
        raise DataError(
            f"{path}: x holds uint8 of shape {x.shape}; expected pictures with 1 or 3 channels, first or last. "
            "Give other inputs as floats."
        )
    return torch.from_numpy(np.ascontiguousarray(x))


def _floats(path: Path, name: str, values: NDArray[Any]) -> Tensor:
    with np.errstate(over="ignore"):
        floats = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    if not floats.isfinite().all():
        raise DataError(f"{path}: {name} holds NaN, infinity or numbers beyond float32; expected finite numbers only.")
    return floats


def _check_steps(path: Path, columns: NDArray[Any], least: float, names: Sequence[str]) -> None:
    """Refuse numbers that lie so far from 0 that float32, in which networks compute, does not tell them apart.

    Those that differ by less than `least` of their size are nearly constant, and taken so.
    """
    if columns.dtype.itemsize <= (4 if columns.dtype.kind == "f" else 2):
        return
    for i, name in enumerate(names):
        wide = columns[:, i].astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            lost, spread = np.abs(wide - wide.astype(np.float32)).max(), wide.std()
        if lost > TELLS_APART * spread and spread > max(least, 1e-12) * np.abs(wide).max():
            middle = f"{wide.mean():.3g}"
            raise DataError(
                f"{path}: column {name!r} has numbers near {middle} that differ by about {spread:.2g}: float32, in "
                f"which networks compute, does not tell them apart. Subtract {middle} from them."
            )


def _csv(
    path: Path,
    regression: bool | None,
    target: str | None,
    group: str | None,
    grouped: bool,
    labelled: bool,
    known: tuple[str, ...] | None,
    trained: bool,
) -> DataSet:
    """A table with a header; the target is a column of numbers (regression) or of words or integers (classes)."""
    header, lines, body = _table(path)
    if known is not None and len(set(known)) < len(known):  # two columns of one name cannot be told apart
        known = None
    group = group if grouped or group in header else None
    if not labelled and target is not None and target not in header:
        if known is None or set(known) <= set(header) or len(header) == len(known):  # a table of inputs alone
            _check_header(path, header)
            header.append(target)
            body = [[*row, "0"] for row in body]
        else:
            target = None
    for wanted in (target, group):
        if wanted is not None and header.count(wanted) != 1:
            many = f"{header.count(wanted)} columns" if wanted in header else "no column"
            raise DataError(f"{path} has {many} {wanted!r}; its columns are: {', '.join(header)}.")
    groups = None
    if group is not None:
        if group == (header[-1] if target is None else target):
            raise DataError(f"{path}: column {group!r} is both data.group and the target; expected two columns.")
        column = header.index(group)
        groups = _groups(path, np.array([row.pop(column) for row in body]), len(body))
        header.pop(column)
    column = len(header) - 1 if target is None else header.index(target)
    last, name = [row.pop(column) for row in body], header.pop(column)
    if number_in(name) is not None or name in last:
        _check_header(path, header, f", {name}")
    if known is not None and (labelled or set(known) <= set(header)):
        header, body = _chosen(path, header, body, known)
    elif known is not None:
        remark(f"{path} has the columns {_some(tuple(header))}, the model {_some(known)}: they are taken in order")
    x = np.array([_parse(path, line, header, row) for line, row in zip(lines, body, strict=True)])
    if "" in last:
        raise DataError(f"{path}: line {lines[last.index('')]} has nothing in the target column {name!r}.")
    if regression is None:
        regression = any(number_in(text) is not None and not is_integer(text) for text in last)
    if regression:
        values = [_parse(path, line, [name], [text]) for line, text in zip(lines, last, strict=True)]
        examples = replace(_arrays(path, x, np.array(values), True, [*header, name], trained), group=groups)
        return DataSet(examples, None, None, tuple(header), (name,))
    names = [_class(path, line, text) for line, text in zip(lines, last, strict=True)]
    labels = sorted(set(names), key=lambda n: (not is_integer(n), int(n) if is_integer(n) else 0, n))
    index = {label: i for i, label in enumerate(labels)}
    classes = np.array([index[n] for n in names])
    examples = replace(_arrays(path, x, classes, False, [*header, name], trained), group=groups)
    return DataSet(examples, None, tuple(labels), tuple(header), (name,))


def _check_header(path: Path, header: list[str], more: str = "") -> None:
    if all(number_in(h) is not None for h in header):
        raise DataError(f"{path} begins with {', '.join(header)}{more}; expected a header that names the columns.")


def _chosen(
    path: Path, header: list[str], body: list[list[str]], known: tuple[str, ...]
) -> tuple[list[str], list[list[str]]]:
    """The columns that a model knows, in its order."""
    if missing := tuple(name for name in known if name not in header):
        raise DataError(
            f"{path} has no column {_some(missing)}, which this model takes; its columns are: {', '.join(header)}."
        )
    if others := tuple(name for name in header if name not in known):
        remark(f"{path}: column {_some(others)} is left out, since the model does not take it")
    place = [header.index(name) for name in known]
    return list(known), [[row[i] for i in place] for row in body]


def _table(path: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """The header, the line number of each row, and the rows."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, skipinitialspace=True, strict=True)
            rows = [(reader.line_num, [text.strip() for text in row]) for row in reader if row not in ([], [""])]
    except UnicodeDecodeError:
        raise DataError(f"{path} is not in UTF-8; expected a table of text in UTF-8. Save it so.") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {_reason(error)}.") from None
    if len(rows) < 2:
        raise DataError(f"{path} has {len(rows)} lines; expected a header and examples.")
    (_, header), *body = rows
    if len(header) < 2:
        other = next((name for mark, name in DIVIDERS.items() if mark in header[0]), None)
        advice = "" if other is None else f" It seems to be divided by {other}: save it with commas."
        raise DataError(
            f"{path} has one column, {header[0]!r}; expected features and a target, divided by commas.{advice}"
        )
    if twice := [name for name in dict.fromkeys(header) if header.count(name) > 1]:
        raise DataError(f"{path} has {header.count(twice[0])} columns {twice[0]!r}; expected a name for each column.")
    for line, row in body:
        if len(row) != len(header):
            raise DataError(f"{path}: line {line} has {len(row)} fields; the header has {len(header)}.")
    return header, [line for line, _ in body], [row for _, row in body]


def _parse(path: Path, line: int, header: list[str], row: list[str]) -> list[float]:
    values = []
    for name, text in zip(header, row, strict=True):
        value = number_in(text)
        if value is None:
            advice = (
                "Fill it, or leave the line out."
                if not text
                else "Write words as numbers, with a column of 0 and 1 for each word, or leave the column out."
            )
            raise DataError(f"{path}: line {line}, column {name!r} is {text!r}; expected a number. {advice}")
        values.append(value)
    return values


def is_integer(text: str) -> bool:
    """Whether it is a whole number."""
    try:
        int(text)
    except ValueError:
        return False
    return number_in(text) is not None


def _class(path: Path, line: int, text: str) -> str:
    """A class from a cell: words and integers unchanged; 2.0, as spreadsheets write it, is 2."""
    number = number_in(text)
    if number is None or is_integer(text):
        return text
    if not number.is_integer():
        raise DataError(
            f"{path}: line {line} has the target {text}; expected classes. To predict numbers: --set task=regression."
        )
    return str(int(number))


def _reason(error: Exception) -> str:
    """A library's error message on one line, without a full stop."""
    said = getattr(error, "strerror", None) or str(error)
    return " ".join(said.split()).rstrip(".") or type(error).__name__
