"""Labelled data from an .npz file, for a check or to find the range of activations."""

import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.models.errors import InputError
from dubito.models.images import pictures_in, prepare
from dubito.models.model import Model


@dataclass(frozen=True)
class Data:
    x: NDArray[Any]  # uint8 pictures, or numbers in the model's own input space
    y: NDArray[Any]

    def tensors(self, model: Model) -> Tensor:
        """As the torch model takes them."""
        if not self._pictures(model):
            return torch.from_numpy(self.x.astype(np.float32))
        assert model.card.input is not None
        batch, _ = pictures_in(self.x, model.card.input)
        return torch.stack([prepare(torch.from_numpy(np.array(one)), model.card.input) for one in batch])

    def graph_inputs(self, model: Model, image: bool) -> NDArray[Any]:
        """As the graph takes them: pictures, channels last, where it prepares them itself."""
        if not image:
            prepared: NDArray[Any] = self.tensors(model).numpy()
            return prepared
        if not self._pictures(model):
            raise InputError("this file takes pictures (uint8), but the data hold other numbers.")
        assert model.card.input is not None
        batch, _ = pictures_in(self.x, model.card.input)
        return np.ascontiguousarray(batch if batch.ndim == 4 else batch[..., None])

    def _pictures(self, model: Model) -> bool:
        return self.x.dtype == np.uint8 and model.card.input is not None and model.card.input.image is not None


def read(name: str, model: Model) -> Data:
    """`npz:PATH`, or a path, of a file with `x` and `y`."""
    path = name.removeprefix("npz:")
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y = file["x"], file["y"]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from None
    except (KeyError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"cannot read {path} as .npz with arrays x and y: {error}.") from None
    declared = model.card.input
    if len(x) != len(y) or len(x) == 0:
        raise InputError(f"{path} holds {len(x)} inputs and {len(y)} labels; expected as many of both, and some.")
    if declared is not None and declared.image is None and x.shape[1:] != declared.shape:
        raise InputError(f"{path} holds inputs of shape {x.shape[1:]}; this model takes {declared.shape}.")
    return Data(x, y)
