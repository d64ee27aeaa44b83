"""Options of the posterior chosen by short trials on the validation part; a stopped run goes on with the next."""

import json
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch

from dubito.models.errors import ConversionError
from dubito.training.config import Recipe, RecipeError, read_recipe
from dubito.training.recipe import Phases, TrainedModel, read_parts, train
from dubito.training.temperature import nll_with_temperature

pytestmark = pytest.mark.usefixtures("few_requests")
Run = tuple[TrainedModel, str, list[float], Path]  # what was trained, said, found by its trials, and where it lies
TRIALS = "tune={trials=[{sigma_max=0.9, spread=0.8}, {sigma_max=0.2, spread=0.1}], epochs=2}"
SMALL = [
    "network={architecture='mlp', arguments={hidden=[16]}}",
    "posterior.options={inducing=8}",
    "fit={epochs=2, pretrain_epochs=1, batch=128, lr=0.01, likelihood_epochs=1}",
    "data.test=0.6",
]


def recipe(*changes: str) -> Recipe:
    return read_recipe("digits", [*SMALL, *changes])


def said_of(*changes: str, out: Path) -> tuple[TrainedModel, str, list[float]]:
    """The run, what it said, and the NLL of its trials."""
    with redirect_stderr(StringIO()) as said:
        trained = train(recipe(TRIALS, *changes), out)
    assert trained is not None
    lines = said.getvalue().replace("\n", " ")
    return trained, lines, [float(n) for n in re.findall(r"validation NLL ([\d.]+)", lines)]


@pytest.fixture(scope="module")
def untempered(few_requests: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("untempered")
    return *said_of("calibrate.temperature=false", out=folder / "m.safetensors"), folder


def test_the_trial_with_the_lowest_validation_nll_is_chosen(
    untempered: Run,
) -> None:
    """Each trial is the run that the recipe would be with its options and epochs."""
    trained, _, said, folder = untempered
    assert len(said) == 2
    told = trained.model.card.provenance.recipe
    assert told is not None
    options = {"sigma_max": 0.9, "spread": 0.8} if said[0] < said[1] else {"sigma_max": 0.2, "spread": 0.1}
    assert told["posterior"]["options"] == {"inducing": 8, **options}  # type: ignore[index,call-overload]
    assert [f.name for f in folder.glob("*.json")] == []
    assert list(folder.glob("*.checkpoint.safetensors")) == []


def test_a_trial_is_judged_with_the_temperature_that_the_model_will_have(untempered: Run, tmp_path: Path) -> None:
    """Trials of a recipe with a temperature have no higher NLL than the same trials without one."""
    _, lines, tempered = said_of("calibrate.temperature=true", out=tmp_path / "m.safetensors")
    assert "with a temperature" in lines
    assert "with a temperature" not in untempered[1]
    for with_it, without in zip(tempered, untempered[2], strict=True):
        assert with_it < without  # two epochs leave T far from 1


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_nll_with_a_temperature_is_the_least_over_all_temperatures(scale: float) -> None:
    """Against a grid, in numpy, and a fine one around its best; the prior of T hardly matters for 4,000 examples."""
    rng = np.random.default_rng(7)
    y = rng.integers(0, 3, 4000)
    logits = rng.standard_normal((5, 4000, 3)) + 1.5 * np.eye(3)[y]
    logits *= scale

    def at(T: float) -> float:
        p = np.exp(logits / T)
        p /= p.sum(-1, keepdims=True)
        return float(-np.log(p.mean(0)[np.arange(4000), y]).mean())

    pieces = [(torch.tensor(logits[:, part]), torch.tensor(y[part])) for part in (slice(0, 1500), slice(1500, 4000))]
    best = min(np.geomspace(0.1, 10, 40), key=at)
    around = (best * np.geomspace(0.8, 1.25, 40)).clip(0.1, 10)
    assert nll_with_temperature(pieces) == pytest.approx(min(map(at, around)), abs=1e-4)


def test_trials_that_were_made_are_not_made_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chosen = recipe(TRIALS)
    parts = read_parts(chosen, None)
    out = tmp_path / "m.safetensors"
    key = {"recipe": chosen.model_dump(mode="json"), "origin": parts.hash, "tempered": False, "nll": [0.5]}
    file = Phases(chosen, parts, None, out, torch.device("cpu")).trials  # type: ignore[arg-type]
    file.write_text(json.dumps(key))
    train(chosen, out)
    assert re.findall(r"trial (\d) of 2,", capfd.readouterr().err) == ["2"]
    file.write_text(json.dumps(key | {"origin": "other data"}))
    train(chosen, out)
    assert re.findall(r"trial (\d) of 2,", capfd.readouterr().err) == ["1", "2"]


def test_a_trial_is_as_short_as_asked_in_all_its_phases() -> None:
    whole = read_recipe("cifar10", ["fit.epochs=40", "fit.likelihood_epochs=4", "fit.warmup_epochs=20", TRIALS])
    fit = whole.model_copy(update={"tune": whole.tune and whole.tune.model_copy(update={"epochs": 10})}).trial({}).fit
    assert (fit.epochs, fit.likelihood_epochs, fit.warmup_epochs) == (10, 1, 5)


@pytest.mark.parametrize(
    ("change", "said"),
    [("tune={trials=[], epochs=2}", "trials is empty"), ("tune={trials=[{}]}", "tune.epochs is missing")],
)
def test_what_cannot_be_tuned_is_refused(change: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe(change)


def test_trials_that_cannot_be_made_are_refused_by_name(tmp_path: Path) -> None:
    chosen = recipe("tune={trials=[{sigma_max=-1}], epochs=1}")
    with pytest.raises(ConversionError, match="sigma_max is -1"):
        train(chosen, tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []  # before the plain network was trained
