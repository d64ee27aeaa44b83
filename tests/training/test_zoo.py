"""Packing a model for the zoo: it is measured as it is stored, and its card says what was measured."""

import json
import math
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dubito.models import load, save, zoo, zoo_files
from dubito.models.embedded import embedded
from dubito.models.errors import DubitoError
from dubito.models.manifest import Precision
from dubito.models.predictions.uncertainty import Classified, Regressed
from dubito.training.data.data import Examples, part_of
from dubito.training.data.sources import read_for
from dubito.training.evaluation.evaluate import measure
from dubito.training.evaluation.predicting import predict_grid
from dubito.training.zoo import Where, compare, kept, make, pack, reliability, remeasure, reword, risk, steps_of
from tests.small_models import bayesian_mlp

REPO = Path(__file__).parents[2]
REAL = REPO.parent / "shared" / "data"


def classified(p: Tensor) -> Classified:
    none = torch.zeros(len(p))
    return Classified(probabilities=p, entropy=none, expected_entropy=none, mutual_information=none)


def test_curves_of_a_classifier_are_those_counted_by_hand() -> None:
    """An oracle that sorts and counts in Python."""
    rng = torch.Generator().manual_seed(0)
    p = torch.rand(400, 3, generator=rng).double().softmax(-1)
    y = torch.randint(3, (400,), generator=rng)
    rows = sorted(zip(p.max(-1).values.tolist(), (p.argmax(-1) == y).tolist(), strict=True), reverse=True)
    for share, error in risk(classified(p), y):
        best = rows[: round(share * 400)]
        assert error == pytest.approx(sum(not right for _, right in best) / len(best), abs=1e-4)
    for confidence, accuracy, share in reliability(classified(p), y):
        bin_ = math.ceil(confidence * 15)
        mine = [(c, right) for c, right in rows if math.ceil(c * 15) == bin_]
        assert share == pytest.approx(len(mine) / 400, rel=1e-3)
        assert accuracy == pytest.approx(sum(right for _, right in mine) / len(mine), abs=1e-4)


def test_curves_of_a_regression_with_the_right_noise_lie_on_the_diagonal() -> None:
    """Targets drawn from the predicted Gaussians: each level is covered as often as it says, within 4 standard errors,
    and the error grows with the predicted deviation."""
    rng, n = torch.Generator().manual_seed(1), 4000
    deviation = torch.rand(n, 1, generator=rng) + 0.5
    mean = torch.randn(n, 1, generator=rng)
    y = mean + deviation * torch.randn(n, 1, generator=rng)
    summary = Regressed(mean=mean, epistemic_variance=deviation**2 / 4, aleatoric_variance=3 * deviation**2 / 4)
    for level, covered, _ in reliability(summary, y):
        assert abs(covered - level) < 4 * math.sqrt(level * (1 - level) / n)
    shares, errors = zip(*risk(summary, y), strict=True)
    assert shares[-1] == 1
    assert errors[-1] == pytest.approx(float((y - mean).square().mean().sqrt()), rel=1e-3)
    assert errors[4] < 0.8 * errors[-1]


def save_small(path: Path, *, precision: Precision = "float32", **card: Any) -> None:
    """A small network with the card of the digits, less its place in the zoo: what is packed is measured anew."""
    network = bayesian_mlp((64, 16, 10), "ffg-u", inducing=8)
    save(
        network, path, precision=precision, card=load(embedded("digits")).card.model_copy(update={"zoo": None, **card})
    )


def test_what_is_packed_is_measured_as_it_is_stored(tmp_path: Path, few_here: None) -> None:
    """A file in int8, which the zoo stores in its own precision: new thresholds, new figures, and the plain network
    beside them."""
    origin = load(embedded("digits"))
    rough, out = tmp_path / "rough.safetensors", tmp_path / "packed.safetensors"
    save_small(rough, precision="int8")
    model = pack("digits", rough, out, Where(), minutes=1.5, made_on="CPU")
    assert model.manifest.precision == steps_of("digits").precision != "int8"
    test = part_of(read_for(model.manifest, "digits", None), model.card)[1]
    seed = model.card.provenance.seed or 0
    before, after = measure(load(rough), test, seed=seed), measure(load(out), test, seed=seed)
    told = model.card.zoo
    assert told is not None
    assert set(told.rounding) == {"accuracy", "nll", "ece", "coverage", "ood_rate"}
    for key, value in told.rounding.items():
        assert value == pytest.approx(after[key] - before[key], abs=1e-9)
        assert model.card.metrics[key] == pytest.approx(after[key], abs=1e-9)
    plain = model.card.plain
    assert plain is not None
    assert origin.card.plain is not None
    assert plain.tempered == origin.card.plain.tempered
    assert plain.differences["nll"].value == pytest.approx(after["nll"] - plain.tempered["nll"], abs=1e-9)
    assert (told.minutes, told.made_on) == (1.5, "CPU")
    again = reword("digits", out, tmp_path / "again.safetensors").card  # new words, the same figures
    assert (again.zoo, again.metrics) == (told, model.card.metrics)
    with pytest.raises(DubitoError, match="is not packed in float32; expected a file of the zoo, or --minutes"):
        reword("digits", rough, tmp_path / "again.safetensors")


