"""Networks by name: ours, torchvision's classifiers, and plug-ins of other packages."""

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points
from itertools import pairwise

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from dubito.models.errors import ArchitectureError
from dubito.models.manifest import Architecture, Image, Input

GROUP = "dubito.architectures"  # entry points: name -> a function of plain arguments that returns an nn.Module
LARGEST = 1 << 24  # of any whole number among the arguments: a manifest may claim what it likes
LONGEST = 256  # of any list among them
STEM = 64  # channels of a ResNet's first layer, which divide those of all others
WIDEST = 30  # of a deep Gaussian process's hidden layers, unless they are told [Salimbeni17]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}


class Standardise(nn.Module):
    """Features in their own units become (x − shift)/scale; training sets both from its data."""

    shift: Tensor
    scale: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.scale


def mlp(
    inputs: int = 784,
    outputs: int = 10,
    hidden: Sequence[int] = (400, 400),
    activation: str = "relu",
    standardise: bool = False,
) -> nn.Module:
    """Fully connected layers; inputs of any shape are flattened, and standardised first where asked."""
    if activation not in ACTIVATIONS:
        raise ArchitectureError(f"mlp: activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
    layers: list[nn.Module] = [nn.Flatten(), *([Standardise(inputs)] if standardise else [])]
    sizes = [inputs, *hidden]
    for d_in, d_out in pairwise(sizes):
        layers += [nn.Linear(d_in, d_out), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


class Skip(nn.Module):
    """x + f(x), if both have as many numbers; else f(x)."""

    def __init__(self, f: nn.Module) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.f(x)
        return x + out if out.shape == x.shape else out


def deep_gp(
    inputs: int = 784, outputs: int = 10, layers: int = 2, width: int | None = None, standardise: bool = False
) -> nn.Module:
    """The layers of a deep Gaussian process, for the methods dgp and dsvi: linear, with nothing between them.

    Hidden layers are as wide as the inputs, up to WIDEST, and what they get is added to what they give.
    """
    if layers > LONGEST:
        raise ArchitectureError(f"deep-gp: layers is {layers}; expected at most {LONGEST}.")
    sizes = [inputs, *[min(inputs, WIDEST) if width is None else width] * (layers - 1)]
    hidden = [Skip(nn.Linear(d_in, d_out, bias=False)) for d_in, d_out in pairwise(sizes)]
    front = [nn.Flatten(), *([Standardise(inputs)] if standardise else [])]
    return nn.Sequential(*front, *hidden, nn.Linear(sizes[-1], outputs, bias=False))


class Fourier(nn.Module):
    """√2 cos x and √2 sin x side by side: with weights of variance σ²/d after it, a process of variance σ²."""

    def forward(self, x: Tensor) -> Tensor:
        return math.sqrt(2) * torch.cat([x.cos(), x.sin()], -1)


def random_features(inputs: int = 784, outputs: int = 10, features: int = 512, standardise: bool = False) -> nn.Module:
    """A Gaussian process by random Fourier features: Ω x, its cosines and sines, and a linear layer on them.

    With normal Ω of variance 1/ℓ², features have the inner products of the squared-exponential kernel of length ℓ.
    """
    front = [nn.Flatten(), *([Standardise(inputs)] if standardise else [])]
    projection, last = nn.Linear(inputs, features, bias=False), nn.Linear(2 * features, outputs, bias=False)
    return nn.Sequential(*front, projection, Fourier(), last)


def lenet(classes: int = 10, channels: int = 1, width: int = 1) -> nn.Module:
    """LeNet-5 for 28 × 28 images, with ReLU and max-pooling; `width` times as wide in every layer."""
    return nn.Sequential(
        nn.Conv2d(channels, 6 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6 * width, 16 * width, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400 * width, 120 * width),
        nn.ReLU(),
        nn.Linear(120 * width, 84 * width),
        nn.ReLU(),
        nn.Linear(84 * width, classes),
    )


def cnn(
    classes: int = 10, channels: int = 1, size: int | Sequence[int] = 28, width: int = 64, hidden: int = 256
) -> nn.Module:
    """Four 3 × 3 convolutions with BatchNorm and two linear layers, for small pictures of (size) or (height, width)."""
    height, on_side = (size, size) if isinstance(size, int) else size
    if min(height, on_side) < 8:
        raise ArchitectureError(f"cnn: size is {size}; expected at least 8, for the picture is halved three times.")
    wide = 2 * width
    return nn.Sequential(
        *_convolved(channels, width),
        *_convolved(width, width),
        nn.MaxPool2d(2),
        *_convolved(width, wide),
        *_convolved(wide, wide),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(wide * (height // 8) * (on_side // 8), hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def _convolved(c_in: int, c_out: int) -> list[nn.Module]:
    return [nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]


def convnet(
    classes: int = 10,
    channels: int = 1,
    size: int | Sequence[int] = 28,
    stages: Sequence[int] = (32, 64),
    depth: int = 1,
    hidden: int = 128,
) -> nn.Module:
    """3 × 3 convolutions without BatchNorm, and two linear layers [Rudner21, appendix 3].

    Each stage has `depth` convolutions with so many channels, and halves the picture of (size) or (height, width).
    """
    height, on_side = (size, size) if isinstance(size, int) else size
    least = 1 << len(stages)
    if min(height, on_side) < least:
        raise ArchitectureError(
            f"convnet: size is {size}; expected at least {least}, for the picture is halved {len(stages)} times."
        )
    layers: list[nn.Module] = []
    c_in = channels
    for width in stages:
        for _ in range(depth):
            layers += [nn.Conv2d(c_in, width, 3, padding=1), nn.ReLU()]
            c_in = width
        layers.append(nn.MaxPool2d(2))
    features = c_in * (height // least) * (on_side // least)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def resnet8(classes: int = 10, channels: int = 3, width: int = 32) -> nn.Module:
    """The network of [Ober21, section 3.4]: seven 3 × 3 convolutions and three skip connections, without BatchNorm."""

    def block() -> nn.Module:
        return Skip(nn.Sequential(*_unbiased(width, width), *_unbiased(width, width)))

    return nn.Sequential(
        *_unbiased(channels, width),
        block(),
        nn.AvgPool2d(2),
        block(),
        nn.AvgPool2d(2),
        block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )


def _unbiased(c_in: int, c_out: int) -> list[nn.Module]:
    return [nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.ReLU()]


def resnet18_cifar(classes: int = 10, groups: int | None = None) -> nn.Module:
    return _for_small_images("resnet18", classes, groups)


def resnet50_cifar(classes: int = 10, groups: int | None = None) -> nn.Module:
    return _for_small_images("resnet50", classes, groups)


def _for_small_images(name: str, classes: int, groups: int | None) -> nn.Module:
    """torchvision's network with a 3 × 3 stem and no max-pooling, for 32 × 32 images.

    With `groups`, GroupNorm of so many groups stands in place of BatchNorm, and no image depends on its batch.
    """
    if groups is not None and STEM % groups:
        raise ArchitectureError(
            f"{name}-cifar: groups is {groups}; expected a divisor of {STEM}, or none for BatchNorm."
        )
    norm = {} if groups is None else {"norm_layer": partial(nn.GroupNorm, groups)}
    net = _torchvision(name, classes, **norm)
    net.conv1 = nn.Conv2d(3, STEM, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def _torchvision(name: str, classes: int, **options: Callable[..., nn.Module]) -> nn.Module:
    import torchvision.models  # slow to import, and only these names need it

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        near = difflib.get_close_matches(name, known, 3) or known[:3]
        raise ArchitectureError(
            f"torchvision has no classifier {name!r}; it has {len(known)}, such as {', '.join(near)}."
        )
    builder = torchvision.models.get_model_builder(name)
    extra: dict[str, bool] = (
        {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    )
    if name.startswith("regnet") and torch.empty(0).is_meta:  # its start looks at weights, which are not there
        with torch.device("cpu"):
            regnet: nn.Module = builder(weights=None, num_classes=1)
        features: int = regnet.fc.in_features  # type: ignore[union-attr, assignment]
        regnet = regnet.to("meta")
        regnet.fc = nn.Linear(features, classes)
        return regnet
    net: nn.Module = builder(weights=None, num_classes=classes, **extra, **options)
    return net


OURS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "cnn": cnn,
    "convnet": convnet,
    "resnet8": resnet8,
    "resnet18-cifar": resnet18_cifar,
    "resnet50-cifar": resnet50_cifar,
    "deep-gp": deep_gp,
    "random-features": random_features,
}


FACTORIES: dict[str, Callable[..., nn.Module]] = {}  # that may be called: named on the command line, or by `permit`


def names() -> list[str]:
    """Every name that can be built here, torchvision's as one pattern."""
    return [*OURS, "torchvision/NAME", *(e.name for e in entry_points(group=GROUP))]


def build(name: str, **arguments: JsonValue) -> nn.Module:
    """A fresh network; it remembers its name and arguments, so that an artifact can rebuild it.

    `package.module:factory` names a class or a function of one's own, which is imported and called.
    """
    if not isinstance(name, str):
        raise ArchitectureError(f"build got {type(name).__name__}; expected the name of a network, such as resnet18.")
    if is_factory(name):
        permit(name)
    builder = _builder(name)
    arguments = {key: list(value) if isinstance(value, tuple) else value for key, value in arguments.items()}
    _check(name, builder, arguments)
    try:
        net = builder(**arguments)
    except ArchitectureError:
        raise
    except Exception as error:  # whatever a plug-in, or torch with arguments of the wrong kind, comes up with
        raise ArchitectureError(f"{name} cannot be built with {arguments}: {error!r}.") from error
    if not isinstance(net, nn.Module):
        raise ArchitectureError(f"the plug-in {name!r} returned {type(net).__name__}; expected a torch nn.Module.")
    remember(net, Architecture(name=name, arguments=arguments))
    return net


def permit(name: str) -> None:
    """Let `package.module:factory` be called to build networks: its code runs because somebody here named it."""
    module, _, factory = name.partition(":")
    if not module or not factory:
        raise ArchitectureError(f"the network is {name!r}; expected package.module:factory.")
    if name in FACTORIES:
        return
    try:
        made = getattr(importlib.import_module(module), factory)
    except Exception as error:  # whatever the module's code comes up with
        raise ArchitectureError(f"the network {name!r} cannot be imported: {error!r}.") from error
    if not callable(made) or isinstance(made, nn.Module):
        came = f"a {type(made).__name__}" + (" that is built already" if isinstance(made, nn.Module) else "")
        raise ArchitectureError(f"the network {name!r} is {came}; expected a class, or a function that builds it.")
    FACTORIES[name] = made


def check_permitted(name: str) -> None:
    """A file may name code, and does not make it run."""
    if is_factory(name) and name not in FACTORIES:
        raise ArchitectureError(
            f"its network is made by {name}, whose code runs only where you name it: give --network {name}, or call "
            f"build({name!r}, ...) first."
        )


def is_factory(name: str) -> bool:
    return ":" in name


def only_factory() -> str | None:
    """The one that was permitted, if it is one."""
    return next(iter(FACTORIES)) if len(FACTORIES) == 1 else None


def sizes_of(name: str) -> frozenset[str]:
    """The arguments that such a network takes."""
    return frozenset(inspect.signature(_builder(name)).parameters)


def remember(net: nn.Module, architecture: Architecture) -> None:
    net.__dict__["architecture"] = architecture  # past nn.Module, which keeps nothing but its own kinds


def architecture_of(net: nn.Module) -> Architecture:
    recorded = net.__dict__.get("architecture")
    return recorded if isinstance(recorded, Architecture) else Architecture(name="custom")


def on_meta(name: str) -> bool:
    """Whether such a network holds nothing but parameters and buffers, so that it can be built without storage."""
    return name in OURS or name.startswith("torchvision/")


def input_of(architecture: Architecture) -> Input | None:
    """What such a network takes, where its name and arguments tell."""
    match architecture.name:
        case "mlp" | "deep-gp" | "random-features":
            inputs = architecture.arguments.get("inputs", 784)
            return Input(shape=(inputs,)) if isinstance(inputs, int) else None
        case "lenet" | "resnet8":
            known, side = (1, 28) if architecture.name == "lenet" else (3, 32)
            channels = architecture.arguments.get("channels", known)
            if not isinstance(channels, int):
                return None
            return Input(shape=(channels, side, side), image=Image(mean=(0.0,) * channels, std=(1.0,) * channels))
        case "cnn" | "convnet":
            channels, size = (architecture.arguments.get(k, d) for k, d in (("channels", 1), ("size", 28)))
            sides = [size, size] if isinstance(size, int) else size
            if not isinstance(channels, int) or not isinstance(sides, list) or len(sides) != 2:
                return None
            return Input(shape=(channels, *sides), image=Image(mean=(0.0,) * channels, std=(1.0,) * channels))
        case "resnet18-cifar" | "resnet50-cifar":
            return Input(shape=(3, 32, 32), image=Image(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616)))
        case name if name.startswith("torchvision/"):
            return Input(shape=(3, 224, 224), image=Image(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)))
    return None


def _builder(name: str) -> Callable[..., nn.Module]:
    if name in OURS:
        return OURS[name]
    if is_factory(name):
        check_permitted(name)
        return FACTORIES[name]
    if name.startswith("torchvision/"):

        def torchvision_classifier(classes: int = 1000) -> nn.Module:
            return _torchvision(name.removeprefix("torchvision/"), classes)

        return torchvision_classifier
    for entry in entry_points(group=GROUP, name=name):
        plugin: Callable[..., nn.Module] = entry.load()
        return plugin
    raise ArchitectureError(
        f"no architecture {name!r}; there are: {', '.join(names())}, and package.module:factory for your own. "
        f"A package can add its own under the entry point group {GROUP!r}."
    )


def _check(name: str, builder: Callable[..., nn.Module], arguments: dict[str, JsonValue]) -> None:
    """Arguments may come from a hostile file: known names, sane sizes."""
    try:
        inspect.signature(builder).bind(**arguments)
    except TypeError as error:
        raise ArchitectureError(f"{name}: {error}; it takes {inspect.signature(builder)}.") from None
    for key, value in arguments.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            least = 1 if on_meta(name) else -LARGEST  # a plug-in's number need not be a size
            if isinstance(number, int) and not least <= number <= LARGEST and not isinstance(number, bool):
                raise ArchitectureError(f"{name}: {key} is {number}; expected {least} to {LARGEST}.")
        if isinstance(value, list | tuple) and len(value) > LONGEST:
            raise ArchitectureError(f"{name}: {key} has {len(value)} entries; expected at most {LONGEST}.")
