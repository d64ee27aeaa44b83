"""Network, size and epochs follow from data and machine, unless they are given; a resumed run keeps them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from safetensors.torch import save_file

from dubito.models import build, load, terminal
from dubito.models.terminal import bar, duration
from dubito.training.choice import LADDER, Facts, Machine, Request, choose, look, multiply_adds, plan, seconds, timed
from dubito.training.config import Recipe, RecipeError, read_recipe
from tests.files import files_in
from tests.training.test_train import run

pytestmark = pytest.mark.usefixtures("few_requests")
CPU, GPU = Machine("cpu", 2), Machine("cuda")
PICTURES = Facts(1000, 0, (3, 64, 64), 10, pictures=True, resized=True)
FOLDER = Request("folder:x")
TINY = "--set=network.arguments={width=4, hidden=8}"
CPU_DEVICE = torch.device("cpu")


def chosen(request: Request, facts: Facts, machine: Machine = CPU) -> Recipe:
    return request.recipe(choose(request, facts, machine))


def cost(recipe: Recipe, facts: Facts, machine: Machine = CPU) -> float:
    return seconds(recipe, facts, machine) * machine.rounded


def write_pictures(folder: Path, n: int, side: int = 16) -> str:
    """Three classes that differ in brightness."""
    rng = np.random.default_rng(0)
    for i in range(n):
        home = folder / "abc"[i % 3]
        home.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 60, (side, side + 4, 3)) + 90 * (i % 3)
        Pillow.fromarray(pixels.astype(np.uint8)).save(home / f"{i}.png")
    return f"folder:{folder}"


# the choice


def test_a_choice_fits_the_time_and_trains_enough() -> None:
    recipe = chosen(FOLDER, PICTURES)
    assert cost(recipe, PICTURES) <= 600
    assert recipe.network.architecture == "cnn"
    assert recipe.fit.pretrain_epochs * 600 / recipe.fit.batch >= 400  # steps of the plain network
    assert recipe.pretraining.optimiser == "adam"
    assert recipe.tune is not None
    assert cost(chosen(replace(FOLDER, quick=True), PICTURES), PICTURES) <= 60


@pytest.mark.parametrize(("slowness", "quick"), [(4.0, True), (64.0, False)])
def test_a_slow_machine_still_trains_more_than_nothing(slowness: float, quick: bool) -> None:
    """After 114 steps, as many as fitted the time once, a small CNN named SVHN's digits as often as chance does."""
    request, machine = replace(FOLDER, quick=quick), Machine("cpu", 2, slowness)
    recipe, few = (chosen(request, replace(PICTURES, examples=n), machine) for n in (1000, 30))
    assert recipe.fit.pretrain_epochs * 600 / recipe.fit.batch >= 400
    assert few.fit.pretrain_epochs == 240  # each of one step


def test_a_faster_machine_gets_more_work_and_fewer_pictures_a_larger_network() -> None:
    ranks = {rung.architecture + str(rung.arguments.get("width")): i for i, rung in enumerate(LADDER)}

    def rank(recipe: Recipe) -> int:
        return ranks[recipe.network.architecture + str(recipe.network.arguments.get("width"))]

    by_machine = [chosen(FOLDER, PICTURES, m) for m in (Machine("cpu", 2, 16.0), CPU, Machine("cpu", 64), GPU)]
    assert [rank(r) for r in by_machine] == sorted(rank(r) for r in by_machine)
    assert rank(by_machine[-1]) > rank(by_machine[0])
    by_number = [chosen(FOLDER, replace(PICTURES, examples=n)) for n in (250, 2000, 20_000, 200_000)]
    assert [rank(r) for r in by_number] == sorted((rank(r) for r in by_number), reverse=True)