def test_a_plain_network_that_was_trained_by_itself_stands_beside(tmp_path: Path, few_here: None) -> None:
    """A posterior that started from no plain network, when it is packed and later; the oracle measures that network."""
    bare, plain, out = (tmp_path / f"{name}.safetensors" for name in ("bare", "plain", "packed"))
    save_small(bare, plain=None)
    save(bayesian_mlp((64, 16, 10), "deterministic"), plain, card=load(bare).card)
    pack("digits", bare, tmp_path / "alone.safetensors", Where(), minutes=1, made_on="CPU")
    packed = pack("digits", bare, out, Where(), minutes=1, made_on="CPU", plain=plain).card
    later = compare("digits", tmp_path / "alone.safetensors", plain, tmp_path / "later.safetensors", Where()).card
    test = part_of(read_for(load(bare).manifest, "digits", None), packed)[1]
    expected = measure(load(plain), test, seed=packed.provenance.seed or 0)
    for card in (packed, later):
        assert card.plain is not None
        assert card.plain.metrics["nll"] == pytest.approx(expected["nll"], abs=1e-6)
        assert card.plain.tempered["nll"] <= expected["nll"] + 0.01  # its temperature is fitted on other examples
        assert set(card.plain.differences) == {"accuracy", "nll", "ece", "brier", "auroc"}
    assert "auroc" in later.metrics
    with pytest.raises(DubitoError, match="is not packed in float32; expected a file of the zoo, or --minutes"):
        compare("digits", bare, plain, tmp_path / "unwritten.safetensors", Where())
    assert not (tmp_path / "unwritten.safetensors").exists()


def test_a_packed_model_is_measured_again_as_it_is_stored(tmp_path: Path, few_here: None) -> None:
    """Its card says of 20 test inputs what rounding changed, and has the figures from before; then it has those of the
    file, and the difference."""
    rough, packed, out = (tmp_path / f"{name}.safetensors" for name in ("rough", "packed", "again"))
    save_small(rough, precision="int8", metrics={"accuracy": 0.5, "nll": 3.0})
    pack("digits", rough, packed, Where(), minutes=1, made_on="CPU", examples=20)
    assert load(packed).card.metrics["nll"] == 3.0
    again = remeasure("digits", packed, out, Where())
    test = part_of(read_for(again.manifest, "digits", None), again.card)[1]
    expected = measure(load(packed), test, seed=again.card.provenance.seed or 0)
    for key, value in expected.items():
        assert again.card.metrics[key] == pytest.approx(value, abs=1e-9)
    assert again.card.zoo is not None
    assert again.card.zoo.examples is None
    assert again.card.zoo.rounding == {
        key: pytest.approx(expected[key] - was) for key, was in (("accuracy", 0.5), ("nll", 3.0))
    }
    share, error = again.card.zoo.risk[-1]
    assert share == 1
    assert error == pytest.approx(1 - expected["accuracy"], abs=1e-4)
    assert again.card.calibration == load(packed).card.calibration


def test_the_plain_network_of_a_model_is_one_more_command() -> None:
    whvi = steps_of("fashion-whvi")
    *before, last = whvi.commands()
    assert len(before) == 1
    assert last.startswith(before[0].partition(" --data-root")[0])
    assert "--set posterior.method=deterministic" in last
    assert last.endswith("--out plain.safetensors")


def test_the_plain_column_comes_from_the_model_that_it_was_made_of(tmp_path: Path, few_here: None) -> None:
    origin, bare = load(embedded("digits")), tmp_path / "bare.safetensors"
    save_small(bare, plain=None)
    packed = pack(
        "digits", bare, tmp_path / "a.safetensors", Where(), minutes=1, made_on="CPU", beside=embedded("digits")
    )
    assert packed.card.plain is not None
    assert origin.card.plain is not None
    assert packed.card.plain.metrics == origin.card.plain.metrics
    assert packed.card.plain.differences == {}  # they were not measured
    provenance, other = origin.card.provenance.model_copy(update={"seed": 5}), tmp_path / "other.safetensors"
    save_small(other, provenance=provenance)
    with pytest.raises(DubitoError, match="other data or other parts"):
        pack("digits", bare, tmp_path / "b.safetensors", Where(), minutes=1, made_on="CPU", beside=other)


