"""What a network of torchvision or timm takes, where its package says it: size, crop, normalisation."""

from typing import Any

import torch
from torch import nn

from dubito.models.conversion.architectures import on_meta
from dubito.models.conversion.named import TIMM, arguments_for, network_of, timm
from dubito.models.manifest import Fitting, Input
from dubito.training.config import PICTURES, Data, Network
from dubito.training.weights import Weights, fitting_names

TORCHVISION = "torchvision/"
GUESS = 7919  # classes of a trial network, by which its head is recognised: no other layer has this size
INPUTS = 64  # of such a network, whose data have not been read yet


def as_made_for(data: Data, network: Network) -> Data:
    """The data's pictures as the package's own weights take them, where the recipe does not say otherwise.

    A size of the recipe's own comes without a crop: nobody said one for it.
    """
    known = _preset(network.architecture) if data.name.startswith(PICTURES) else {}
    if data.size is not None:
        known.pop("crop", None)
    own = data.model_dump(exclude_unset=True)
    default = {key: value for key, value in known.items() if own.get(key) is None}
    return Data.model_validate(data.model_dump() | default) if default else data


def as_weights_take(data: Data, network: Network, weights: Weights) -> Data:
    """`as_made_for`, and a folder's pictures in grey or colour as the weights have them."""
    data = as_made_for(data, network)
    if data.channels is None and data.name.startswith("folder:"):
        return data.model_copy(update={"channels": channels_in(weights)})
    return data


def _preset(architecture: str) -> dict[str, Any]:
    if architecture.startswith(TORCHVISION):
        import torchvision.models

        name = architecture.removeprefix(TORCHVISION)
        if name not in torchvision.models.list_models(module=torchvision.models):
            return {}  # building it says what there is
        made = torchvision.models.get_model_weights(name).DEFAULT.transforms()
        size, resize, how = made.crop_size[0], made.resize_size[0], made.interpolation.value
        mean, std, crop = made.mean, made.std, size / resize
    elif architecture.startswith(TIMM):
        cfg = timm().get_pretrained_cfg(architecture.removeprefix(TIMM))
        size, how, mean, std = cfg.input_size[1], cfg.interpolation, cfg.mean, cfg.std
        crop = None if cfg.crop_mode == "squash" else cfg.crop_pct
    else:
        return {}
    return {
        "size": (size, size),
        "crop": crop,
        "interpolation": "bicubic" if how == "bicubic" else "bilinear",
        "channels": 3,
        "normalise": (tuple(mean), tuple(std)),
    }


def describe_input(declared: Input) -> str:
    """How pictures become inputs, in a line."""
    image = declared.image
    assert image is not None
    (channels, height, width), fitting = declared.shape, image.fitting or Fitting()
    cut = "resized" if fitting.resize is None else f"the middle of a picture resized to {fitting.resize}"
    how = f"{height} × {width}, {cut}, {fitting.interpolation}{', turned by EXIF' if fitting.exif else ''}"
    mean, std = (", ".join(f"{v:.3g}" for v in values) for values in (image.mean, image.std))
    return f"{'colour' if channels == 3 else 'grey'}, {how}, mean {mean}, std {std}"


def channels_in(weights: Weights) -> int | None:
    """Channels of the pictures that a network takes, by its first convolution."""
    first = next((len(t[0]) for t in weights.tensors.values() if t.dim() == 4), None)
    return first if first in (1, 3) else None


def trial(network: Network, data: Data) -> nn.Module:
    """The network with as many classes as no layer has, without storage where that can be."""
    sizes: dict[str, Any] = {"classes": GUESS, "outputs": GUESS, "inputs": INPUTS}
    if data.size is not None:
        sizes["size"] = list(data.size)
    if data.channels is not None:
        sizes["channels"] = data.channels
    name = network.architecture
    with torch.device("meta" if ":" not in name and not name.startswith(TIMM) and on_meta(name) else "cpu"):
        return network_of(name, **arguments_for(name, sizes) | network.arguments)


def classes_in(weights: Weights, network: Network, data: Data) -> int | None:
    """Classes of the head that the weights hold; None: the network's head is not among them, or has a fixed size."""
    blank = trial(network, data).state_dict()
    tensors = fitting_names(weights, list(blank)).tensors
    sizes = {len(tensors[key]) for key, t in blank.items() if t.dim() and len(t) == GUESS and key in tensors}
    return sizes.pop() if len(sizes) == 1 else None