def test_noise_in_the_measured_speed_changes_nothing() -> None:
    same = {tuple(choose(FOLDER, PICTURES, replace(CPU, slowness=s))) for s in (0.51, 0.8, 1.0, 1.3, 1.99)}
    assert len(same) == 1
    assert tuple(choose(FOLDER, PICTURES, replace(CPU, slowness=4.0))) not in same


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        (("fit.epochs=7",), "fit.epochs", 7),
        (("fit.batch=10",), "fit.batch", 10),
        (("data.size=[24, 40]",), "data.size", (24, 40)),
        (("network.architecture=resnet18-cifar", "network.arguments={}"), "network.architecture", "resnet18-cifar"),
        (("network.arguments={width=5}",), "network.arguments", {"width": 5}),
        (("data.augment=[]",), "data.augment", ()),
        (("tune={trials=[{spread=0.1}], epochs=1}",), "tune.epochs", 1),
    ],
)
def test_what_is_given_wins(changes: tuple[str, ...], key: str, value: object) -> None:
    request = replace(FOLDER, changes=changes)
    facts = replace(PICTURES, shape=(3, 24, 40), resized=False) if "size" in key else PICTURES
    found: object = chosen(request, facts)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_trials_are_left_out_for_another_method() -> None:
    changes = ("posterior.method=ensemble-w", "posterior.options={members=3}")
    assert chosen(replace(FOLDER, changes=changes), PICTURES).tune is None
    assert chosen(replace(FOLDER, quick=True), PICTURES).tune is None


def test_a_network_with_weights_is_not_trained_first() -> None:
    changes = ("network={architecture='torchvision/resnet18', weights='w.safetensors'}",)
    recipe = chosen(replace(FOLDER, changes=changes), replace(PICTURES, shape=(3, 224, 224), resized=False))
    assert recipe.network.architecture == "torchvision/resnet18"
    assert (recipe.fit.pretrain_epochs, recipe.data.size) == (0, None)  # size and crop are torchvision's own


def test_weights_need_the_name_of_their_network(tmp_path: Path) -> None:
    source, out = write_pictures(tmp_path / "data", 9), tmp_path / "m.safetensors"
    with pytest.raises(RecipeError, match="weights came without their network"):
        plan(Request(source, ("network.weights=w.safetensors",)), out, CPU_DEVICE)


def test_weights_of_a_grey_network_get_grey_pictures(tmp_path: Path) -> None:
    source, file = write_pictures(tmp_path / "data", 30), tmp_path / "w.safetensors"
    save_file(build("cnn", classes=3, channels=1, size=[8, 12], width=4, hidden=8).state_dict(), file)
    network = f"network={{architecture='cnn', arguments={{size=[8, 12], width=4, hidden=8}}, weights='{file}'}}"
    assert plan(Request(source, (network,)), tmp_path / "m.safetensors", CPU_DEVICE).recipe.data.channels == 1
    given = plan(Request(source, (network, "data.channels=1")), tmp_path / "m.safetensors", CPU_DEVICE)
    assert given.recipe.data.channels == 1


def test_a_network_that_takes_no_such_pictures_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    source = write_pictures(tmp_path / "data", 30)
    changes = ("network.architecture=torchvision/vit_b_16", "network.arguments={}")
    with pytest.raises(RecipeError, match=r"vit_b_16 cannot take inputs of shape \(3, 16, 20\): .* --input-size and"):
        plan(Request(source, changes), tmp_path / "m.safetensors", CPU_DEVICE)


def test_grey_arrays_get_a_network_that_takes_them() -> None:
    facts = Facts(500, 0, (1, 28, 28), 10, pictures=True)
    recipe = chosen(Request("npz:x", like="folder"), facts, GPU)
    assert (recipe.network.architecture, recipe.data.size) == ("cnn", None)
    assert [list(entry) for entry in recipe.data.augment] == [["RandomCrop"]]  # whose flip would be another picture


def test_a_small_table_is_trained_as_the_recipe_says_and_a_large_one_for_fewer_epochs() -> None:
    request = Request("csv:x")
    rows = Facts(1000, 0, (8,), 1)
    assert chosen(request, rows).fit == request.recipe().fit
    larger = chosen(request, replace(rows, examples=200_000))
    assert larger.fit.epochs < request.recipe().fit.epochs


