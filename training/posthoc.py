"""Subnetwork Laplace for a network that is already trained: a deterministic artifact, or a state dict."""

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Literal

import torch

from dubito.models import bayesianize
from dubito.models.artifact.artifact import check_savable, load
from dubito.models.errors import ArtifactError
from dubito.models.manifest import Card, Fitting, Image, Input, Manifest, Precision, Provenance, Regression
from dubito.models.names import LAPLACE
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.model import Model
from dubito.models.terminal import remark
from dubito.training.calibrate import FEWEST
from dubito.training.config import Calibrate, Data, Fit, Laplace, Network, PosteriorOptions, Recipe
from dubito.training.data.data import DataSet, Parts, data_recipe, input_of
from dubito.training.data.sources import read_for
from dubito.training.inputs import as_weights_take, classes_in, describe_input
from dubito.training.laplace import LaplaceError, check_plain, check_size, describe, linearise
from dubito.training.plain import look_first
from dubito.training.recipe import build_network, finish, parts_of, read_whole, set_noise, task_of
from dubito.training.weights import read_weights

MOST_HELD = 0.7  # share of the examples that may be held out where the network is trained already


def from_artifact(
    file: Path,
    data: str,
    out: Path,
    settings: Laplace,
    *,
    pictures: Mapping[str, Any] | None = None,
    calibrate: Calibrate | None = None,
    precision: Precision | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
    force: bool = False,
) -> Model:
    """Subnetwork Laplace for a deterministic artifact. Its own data set is divided as it was in training.

    `pictures` has keys of a recipe's [data], which say how pictures become inputs, for an artifact that does not.
    """
    try:
        model = load(file)
    except ArtifactError as error:
        raise ArtifactError(f"{error} If it holds the weights of a network, name that one: --network NAME.") from None
    check_plain(model.network)
    origin, own = model.card.provenance, data_recipe(model.card)
    if model.card.input is None:
        raise ArtifactError(f"{file} does not say what its inputs look like; save it with a card that does.")
    manifest, declared = model.manifest, model.card.input
    shown = None
    if pictures or (data.startswith("folder:") and declared.image is None):
        shown = _as_declared(data, pictures or {}, declared, file)
        manifest = _taking(manifest, declared, shown.fitting)
    data_set = read_for(manifest, data, data_root, download=download)
    same = own is not None and origin.recipe is not None and data_set.hash() == origin.data_hash
    if not same:
        own, origin = held_out(Data(name=data), data_set, set()), Provenance()
    assert own is not None
    trained_by = (origin.recipe or {}).get("seed", 0)
    divided_by = trained_by if same and isinstance(trained_by, int) else seed
    architecture = model.manifest.architecture
    calibrate = Calibrate() if calibrate is None else calibrate
    if model.manifest.task.kind == "regression":
        calibrate = calibrate.model_copy(update={"temperature": False})
    recipe = Recipe(
        seed=divided_by,
        task=model.manifest.task.kind,
        data=own,
        network=Network(architecture=architecture.name, arguments=architecture.arguments),
        posterior=PosteriorOptions(method=LAPLACE, options=settings.model_dump(mode="json", exclude_defaults=True)),
        fit=_fit_of(origin),
        calibrate=calibrate,
        precision=model.manifest.precision if precision is None else precision,
    )
    parts = parts_of(data_set, recipe)
    if shown is not None:
        declared = input_of(parts.train, shown)
        remark(f"inputs: {describe_input(declared)}")
    return _linearise_and_finish(model.network, recipe, parts, declared, out, settings, device, force)


def held_out(data: Data, examples: DataSet, given: Set[str]) -> Data:
    """With larger parts to choose and to calibrate by than where a network is trained; keys that are given stay."""
    n = len(examples.train) * (1 - data.test if examples.test is None else 1)
    few = (FEWEST + 1) / max(n, 1)
    shares = {"validation": max(0.15, few), "calibration": max(0.25, few)}
    if sum(shares.values()) > MOST_HELD:
        return data
    return data.model_copy(update={key: share for key, share in shares.items() if key not in given})


def _as_declared(data: str, pictures: Mapping[str, Any], declared: Input, file: Path) -> Data:
    """Pictures in the size and with the channels that the artifact declares."""
    if declared.image is not None:
        how = describe_input(declared)
        raise LaplaceError(f"{file} says how pictures become its inputs ({how}): leave out {', '.join(pictures)}.")
    if len(declared.shape) != 3 or declared.shape[0] not in (1, 3):
        raise LaplaceError(f"{file} takes inputs of shape {declared.shape}, which are no pictures.")
    channels, *size = declared.shape
    if (given := list(pictures.get("size", size))) != size:
        came = " × ".join(map(str, given))
        raise LaplaceError(f"--input-size is {came}; {file} takes inputs of {size[0]} × {size[1]}.")
    return Data.model_validate({**pictures, "name": data, "size": size, "channels": channels})


