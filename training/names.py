"""Names of recipes, data sets and their parts. Nothing heavy is imported, so that `--help` can list them at once."""

from importlib.resources import files

OWN_DATA = ("folder", "npz", "csv")  # `dubito train npz:PATH` follows the recipe npz with that data
TORCHVISION = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
}
DATA = ("digits", *TORCHVISION, "uci/NAME", "uci-gap/NAME", *(f"{kind}:PATH" for kind in OWN_DATA))
PARTS = ("train", "validation", "calibration", "test")


def shipped() -> list[str]:
    """The recipes that come with dubito."""
    names = (file.name for file in files("dubito.training").joinpath("recipes").iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def recipes() -> list[str]:
    """Names that `dubito train` takes, beside TOML files; a recipe for one's own data is KIND:PATH."""
    return [*(name for name in shipped() if name not in OWN_DATA), *(f"{kind}:PATH" for kind in OWN_DATA)]