def test_multiply_adds() -> None:
    """Of a cnn by hand: (channels in × 9 × channels out) at each pixel, then the linear layers."""
    convolutions = 16 * 16 * 9 * (3 * 4 + 4 * 4) + 8 * 8 * 9 * (4 * 8 + 8 * 8)
    expected = convolutions + 8 * 2 * 2 * 6 + 6 * 10
    assert multiply_adds("cnn", json.dumps({"width": 4, "hidden": 6}), ((3, 16, 16), 10)) == expected


def test_a_machine_is_timed_without_a_trace() -> None:
    threads = torch.get_num_threads()
    machine = timed(CPU_DEVICE)
    assert machine.slowness > 0
    assert (machine.kind, machine.cores, torch.get_num_threads()) == ("cpu", threads, threads)


# the data


def test_a_folder_is_counted_without_reading_its_pictures(tmp_path: Path) -> None:
    source = write_pictures(tmp_path / "train", 9)
    assert look(Request(source), None, False) == Facts(9, 0, (3, 16, 20), 3, pictures=True, resized=True)
    write_pictures(tmp_path / "test", 6)
    assert look(Request(f"folder:{tmp_path}"), None, False).tested == 6
    given = Request(source, ("data.size=[8, 8]",))
    assert look(given, None, False) == Facts(9, 0, (3, 8, 8), 3, pictures=True)


def test_arrays_of_pictures_and_of_numbers(tmp_path: Path) -> None:
    y = np.arange(30) % 3
    np.savez(tmp_path / "p.npz", x=np.zeros((30, 12, 9), np.uint8), y=y)
    np.savez(tmp_path / "v.npz", x=np.zeros((30, 5)), y=y, x_test=np.zeros((4, 5)), y_test=y[:4])
    assert look(Request(f"npz:{tmp_path}/p.npz"), None, False) == Facts(30, 0, (1, 12, 9), 3, pictures=True)
    assert look(Request(f"npz:{tmp_path}/v.npz"), None, False) == Facts(30, 4, (5,), 3)


# the plan


def test_a_resumed_run_keeps_its_choice(tmp_path: Path) -> None:
    request, out = Request(write_pictures(tmp_path / "data", 30)), tmp_path / "m.safetensors"
    first = plan(request, out, CPU_DEVICE)
    assert re.match(r"30 pictures of 16 × 20, CPU with \d+ cores?: cnn of width \d+ at 16 × 20, ", first.said)
    assert "A GPU would" in first.said
    assert "\n" not in first.said
    assert not first.file.exists()
    with first.kept():
        content = json.loads(first.file.read_text())
        (tmp_path / "m.plain.checkpoint.safetensors").touch()
    content["chosen"].append("fit.batch=17")  # as on a faster machine
    first.file.write_text(json.dumps(content))
    assert plan(request, out, CPU_DEVICE).recipe.fit.batch == 17
    assert plan(request, out, CPU_DEVICE, fresh=True).recipe == first.recipe
    assert plan(replace(request, quick=True), out, CPU_DEVICE).recipe.fit.batch != 17
    write_pictures(tmp_path / "data", 33)
    assert plan(request, out, CPU_DEVICE).recipe.fit.batch != 17
    (tmp_path / "m.plain.checkpoint.safetensors").unlink()
    with first.kept():
        assert first.file.exists()
    assert not first.file.exists()


def test_other_recipes_are_followed_as_they_are(tmp_path: Path) -> None:
    found = plan(Request("digits", ("seed=3",)), tmp_path / "m.safetensors", CPU_DEVICE)
    assert (found.recipe, found.said) == (read_recipe("digits", ["seed=3"]), "")
    with found.kept():
        pass
    assert files_in(tmp_path) == set()
    with pytest.raises(RecipeError, match="--quick belongs to folder:PATH"):
        plan(Request("digits", quick=True), tmp_path / "m.safetensors", CPU_DEVICE)


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tmp_path: Path) -> None:
    source, out = write_pictures(tmp_path / "data", 300), tmp_path / "m.safetensors"
    answer = run("train", source, "--dry-run", "--out", out, TINY, "--set=fit.epochs=6", "--set=fit.pretrain_epochs=5")
    assert answer.exit_code == 0, answer.exception
    said = answer.stdout.splitlines()
    starts = [
        "data: folder:",
        "network: cnn (width ",
        "posterior: ffg-u (inducing ",
        "device: ",
        "plain network: 5 epochs",
    ]
    starts += [
        "3 trials: 2 epochs each",
        "posterior: 6 epochs",
        "calibration and measurement: about ",
        "in all: about ",
    ]
    assert len(said) == len(starts)
    assert all(line.startswith(start) for line, start in zip(said, starts, strict=True)), said
    assert "180 train, 24 validation, 36 calibration, 60 test" in said[0]
    assert files_in(tmp_path) == {"data"}