def _taking(manifest: Manifest, declared: Input, fitting: Fitting | None) -> Manifest:
    """Pictures as they are read, before they are normalised."""
    image = Image(mean=(0.0,) * declared.shape[0], std=(1.0,) * declared.shape[0], fitting=fitting)
    card = manifest.card.model_copy(update={"input": declared.model_copy(update={"image": image})})
    return manifest.model_copy(update={"card": card})


def from_weights(
    file: Path,
    network: Network,
    data: Data,
    out: Path,
    settings: Laplace,
    *,
    task: Literal["classification", "regression"] = "classification",
    labels: tuple[str, ...] | None = None,
    calibrate: Calibrate | None = None,
    precision: Precision = "float32",
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
    force: bool = False,
) -> Model:
    """Subnetwork Laplace for a state dict of a network that is named.

    It is not known which examples the network was trained on: the data set is divided by the seed, and its parts are
    held out only if the network was not trained on them. A regression network must predict in the targets' own units;
    the target noise is estimated from its errors on the validation part. `labels` name the network's outputs in order;
    without them the checkpoint may, and else the data's classes are taken in their own order.
    """
    weights, given = read_weights(file).renamed(network.rename), data.model_fields_set
    data = as_weights_take(data, network, weights)
    recipe = Recipe(
        seed=seed,
        task=task,
        data=data,
        network=network.model_copy(update={"weights": str(file)}),
        posterior=PosteriorOptions(method=LAPLACE, options=settings.model_dump(mode="json", exclude_defaults=True)),
        fit=Fit(epochs=1),
        calibrate=Calibrate() if calibrate is None else calibrate,
        precision=precision,
    )
    labels = labels or weights.labels
    outputs = classes_in(weights, network, data) if task == "classification" else None
    data_set = read_whole(recipe, data_root, download, labels)
    recipe = recipe.model_copy(update={"data": held_out(data, data_set, given)})
    parts = parts_of(data_set, recipe)
    if outputs is not None and parts.labels is not None:
        _check_classes(outputs, parts.labels, file, data.name, known=labels is not None)
    declared = input_of(parts.train, data)
    if declared.image is not None:
        remark(f"inputs: {describe_input(declared)}")
    net = build_network(recipe, parts, declared, weights)
    task_ = task_of(parts)
    if isinstance(task_, Regression):
        task_ = Regression(outputs=task_.outputs)
    plain = bayesianize(net, "deterministic", task=task_, unsupported="leave")  # a ViT has free parameters
    set_noise(plain, parts.validation, declared)
    return _linearise_and_finish(plain, recipe, parts, declared, out, settings, device, force)


def _check_classes(outputs: int, labels: tuple[str, ...], file: Path, data: str, *, known: bool) -> None:
    """Refuse another number of names than the head has outputs."""
    if len(labels) != outputs:
        named = f"{len(labels)} are named" if known else f"{data} has {len(labels)}"
        if not known and labels == tuple(map(str, range(len(labels)))) and data.startswith("npz:"):
            raise LaplaceError(
                f"{file} tells {outputs} classes apart, but the labels of {data} run to {len(labels) - 1}; expected 0 "
                f"to {outputs - 1}, the places of the network's outputs. Renumber y: subtract 1 where it begins at 1."
            )
        raise LaplaceError(
            f"{file} tells {outputs} classes apart, but {named} ({', '.join(labels[:3])}, …). Name them as the "
            "network has them, in the order of its outputs, by --labels FILE."
        )
    if not known:
        remark(f"{file.name} does not name its {outputs} classes: those of the data are taken in their own order")


def _linearise_and_finish(
    network: BayesianNetwork,
    recipe: Recipe,
    parts: Parts,
    declared: Input,
    out: Path,
    settings: Laplace,
    device: torch.device | None,
    force: bool,
) -> Model:
    network = network.to(torch.device("cpu") if device is None else device)
    check_size(network.net, settings)
    look_first(network.net, parts, declared, network.task, force=force)
    check_savable(network, Card(input=declared, labels=parts.labels, targets=parts.targets))
    fitted = linearise(network, parts.train, parts.validation, declared, settings, recipe.seed)
    remark(describe(fitted))
    return finish(fitted.network, recipe, parts, declared, out, plain=network)


def _fit_of(origin: Provenance) -> Fit:
    """Options with which the network was trained, if its recipe is known."""
    fit = (origin.recipe or {}).get("fit")
    return Fit.model_validate(fit) if isinstance(fit, dict) else Fit(epochs=1)
