"""Networks that a training command names: those of `build`, and timm's, which only a command may import."""

import difflib
import importlib
from typing import Any

from pydantic import JsonValue
from torch import nn

from dubito.models.conversion.architectures import build, check_permitted, is_factory, sizes_of
from dubito.models.errors import ArchitectureError

TIMM = "timm/"
TAKEN = ("classes", "channels", "size")  # by timm's
ALSO = {"num_classes": "classes", "in_channels": "channels", "in_chans": "channels"}  # what others call our sizes


def network_of(name: str, **arguments: JsonValue) -> nn.Module:
    """A fresh network; one of timm's has no name for `save`, which stores its structure."""
    if not name.startswith(TIMM):
        check_permitted(name)
        return build(name, **arguments)
    try:
        return _timm(name.removeprefix(TIMM), **arguments)  # type: ignore[arg-type]
    except ArchitectureError:
        raise
    except Exception as error:  # timm raises many kinds
        raise ArchitectureError(f"{name} cannot be built with {arguments}: {error!r}.") from error


def arguments_for(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Those of `classes`, `outputs`, `inputs`, `channels` and `size` that such a network takes, by its own names."""
    if name.startswith(TIMM):
        return {key: sizes[key] for key in TAKEN if key in sizes}
    check_permitted(name)
    taken = sizes_of(name)
    if is_factory(name):
        sizes = {theirs: sizes[ours] for theirs, ours in ALSO.items() if ours in sizes} | sizes
    return {key: value for key, value in sizes.items() if key in taken}


def timm() -> Any:
    """The package, which is an extra."""
    try:
        return importlib.import_module("timm")
    except ImportError:
        raise ArchitectureError("timm is not installed here: pip install 'dubito[timm]'.") from None


def _timm(
    name: str, classes: int = 1000, channels: int = 3, size: list[int] | None = None, **options: Any
) -> nn.Module:
    package = timm()
    if not package.is_model(name):
        known = package.list_models()
        near = difflib.get_close_matches(name, known, 3) or known[:3]
        raise ArchitectureError(f"timm has no classifier {name!r}; it has {len(known)}, such as {', '.join(near)}.")
    options |= {"pretrained": False, "num_classes": classes, "in_chans": channels}
    net: nn.Module
    if size is not None and list(package.get_pretrained_cfg(name).input_size[1:]) != list(size):
        try:
            net = package.create_model(name, img_size=tuple(size), **options)
            return net
        except TypeError:  # convolutional networks take any size, and do not ask
            pass
    net = package.create_model(name, **options)
    return net
