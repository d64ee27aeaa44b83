"""Subnetwork Laplace for a network that is already trained: a deterministic artifact, or a state dict."""

from pathlib import Path

import torch
from pydantic import JsonValue

from dubito.models import bayesianize
from dubito.models.artifact.artifact import load
from dubito.models.errors import ArtifactError
from dubito.models.manifest import Image, Input, Precision, Provenance, Regression
from dubito.models.names import LAPLACE
from dubito.models.network.network import BayesianNetwork
from dubito.models.predictions.model import Model
from dubito.training.config import Calibrate, Data, Fit, Laplace, Network, PosteriorOptions, Recipe
from dubito.training.data.data import Parts, data_recipe, divide, input_of
from dubito.training.data.sources import read_for
from dubito.training.laplace import LaplaceError, check_plain, describe, linearise
from dubito.training.recipe import build_network, finish, read_parts, set_noise, task_of
from dubito.training.terminal import remark


def from_artifact(
    file: Path,
    data: str,
    out: Path,
    settings: Laplace,
    *,
    calibrate: Calibrate | None = None,
    precision: Precision | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
) -> Model:
    """Subnetwork Laplace for a deterministic artifact. Its own data set is divided as it was in training."""
    model = load(file)
    check_plain(model.network)
    origin, own = model.card.provenance, data_recipe(model.card)
    data_set = read_for(model.manifest, data, data_root, download=download)
    same = own is not None and origin.recipe is not None and data_set.hash() == origin.data_hash
    if not same:
        own, origin = Data(name=data), Provenance()
    assert own is not None
    trained_by = (origin.recipe or {}).get("seed", 0)
    divided_by = trained_by if same and isinstance(trained_by, int) else seed
    parts = divide(data_set, own.validation, own.calibration, own.test, divided_by)
    architecture = model.manifest.architecture
    recipe = Recipe(
        seed=divided_by,
        task=model.manifest.task.kind,
        data=own,
        network=Network(architecture=architecture.name, arguments=architecture.arguments),
        posterior=PosteriorOptions(method=LAPLACE, options=settings.model_dump(mode="json", exclude_defaults=True)),
        fit=_fit_of(origin),
        calibrate=Calibrate() if calibrate is None else calibrate,
        precision=model.manifest.precision if precision is None else precision,
    )
    if model.card.input is None:
        raise ArtifactError(f"{file} does not say what its inputs look like; save it with a card that does.")
    return _linearise_and_finish(model.network, recipe, parts, model.card.input, out, settings, device)


def from_weights(
    file: Path,
    architecture: str,
    data: str,
    out: Path,
    settings: Laplace,
    *,
    task: str = "classification",
    target: str | None = None,
    image: Image | None = None,
    arguments: dict[str, JsonValue] | None = None,
    calibrate: Calibrate | None = None,
    precision: Precision = "float32",
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
    device: torch.device | None = None,
) -> Model:
    """Subnetwork Laplace for a state dict in safetensors, of a named architecture.

    It is not known which examples the network was trained on: the data set is divided by the seed, and its parts are
    held out only if the network was not trained on them. A regression network must predict in the targets' own units;
    the target noise is estimated from its errors on the validation part.
    """
    recipe = Recipe(
        seed=seed,
        task="regression" if task == "regression" else "classification",
        data=Data(name=data, target=target),
        network=Network(architecture=architecture, arguments=arguments or {}, weights=str(file)),
        posterior=PosteriorOptions(method=LAPLACE, options=settings.model_dump(mode="json", exclude_defaults=True)),
        fit=Fit(epochs=1),
        calibrate=Calibrate() if calibrate is None else calibrate,
        precision=precision,
    )
    parts = read_parts(recipe, data_root, download)
    declared = input_of(parts.train)
    if image is not None:
        if declared.image is None:
            raise LaplaceError("a mean and a standard deviation of pixels came, but the data holds no pictures.")
        declared = Input(shape=declared.shape, image=image)
    net = build_network(recipe, parts, declared)
    task_ = task_of(parts)
    if isinstance(task_, Regression):
        task_ = Regression(outputs=task_.outputs)
    network = bayesianize(net, "deterministic", task=task_)
    set_noise(network, parts.validation, declared)
    return _linearise_and_finish(network, recipe, parts, declared, out, settings, device)


def _linearise_and_finish(
    network: BayesianNetwork,
    recipe: Recipe,
    parts: Parts,
    declared: Input,
    out: Path,
    settings: Laplace,
    device: torch.device | None,
) -> Model:
    network = network.to(torch.device("cpu") if device is None else device)
    fitted = linearise(network, parts.train, parts.validation, declared, settings, recipe.seed)
    remark(describe(fitted))
    return finish(fitted.network, recipe, parts, declared, out, plain=network)


def _fit_of(origin: Provenance) -> Fit:
    """Options with which the network was trained, if its recipe is known."""
    fit = (origin.recipe or {}).get("fit")
    return Fit.model_validate(fit) if isinstance(fit, dict) else Fit(epochs=1)