def test_every_model_has_steps_that_can_be_followed() -> None:
    """Recipes are read, options of pruning and distilling are those of the commands, data are known."""
    from dubito.training.config import read_recipe
    from dubito.training.zoo import about

    for name, steps in kept().models.items():
        recipe = read_recipe(steps.recipe, [*steps.set])
        if steps.plain is not None:
            assert read_recipe(steps.recipe, [*steps.set, *steps.plain]).posterior.method == "deterministic"
        assert about(recipe.data.name).licence, name
        assert set(steps.prune or {}) <= {"keep", "epochs", "lr"}
        assert set(steps.compact or {}) <= {"members", "inducing", "steps", "lr"}
        assert steps.limits, name
        assert steps.not_for, name
    with pytest.raises(DubitoError, match="nobody is not in the zoo; there are: clothes, digits"):
        steps_of("nobody")


# the pages


def run_script(script: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def test_the_pages_are_those_of_the_artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo_files, "entry_of", cache(zoo_files.entry_of))  # each artifact is read once
    assert run_script(REPO / "docs" / "zoo.py", monkeypatch, "--check") == 0
    shutil.copy(REPO / "docs" / "zoo.py", tmp_path)
    shutil.copy(REPO / "docs" / "zoo.md", tmp_path)
    shutil.copytree(REPO / "docs" / "zoo", tmp_path / "zoo")
    page = tmp_path / "zoo" / "digits.md"
    page.write_text(page.read_text().replace("| licence of the data | CC BY 4.0 |", "| licence of the data | MIT |"))
    assert run_script(tmp_path / "zoo.py", monkeypatch, "--check") == "digits.md: behind the artifacts: make zoo"


# the figures, from the stored files


def held_out(name: str, root: Path, n: int) -> Examples:
    """Some examples of the model's own test part, the same each time."""
    model = load(f"zoo:{name}")
    data = read_for(model.manifest, zoo.named(name).data, root)
    test = part_of(data, model.card)[1]
    assert data.hash() == model.card.provenance.data_hash
    return test[torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:n]]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published files, made from the sheets."""
    script = REAL / "restore_cifar10.py"
    if not script.exists():
        pytest.skip(f"NO {script}: the zoo's CIFAR-10 models are not measured on real data here.")
    folder = tmp_path_factory.mktemp("cifar")
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clothes", "mnist", "cifar10-half"])
def test_a_stored_file_is_as_good_as_its_card_says(name: str, request: pytest.FixtureRequest) -> None:
    """1,000 test images with draws of this device: accuracy and NLL are within 4 standard errors of a sample of that
    size. The card's come from all 10,000."""
    if name not in {one.name for one in zoo.listed()}:
        pytest.fail(f"{name} is not in the zoo")
    data = zoo.named(name).data
    folder = {"fashion-mnist": "FashionMNIST", "mnist": "MNIST"}.get(data)
    if folder is not None and not (REAL / folder).is_dir():
        pytest.skip(f"NO {REAL / folder}: zoo:{name} is not measured on real data here.")
    some = held_out(name, REAL if folder is not None else request.getfixturevalue("cifar"), 1000)
    model = load(f"zoo:{name}")
    told = model.card.metrics
    summary = predict_grid(model, some.x, [20], model.card.provenance.seed or 0)[20]
    assert isinstance(summary, Classified)
    p = summary.probabilities.double()
    losses = -p.gather(1, some.y[:, None]).clamp(min=1e-30).log()[:, 0]
    right = float((p.argmax(-1) == some.y).double().mean())
    n = len(some)
    assert abs(right - told["accuracy"]) < 4 * math.sqrt(told["accuracy"] * (1 - told["accuracy"]) / n)
    assert abs(float(losses.mean()) - told["nll"]) < 4 * float(losses.std()) / math.sqrt(n)


@pytest.mark.slow
def test_the_concrete_is_as_good_as_its_card_says_to_the_last_digit() -> None:
    """Its whole test part, on the kind of device that the card names."""
    if not (REAL / "UCI").is_dir():
        pytest.skip(f"NO {REAL / 'UCI'}: zoo:concrete is not measured on real data here.")
    model = load("zoo:concrete")
    assert model.card.zoo is not None
    assert model.card.zoo.measured_on == "CPU"
    test = held_out("concrete", REAL, 1 << 20)
    order = part_of(read_for(model.manifest, "uci/concrete", REAL), model.card)[1]
    assert len(test) == len(order) == 103
    found = measure(model, order, seed=model.card.provenance.seed or 0)
    for key in ("rmse", "nll", "coverage"):
        assert f"{found[key]:.4g}" == f"{model.card.metrics[key]:.4g}", key


@pytest.mark.slow
def test_digits_are_made_again(tmp_path: Path) -> None:
    """Another kind of CPU rounds otherwise, and 30 epochs carry that far: as good, not the same."""
    model = make("digits", tmp_path / "digits.safetensors", Where())
    assert model is not None
    assert not [*tmp_path.glob("*.trained.safetensors")]
    told = load("zoo:digits").card.metrics
    assert abs(model.card.metrics["accuracy"] - told["accuracy"]) < 0.02
    assert model.card.zoo is not None
    assert json.loads(model.card.model_dump_json())["zoo"]["made_on"] == "CPU"