def test_quick_ends_with_a_model_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "BETWEEN", 0.0)
    source, out = write_pictures(tmp_path / "data", 300, side=8), tmp_path / "m.safetensors"
    short = ["--set=fit.pretrain_epochs=12", "--set=fit.epochs=3", "--set=fit.lr=0.01"]
    answer = run("train", source, "--quick", "--out", out, TINY, *short)
    assert answer.exit_code == 0, answer.exception
    assert files_in(tmp_path) == {"data", "m.safetensors", "m.log.csv", "m.plain.log.csv"}
    model = load(out)
    assert model.card.metrics["accuracy"] > 0.8  # a third by chance; six seeds gave 1
    assert model.card.provenance.recipe is not None
    recipe = Recipe.model_validate(model.card.provenance.recipe)
    assert (recipe.tune, recipe.data.size) == (None, (8, 12))
    assert run("predict", out, tmp_path / "data" / "b" / "1.png").exit_code == 0
    lines = answer.stderr.splitlines()
    assert [line for line in lines if re.match(r"plain \(1 of 2\): epoch 3/12 .* left$", line)]
    assert [line for line in lines if re.match(r"calibrating: \d+%, .* left$", line)]
    assert [line for line in lines if re.match(r"measuring: \d+%, .* left$", line)]


@pytest.mark.slow
def test_a_posterior_starts_from_weights(tmp_path: Path) -> None:
    """The weights' network says which size its pictures have, and is measured beside the posterior."""
    source, out, file = (
        write_pictures(tmp_path / "data", 200, side=8),
        tmp_path / "m.safetensors",
        tmp_path / "w.safetensors",
    )
    net = build("cnn", classes=3, channels=3, size=[8, 12], width=4, hidden=8)
    save_file(net.state_dict(), file)
    network = ["--set=network.architecture=cnn", "--set=network.arguments={size=[8, 12], width=4, hidden=8}"]
    short = ["--set=fit.epochs=2", "--set=tune.epochs=1"]
    answer = run("train", source, "--weights", file, "--force", *network, *short, "--out", out)
    assert answer.exit_code == 0, answer.exception
    assert "plain (" not in answer.stderr
    assert "chosen: sigma_max" in answer.stderr
    model = load(out)
    assert model.card.input is not None
    assert model.card.input.shape == (3, 8, 12)
    assert model.card.plain is not None


# words


def test_durations() -> None:
    said = {"0 seconds": 0.2, "1 second": 1, "45 seconds": 45, "89 seconds": 89, "2 minutes": 95, "88 minutes": 5300}
    said |= {"1.5 hours": 5500, "10 hours": 36000, "2.3 days": 200_000}
    assert {duration(s): s for s in said.values()} == said


def test_progress_is_said_now_and_then(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with bar("working", 10) as advance:
        advance(5)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(terminal, "BETWEEN", 0.0)
    with bar("working", 10) as advance:
        advance(5)
        advance(5)
    assert re.fullmatch(r"working: 50%, 0 seconds left\n", capfd.readouterr().err)


def test_of_few_examples_more_are_held_out_to_calibrate_on() -> None:
    table, request = Facts(150, 0, (3,), 1), Request("csv:x")
    data = chosen(request, table).data
    assert 150 * (1 - data.test) * data.calibration >= 20
    assert not chosen(request, table).calibrate.temperature
    assert chosen(request, replace(table, examples=1000)).data.calibration == request.recipe().data.calibration
    assert chosen(request, replace(table, examples=30)).data.calibration == request.recipe().data.calibration  # refused
    own = Request("csv:x", ("data.calibration=0.12",))
    assert chosen(own, table).data.calibration == 0.12
