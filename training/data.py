"""Data sets by name, held in memory as they came, and their division into parts by seed."""

import csv
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from dubito.models.errors import DubitoError
from dubito.models.images import prepare
from dubito.models.manifest import Card, Image, Input, Manifest
from dubito.training.config import Data

TORCHVISION = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
NAMES = ("digits", *TORCHVISION, "uci/NAME", "folder:PATH", "npz:PATH", "csv:PATH")
PARTS = ("train", "validation", "calibration", "test")


class DataError(DubitoError):
    """Data that cannot be found, read or used as asked."""


@dataclass(frozen=True)
class Examples:
    x: Tensor  # (N, C, H, W) uint8 pictures, or (N, …) float32
    y: Tensor  # (N,) int64 classes, or (N, D) float32 targets in their own units

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, which: Tensor | slice) -> "Examples":
        return Examples(self.x[which], self.y[which])

    def fingerprints(self) -> list[str]:
        """A short hash of each example's input: whoever holds the same input finds it again."""
        rows = self.x.reshape(len(self), -1).numpy()
        return [hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=5).hexdigest() for row in rows]


@dataclass(frozen=True)
class DataSet:
    train: Examples
    test: Examples | None  # None: the set comes undivided
    labels: tuple[str, ...] | None  # None: regression

    def hash(self) -> str:
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


def divide(data: DataSet, validation: float, calibration: float, test: float, seed: int) -> Parts:
    """Shares of the training part (and of the whole for `test`, where the set comes undivided), drawn by seed."""
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    whole = data.test
    if whole is None:
        n = max(1, round(test * len(order)))
        whole, order = data.train[order[:n]], order[n:]
    sizes = [max(1, round(share * len(order))) for share in (validation, calibration)]
    if sum(sizes) >= len(order):
        raise DataError(
            f"{len(data.train)} examples are too few: with shares of {validation} for validation and {calibration} for "
            "calibration nothing is left to train on. Bring more examples, or lower data.validation and .calibration."
        )
    held, calibrating, training = order.split([*sizes, len(order) - sum(sizes)])
    train = data.train
    return Parts(train[training], train[held], train[calibrating], whole, data.labels, data.hash())


def part_of(data: DataSet, card: Card, part: str | None = None, default: str = "test") -> tuple[str, Examples]:
    """A part by name, divided as the model's own training set was where this is it.

    Without a name: `default` of the model's own set, else the set's test part where that is the default, else all.
    """
    if part is not None and part not in (*PARTS, "all"):
        raise DataError(f"no part {part!r}; there are: {', '.join(PARTS)}, all.")
    divided = _own_parts(data, card) if part != "all" else None
    given = {"train": data.train, "test": data.test} if data.test is not None else {}
    if part is None:
        part = default if divided is not None or (default == "test" and given) else "all"
    if part == "all":
        both = (data.train,) if data.test is None else (data.train, data.test)
        return part, Examples(torch.cat([e.x for e in both]), torch.cat([e.y for e in both]))
    if divided is not None:
        return part, getattr(divided, part)
    if part not in given:
        has = f"has the parts {', '.join(given)} and all" if given else "comes undivided: ask for all of it"
        raise DataError(f"this is not the data that the model was trained on, so it has no part {part!r}; it {has}.")
    return part, given[part]


def _own_parts(data: DataSet, card: Card) -> Parts | None:
    """The division that the model was trained with; None where it was trained on other data, or does not say."""
    origin = card.provenance
    if origin.recipe is None or origin.data_hash is None or data.hash() != origin.data_hash:
        return None
    shares, seed = _recipe(card), origin.recipe.get("seed", 0)
    if shares is None or not isinstance(seed, int):
        return None
    return divide(data, shares.validation, shares.calibration, shares.test, seed)


def _recipe(card: Card) -> Data | None:
    try:
        return Data.model_validate((card.provenance.recipe or {}).get("data"))
    except ValidationError:  # an artifact from elsewhere may say anything about its origin
        return None


def read_for(
    manifest: Manifest, name: str, root: Path | None = None, *, download: bool = False, labelled: bool = True
) -> DataSet:
    """A data set read as the model's own was (target column, split, picture size), its classes numbered as there.

    `labelled=False` is for sets whose targets do not matter, whatever they are.
    """
    recipe, declared, regression = _recipe(manifest.card), manifest.card.input, manifest.task.kind == "regression"
    data = read_data(
        name,
        root,
        download=download,
        regression=regression if labelled else None,
        target=None if recipe is None else recipe.target,
        size=None if declared is None or declared.image is None else (declared.shape[1], declared.shape[2]),
        split=recipe.split if recipe is not None and recipe.name == name else 0,
    )
    if not labelled:
        return data
    if regression != (data.labels is None):
        kinds = ("classes", "numbers")
        raise DataError(f"{name} has {kinds[not regression]} for targets; this model predicts {kinds[regression]}.")
    return data if manifest.card.labels is None else _numbered(data, name, manifest.card.labels)


