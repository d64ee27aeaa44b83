"""Labelled data from an .npz file, for a check or for the ranges of activations."""

import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.images import layout_of, prepare_array
from dubito.models.network.layers import takes_ids
from dubito.models.predictions.model import Model
from dubito.models.remote.cache import local_copy

EXPECTED = "expected npz:PATH, a file with arrays x and y"


@dataclass(frozen=True)
class LabelledData:
    x: NDArray[Any]  # uint8 pictures, or numbers in the model's own input space
    y: NDArray[Any]

    def tensors(self, model: Model) -> Tensor:
        """Inputs of the torch model."""
        if not self._pictures(model):
            return torch.from_numpy(self.x.astype(np.int64 if takes_ids(model.network) else np.float32))
        assert model.card.input is not None
        batch = layout_of(self.x.shape, model.card.input, several=True).pictures(self.x)
        return prepare_array(batch, model.card.input)

    def graph_inputs(self, model: Model, image: bool) -> NDArray[Any]:
        """Inputs of the graph: uint8 pictures, channels last, if the graph prepares them itself."""
        if not image:
            prepared: NDArray[Any] = self.tensors(model).numpy()
            return prepared
        if not self._pictures(model):
            raise InputError("this file takes pictures (uint8), but the data hold other numbers.")
        assert model.card.input is not None
        batch = layout_of(self.x.shape, model.card.input, several=True).pictures(self.x)
        return np.ascontiguousarray(batch if batch.ndim == 4 else batch[..., None])

    def _pictures(self, model: Model) -> bool:
        return self.x.dtype == np.uint8 and model.card.input is not None and model.card.input.image is not None


def read(name: str, model: Model) -> LabelledData:
    """Read `npz:PATH`, or a path, of a file with `x` and `y`; in place of the path, an address."""
    with local_copy(name.removeprefix("npz:")) as path:
        return _read(str(path), model)


def _read(path: str, model: Model) -> LabelledData:
    try:
        with open(path, "rb") as opened:
            if opened.read(2) != b"PK":
                raise InputError(f"{path} is no .npz file; {EXPECTED}.")
            opened.seek(0)
            file = np.load(opened, allow_pickle=False)
            x, y = file["x"], file["y"]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}; {EXPECTED}.") from None
    except KeyError:
        raise InputError(f"{path} lacks x or y; expected an .npz file with both arrays.") from None
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, struct.error):
        raise InputError(
            f"{path} is cut or damaged, or holds objects; expected an .npz file with arrays x and y."
        ) from None
    _check(path, x, y, model)
    return LabelledData(x, y)


def _check(path: str, x: NDArray[Any], y: NDArray[Any], model: Model) -> None:
    """Refuse arrays that are not inputs and targets of the model."""
    numbers = all(array.dtype.kind in "biuf" for array in (x, y))
    if not numbers or not np.isfinite(x).all() or not np.isfinite(y).all():
        raise InputError(f"{path} holds x as {x.dtype} and y as {y.dtype}; expected finite numbers in both.")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        sizes = " and ".join(f"{name} of shape {array.shape}" for name, array in (("x", x), ("y", y)))
        raise InputError(f"{path} holds {sizes}; expected as many inputs as labels, and some.")
    declared, task = model.card.input, model.manifest.task
    if takes_ids(model.network) and x.dtype.kind not in "iu":
        raise InputError(f"{path} holds {x.dtype} inputs; this model takes token ids, which are integers.")
    pictures = x.dtype == np.uint8 and declared is not None and declared.image is not None
    if declared is not None and not pictures and x.shape[1:] != declared.shape:
        raise InputError(f"{path} holds {x.dtype} inputs of shape {x.shape[1:]}; this model takes {declared.shape}.")
    if task.kind == "classification" and (y.ndim != 1 or (y != np.floor(y)).any() or y.min() < 0):
        raise InputError(f"{path} holds y of shape {y.shape}, type {y.dtype}; expected the number of a class for each.")
    if task.kind == "regression" and y.size != len(y) * task.outputs:
        raise InputError(f"{path} holds y of shape {y.shape}; expected {task.outputs} values for each input.")