def _numbered(data: DataSet, name: str, known: tuple[str, ...]) -> DataSet:
    """By name where all names are known to the model; else as they are, where there are as many."""
    labels = data.labels
    if labels is None or labels == known:
        return data
    if set(labels) <= set(known):
        place = torch.tensor([known.index(label) for label in labels])
        train, test = (None if part is None else Examples(part.x, place[part.y]) for part in (data.train, data.test))
        assert train is not None
        return DataSet(train, test, known)
    if len(labels) == len(known) or (len(labels) < len(known) and labels == tuple(map(str, range(len(labels))))):
        return DataSet(data.train, data.test, known)
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
    size: tuple[int, int] | None = None,
    split: int = 0,
) -> DataSet:
    """A data set by name; `regression` says how to read targets that could be either (None: words and integers are
    classes)."""
    kind, colon, place = name.partition(":")
    if name == "digits":
        return _digits()
    if name in TORCHVISION:
        return _torchvision(name, root, download)
    if name.startswith("uci/"):
        return _uci(name.removeprefix("uci/"), root, split)
    if not colon or kind not in ("folder", "npz", "csv"):
        raise DataError(f"no data set {name!r}; there are: {', '.join(NAMES)}.")
    path = Path(place).expanduser()
    if not place or not path.exists():
        raise DataError(f"{name}: there is no {str(path)!r}.")
    if kind == "folder":
        return _folder(path, size)
    return _npz(path, regression) if kind == "npz" else _csv(path, regression, target)


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
            found = maker(str(root), download=download, **choice)
        except RuntimeError:
            raise DataError(f"{name} is not in {root}; pass --download to fetch it there.") from None
        except OSError as error:
            raise DataError(f"{name} cannot be had in {root}: {error}.") from None
        pixels = torch.as_tensor(np.asarray(found.data))
        if pixels.dim() == 3:
            pixels = pixels[:, None]
        elif pixels.shape[-1] == 3:
            pixels = pixels.permute(0, 3, 1, 2)
        labels = found.labels if name == "svhn" else found.targets
        parts.append(Examples(pixels.contiguous(), torch.as_tensor(np.asarray(labels)).long()))
        classes = tuple(str(c) for c in getattr(found, "classes", range(10)))
    return DataSet(parts[0], parts[1], classes)


def _uci(name: str, root: Path | None, split: int) -> DataSet:
    """The regression sets with the divisions that the literature uses: `data.txt` and index files."""
    if root is None:
        raise DataError(f"uci/{name}: say with --data-root which folder holds UCI/standard/{name}/data/.")
    folder = root / "UCI" / "standard" / name / "data"
    try:
        table = np.loadtxt(folder / "data.txt")
        features = np.loadtxt(folder / "index_features.txt").astype(int)
        target = np.loadtxt(folder / "index_target.txt").astype(int).reshape(-1)
        rows = [np.loadtxt(folder / f"index_{part}_{split}.txt").astype(int) for part in ("train", "test")]
    except (OSError, ValueError) as error:
        raise DataError(f"uci/{name}, split {split}, cannot be read from {folder}: {error}.") from None
    train, test = (_arrays(folder, table[r][:, features], table[r][:, target], True) for r in rows)
    return DataSet(train, test, None)


def _folder(path: Path, size: tuple[int, int] | None) -> DataSet:
    """One folder of pictures per class; or such folders inside `train` and `test`."""
    if (path / "train").is_dir() and (path / "test").is_dir():
        train, classes, size = _pictures(path / "train", size)
        test, others, _ = _pictures(path / "test", size)
        if classes != others:
            raise DataError(f"{path}: train has the classes {classes}, test {others}; expected the same.")
        return DataSet(train, test, classes)
    train, classes, _ = _pictures(path, size)
    return DataSet(train, None, classes)


def _pictures(path: Path, size: tuple[int, int] | None) -> tuple[Examples, tuple[str, ...], tuple[int, int]]:
    from rich.progress import track
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    try:
        found = ImageFolder(str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path}: {error}; expected one folder of pictures per class.") from None
    pixels: list[Tensor] = []
    for file, _ in track(found.samples, f"reading {path}", transient=True):
        try:
            picture = v2.functional.pil_to_tensor(found.loader(file))
        except OSError as error:
            raise DataError(f"cannot read {file}: {error}.") from None
        size = (picture.shape[1], picture.shape[2]) if size is None else size
        if tuple(picture.shape[1:]) != size:
            picture = v2.functional.resize(picture, list(size), antialias=True)
        pixels.append(picture)
    assert size is not None
    return Examples(torch.stack(pixels), torch.tensor(found.targets)), tuple(found.classes), size


def _npz(path: Path, regression: bool | None) -> DataSet:
    """Arrays `x` (uint8 pictures, channels first or last, or floats) and `y`; `x_test` and `y_test` where there are."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {key: arrays[key] for key in arrays.files}
    except Exception as error:  # numpy and zipfile raise many kinds, all of them about the file
        raise DataError(f"cannot read {path}: {error}.") from None
    if not {"x", "y"} <= found.keys() or ("x_test" in found) != ("y_test" in found):
        raise DataError(f"{path} holds {', '.join(found) or 'nothing'}; expected arrays x and y (and x_test, y_test).")
    names = [("x", "y"), ("x_test", "y_test")] if "x_test" in found else [("x", "y")]
    parts = [_arrays(path, found[x], found[y], regression) for x, y in names]
    classes = None
    if parts[0].y.dim() == 1:
        classes = tuple(str(c) for c in range(max(int(p.y.max()) for p in parts) + 1))
    return DataSet(parts[0], parts[1] if len(parts) > 1 else None, classes)


def _arrays(path: Path, x: NDArray[np.generic], y: NDArray[np.generic], regression: bool | None) -> Examples:
    if x.ndim < 2 or len(x) != len(y) or len(x) == 0:
        raise DataError(f"{path}: x has shape {x.shape} and y {y.shape}; expected as many inputs as targets, and some.")
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
        raise DataError(f"{path}: x holds {x.dtype} and y {y.dtype}; expected numbers.")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        inputs = torch.from_numpy(np.ascontiguousarray(x))
        if x.ndim == 3:
            inputs = inputs[:, None]
        elif x.shape[1] not in (1, 3) and x.shape[-1] in (1, 3):
            inputs = inputs.permute(0, 3, 1, 2).contiguous()
    else:
        inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if regression is None:
        regression = not (np.issubdtype(y.dtype, np.integer) and y.ndim == 1)
    targets = torch.from_numpy(np.ascontiguousarray(y, dtype=np.float32))
    if not (inputs.float().isfinite().all() and targets.isfinite().all()):
        raise DataError(f"{path} holds NaN or infinity; expected finite numbers only.")
    if regression:
        return Examples(inputs, targets.flatten(1) if targets.dim() > 1 else targets[:, None])
    if y.ndim != 1 or y.min() < 0 or bool((targets != targets.round()).any()):
        raise DataError(f"{path}: y has shape {y.shape} and values from {y.min()}; expected classes 0, 1, 2, … (N,).")
    return Examples(inputs, targets.long())


def _csv(path: Path, regression: bool | None, target: str | None) -> DataSet:
    """A header, and numbers; the target is a column of numbers (regression) or of words or integers (classes)."""
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}.") from None
    if len(rows) < 2:
        raise DataError(f"{path} has {len(rows)} lines; expected a header and examples.")
    header, *body = rows
    for number, row in enumerate(body, 2):
        if len(row) != len(header):
            raise DataError(f"{path}: line {number} has {len(row)} fields; the header has {len(header)}.")
    if target is not None and target not in header:
        raise DataError(f"{path} has no column {target!r}; it has {', '.join(header)}.")
    at = len(header) - 1 if target is None else header.index(target)
    last = [row.pop(at).strip() for row in body]
    try:
        x = np.array([[float(v) for v in row] for row in body], dtype=np.float32)
    except ValueError as error:
        raise DataError(f"{path}: every feature must be a number: {error}.") from None
    if regression is None:
        regression = not all(_is_word_or_integer(v) for v in last)
    if regression:
        try:
            values = np.array([float(v) for v in last], dtype=np.float32)
        except ValueError as error:
            raise DataError(f"{path}: the targets of a regression must be numbers: {error}.") from None
        return DataSet(_arrays(path, x, values, True), None, None)
    names = sorted(set(last), key=lambda v: (not v.isdigit(), int(v) if v.isdigit() else 0, v))
    index = {name: i for i, name in enumerate(names)}
    return DataSet(_arrays(path, x, np.array([index[v] for v in last]), False), None, tuple(names))


def _is_word_or_integer(text: str) -> bool:
    try:
        return float(text).is_integer() and "." not in text
    except ValueError:
        return True


def input_of(train: Examples) -> Input:
    """Pictures: scaled to [0, 1], then by the training part's mean and standard deviation per channel. Else as is."""
    if train.x.dtype != torch.uint8:
        return Input(shape=tuple(train.x.shape[1:]))
    pixels = train.x[:: max(1, len(train) // 10_000)].double() / 255
    mean, std = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3)).clamp(min=1e-3)
    image = Image(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    return Input(shape=tuple(train.x.shape[1:]), image=image)


def enter(x: Tensor, declared: Input) -> Tensor:
    """A batch as the network takes it: (B, …) float32."""
    if declared.image is None or x.dtype != torch.uint8:
        if tuple(x.shape[1:]) != declared.shape:
            raise DataError(f"examples have shape {tuple(x.shape[1:])}; this model takes {declared.shape}.")
        return x.float()
    if tuple(x.shape[1:]) != declared.shape:
        return torch.stack([prepare(picture.permute(1, 2, 0), declared) for picture in x.cpu()]).to(x.device)
    mean, std = (torch.tensor(v, device=x.device)[:, None, None] for v in (declared.image.mean, declared.image.std))
    return (x.float() / 255 - mean) / std
