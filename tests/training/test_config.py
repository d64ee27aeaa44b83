"""Recipes: read, changed on the command line, and refused with one line that says what came and what was expected."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.models import build
from dubito.models.conversion.architectures import sizes_of
from dubito.models.names import METHODS
from dubito.training.config import Recipe, RecipeError, left_out, read_recipe
from dubito.training.names import DATA, OWN_DATA, shipped

RECIPE = """
seed = 3
[data]
name = "digits"
augment = [{RandomCrop = {size = 8, padding = 1}}]
[network]
architecture = "mlp"
arguments = {hidden = [32]}
[posterior]
method = "ffg-u"
options = {inducing = 16}
[posterior.layers]
"net.1" = {inducing = 8}
[fit]
epochs = 10
likelihood_epochs = 2
"""
SECTIONS = ("data", "network", "posterior", "fit", "calibrate")


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return str(path)


def complaint(source: str, *changes: str) -> str:
    """Of one line."""
    with pytest.raises(RecipeError) as caught:
        read_recipe(source, list(changes))
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(".")
    assert not said.endswith("..")
    return said


# reading


def test_a_recipe_of_ones_own(mine: str) -> None:
    recipe = read_recipe(mine)
    assert (recipe.seed, recipe.task, recipe.precision) == (3, "classification", "float32")
    assert recipe.data.augment == ({"RandomCrop": {"size": 8, "padding": 1}},)
    assert recipe.network.arguments == {"hidden": [32]}
    assert recipe.posterior.layers == {"net.1": {"inducing": 8}}
    assert (recipe.fit.epochs, recipe.fit.batch, recipe.fit.lr) == (10, 128, 1e-3)
    assert recipe.calibrate.false_positive_rate == 0.05


def test_a_recipe_survives_the_json_of_a_manifest(mine: str) -> None:
    recipe = read_recipe(mine, ["data.name=folder:x", "data.size=[8, 9]", "fit.schedule=step", "fit.milestones=[3, 7]"])
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf" + RECIPE.replace("\n", "\r\n").encode())
    assert read_recipe(str(tmp_path / "windows.toml")).fit.epochs == 10


@pytest.mark.parametrize("name", [name for name in shipped() if name not in OWN_DATA])
def test_every_shipped_recipe_can_be_followed(name: str) -> None:
    recipe = read_recipe(name)
    assert recipe.data.name in DATA or recipe.data.name.startswith("uci/")
    followable(recipe)


def followable(recipe: Recipe) -> None:
    assert recipe.posterior.method in METHODS
    assert recipe.network.arguments.keys() <= sizes_of(recipe.network.architecture)
    build(recipe.network.architecture, **recipe.network.arguments)
    assert recipe.fit.likelihood_epochs + recipe.fit.warmup_epochs < recipe.fit.epochs  # some of it is the ELBO itself


def test_only_recipes_are_shipped() -> None:
    folder = files("dubito.training").joinpath("recipes")
    assert {f"{name}.toml" for name in shipped()} == {f.name for f in folder.iterdir() if f.is_file()}


@pytest.mark.parametrize("kind", OWN_DATA)
def test_own_data_follows_the_recipe_of_its_kind(kind: str) -> None:
    source = f"{kind}:some/where: else.x"
    recipe = read_recipe(source, ["fit.epochs=77"])
    assert recipe.data.name == source
    assert recipe.fit.epochs == 77
    followable(recipe)
    table = tomllib.loads(files("dubito.training").joinpath("recipes", f"{kind}.toml").read_text())
    assert recipe.network.architecture == table["network"]["architecture"]


@pytest.mark.parametrize("source", ["npz", "npz:", "folder:", "csv"])
def test_own_data_needs_a_path(source: str) -> None:
    assert f"{source!r} names no data; expected {source.rstrip(':')}:PATH" in complaint(source)


@pytest.mark.parametrize("source", ["digit", "", "recipes", "mine.yaml", "zip:x", "../digits", "digits.tom"])
def test_an_unknown_recipe_is_told_the_known_ones(source: str) -> None:
    said = complaint(source)
    assert f"no recipe {source!r}" in said
    assert all(name in said for name in (*shipped(), "npz:PATH", "folder:PATH", "csv:PATH", ".toml"))


# files that are no recipes


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "none.toml: No such file or directory" in complaint(str(tmp_path / "none.toml"))


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert "folder.toml: Is a directory" in complaint(str(tmp_path / "folder.toml"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\x00", "is no text in UTF-8"),
        (b"seed = 'caf\xe9'", "is no text in UTF-8"),
        (b"seed = ", "is no TOML: Invalid value (at end of document)"),
        (b"[fit]\nepochs = 1\nepochs = 2\n", "is no TOML: Cannot overwrite a value (at line 3, column 11)"),
        (b"[fit\nepochs = 1", "is no TOML"),
        (b"\0", "is no TOML"),
        (b"seed = " + b"[" * 5000, "is no TOML"),
        (b"", "data is missing; network is missing; posterior is missing; and 1 more"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    assert said in complaint(str(tmp_path / "bad.toml"))


@settings(deadline=None)
@given(content=st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_a_recipe_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    complaint(str(path))


# values that are refused


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_an_unknown_key_is_told_the_known_ones(mine: str, section: str) -> None:
    key = f"{section}.colour" if section else "colour"
    said = complaint(mine, f"{key}=red")
    assert f"there is no key {key}; there are: " in said
    model = Recipe.model_fields[section].annotation if section else Recipe
    assert model is not None
    assert all(name in said for name in model.model_fields)


def test_a_misspelt_key_is_named_before_the_one_it_was_meant_for(tmp_path: Path) -> None:
    (tmp_path / "typo.toml").write_text(RECIPE.replace("\nepochs", "\nepoch"))
    said = complaint(str(tmp_path / "typo.toml"))
    assert said.index("there is no key fit.epoch;") < said.index("fit.epochs is missing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("fit.epochs=20.5", "fit.epochs is 20.5; expected a valid integer"),
        ("fit.epochs=20.0", "fit.epochs is 20.0; expected a valid integer"),
        ("fit.epochs=true", "fit.epochs is True; expected a valid integer"),
        ("fit.epochs='20'", "fit.epochs is '20'; expected a valid integer"),
        ("fit.epochs=many", "fit.epochs is 'many'; expected a valid integer"),
        ("fit.epochs=0", "fit.epochs is 0; expected greater than 0"),
        ("fit.epochs=none", "fit.epochs is None; expected a valid integer"),
        ("fit.batch=-1", "fit.batch is -1; expected greater than 0"),
        ("fit.lr=fast", "fit.lr is 'fast'; expected a valid number"),
        ("fit.lr=true", "fit.lr is True; expected a valid number"),
        ("fit.lr=inf", "fit.lr is inf; expected a finite number"),
        ("fit.lr=nan", "fit.lr is nan; expected a finite number"),
        ("fit.lr=0", "fit.lr is 0; expected greater than 0"),
        ("fit.kl=-0.1", "fit.kl is -0.1; expected greater than or equal to 0"),
        ("fit.kl=inf", "fit.kl is inf; expected a finite number"),
        ("fit.epochs=5\nbatch = 7", r"fit.epochs is '5\nbatch = 7'; expected a valid integer"),
        ("fit.momentum=1", "fit.momentum is 1; expected less than 1"),
        ("fit.clip=0.0", "fit.clip is 0.0; expected greater than 0"),
        ("fit.amp=perhaps", "fit.amp is 'perhaps'; expected a valid boolean"),
        ("fit.optimiser=lion", "fit.optimiser is 'lion'; expected 'adam' or 'sgd'"),
        ("fit.milestones=5", "fit.milestones is 5; expected a list"),
        ("fit.milestones=[1, 2.5]", "fit.milestones.1 is 2.5; expected a valid integer"),
        ("fit=5", "fit is 5; expected a table"),
        ("seed=-1", "seed is -1; expected greater than or equal to 0"),
        ("seed=2147483648", "seed is 2147483648; expected less than 2147483648"),
        ("task=clustering", "task is 'clustering'; expected 'classification' or 'regression'"),
        ("precision=float64", "precision is 'float64'; expected 'float32'"),
        ("data.name=7", "data.name is 7; expected a valid string"),
        ("data.validation=0", "data.validation is 0; expected greater than 0"),
        ("data.calibration=1.0", "data.calibration is 1.0; expected less than 1"),
        ("data.test=nan", "data.test is nan; expected"),
        ("data.size=28", "data.size is 28; expected a list"),
        ("data.size=[28]", "data.size.1 is missing"),
        ("data.size=[1, 2, 3]", "data.size is [1, 2, 3]; Tuple should have at most 2 items"),
        ("data.augment={RandomCrop = {size = 8}}", "expected a list"),
        ("data.augment=['RandomCrop']", "data.augment.0 is 'RandomCrop'; expected a table"),
        ("data.augment=[{RandomCrop = 8}]", "data.augment.0.RandomCrop is 8; expected a table"),
        ("posterior.options.since=2024-01-01", "input was not a valid JSON value"),
        ("posterior.layers=all", "posterior.layers is 'all'; expected a table"),
        ("calibrate.coverage=90", "calibrate.coverage is 90; expected less than 1"),
        ("calibrate.directions=-1", "calibrate.directions is -1; expected greater than or equal to 0"),
    ],
)
def test_a_value_of_the_wrong_kind(mine: str, change: str, said: str) -> None:
    found = complaint(mine, change)
    assert said in found
    assert found.startswith(f"recipe {mine}: ")
    assert found.endswith("Change the recipe, or pass --set KEY=VALUE.")


FS = "fit.objective=function-space"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["fit.warmup_epochs=9"], "fit: likelihood_epochs + warmup_epochs is 11, but epochs only 10"),
        (["fit.schedule=step"], "fit: schedule is 'step' and milestones []; milestones belong to"),
        (["fit.momentum=0.5"], "fit: momentum is 0.5, which belongs to the optimiser sgd; it is adam"),
        (["fit.milestones=[3]"], "fit: schedule is 'cosine' and milestones [3]; milestones belong to"),
        (["data.validation=0.5", "data.calibration=0.5"], "data: validation + calibration is 1; expected less than 1"),
        (["data.target=price"], "data: target is 'price', which belongs to csv:… alone; the data is 'digits'"),
        (["data.split=1"], "data: split is 1, which belongs to uci/… and uci-gap/… alone"),
        (["data.size=[8, 8]", "data.name=csv:x"], "data: size is (8, 8), which belongs to pictures alone"),
        (["data.exif=false"], "data: exif is False, which belongs to folder:… alone; the data is 'digits'"),
        (["data.crop=0.9"], "data: crop is 0.9, which needs a size"),
        (["context.points=8"], "context belongs to fit.objective 'function-space'; it is 'elbo'"),
        (
            [FS, "context.covariance=full"],
            "context: probes is 4 and points 32; a full covariance needs two probes more",
        ),
        (
            [FS, "context.inputs=spoiled", "context.margin=1.0"],
            "margin is 1, which belongs to inputs = 'uniform'; it is",
        ),
        ([FS, "context.inputs=augmented", "context.points=200"], "context.points is 200 and fit.batch 128; augmented"),
        ([FS, "fit.function_space=true"], "fit.function_space weighs a KL of weights; fit.objective"),
        (
            [FS, "posterior={method='subnetwork-laplace'}"],
            "but subnetwork-laplace is not fitted by variation: use elbo",
        ),
        (["noise=auto"], "noise is 'auto', which belongs to regression; the task is classification"),
        (
            [
                "task=regression",
                "noise=input",
                "posterior.method=subnetwork-laplace",
                "posterior.options={}",
                "posterior.layers={}",
            ],
            "noise is 'input', but subnetwork-laplace knows constant noise only",
        ),
    ],
)
def test_values_that_contradict_each_other(mine: str, changes: list[str], said: str) -> None:
    assert said in complaint(mine, *changes)


def test_phases_may_fill_all_epochs(mine: str) -> None:
    assert read_recipe(mine, ["fit.warmup_epochs=8"]).fit.warmup_epochs == 8


def test_options_of_the_data_where_they_belong(mine: str) -> None:
    assert read_recipe(mine, ["data.name=uci/boston", "data.split=19"]).data.split == 19
    assert read_recipe(mine, ["data.name=csv:a.csv", "data.target=price"]).data.target == "price"
    assert read_recipe(mine, ["data.name=folder:a", "data.size=[28, 32]"]).data.size == (28, 32)


# --set


@pytest.mark.parametrize(
    ("change", "keys", "value"),
    [
        ("seed=7", ["seed"], 7),
        (" fit . epochs = 20 ", ["fit", "epochs"], 20),
        ("fit.lr=1e-2", ["fit", "lr"], 0.01),
        ("fit.lr=.5", ["fit", "lr"], 0.5),
        ("fit.lr=1", ["fit", "lr"], 1.0),
        ("fit.amp=false", ["fit", "amp"], False),
        ("fit.amp=False", ["fit", "amp"], False),
        ("fit.patience=5", ["fit", "patience"], 5),
        ("fit.patience=none", ["fit", "patience"], None),
        ("data.name=csv:a b=c.csv", ["data", "name"], "csv:a b=c.csv"),
        ("data.name=/tmp/x", ["data", "name"], "/tmp/x"),
        ('data.name="in quotes"', ["data", "name"], "in quotes"),
        ("network.weights=2024-run.safetensors", ["network", "weights"], "2024-run.safetensors"),
        ("network.arguments.hidden=[64, 64]", ["network", "arguments", "hidden"], [64, 64]),
        ("network.arguments={hidden = [8], inputs = 3}", ["network", "arguments"], {"hidden": [8], "inputs": 3}),
        ("network.arguments.deep.er=true", ["network", "arguments", "deep", "er"], True),
        ("posterior.options.lam_max=.03", ["posterior", "options", "lam_max"], 0.03),
        ("network.arguments.x=True", ["network", "arguments", "x"], True),
        ('posterior.layers."net.1".inducing=4', ["posterior", "layers", "net.1", "inducing"], 4),
        ("posterior.layers.'net.*'=deterministic", ["posterior", "layers", "net.*"], "deterministic"),
        ("calibrate.temperature=true", ["calibrate", "temperature"], True),
        ("data.augment=[]", ["data", "augment"], ()),
    ],
)
def test_a_change_reaches_its_key_and_no_other(mine: str, change: str, keys: list[str], value: Any) -> None:
    before, after = read_recipe(mine).model_dump(), read_recipe(mine, [change]).model_dump()
    place: Any = before
    for key in keys[:-1]:
        place = place.setdefault(key, {})
    place[keys[-1]] = value
    assert after == before


def test_later_changes_win_and_may_build_on_earlier_ones(mine: str) -> None:
    changes = ["fit.epochs=1", "fit.epochs=30", "network.arguments={hidden = [1]}", "network.arguments.inputs=5"]
    recipe = read_recipe(mine, changes)
    assert recipe.fit.epochs == 30
    assert recipe.network.arguments == {"hidden": [1], "inputs": 5}


@pytest.mark.parametrize(
    "change", ["", "fit.epochs", "=5", " = 5", "fit.=5", ".fit=5", "fit..epochs=5", "fit.epochs=", "#=5", "[fit]#=5"]
)
def test_a_change_without_key_or_value(mine: str, change: str) -> None:
    assert f"--set {change!r}; expected key=value, such as fit.epochs=20" in complaint(mine, change)


def test_a_layer_name_with_signs_must_be_quoted(mine: str) -> None:
    assert 'is quoted: posterior.layers."net.1".inducing=8' in complaint(mine, "posterior.layers.net*.inducing=8")


@pytest.mark.parametrize("value", ["[8, 8", '"half', "{a = 1", "'x", "[1 2]"])
def test_a_value_that_is_neither_toml_nor_a_word(mine: str, value: str) -> None:
    assert f"{value!r} is no TOML; expected a number" in complaint(mine, f"network.arguments.hidden={value}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("seed.a=1", "'seed' is 3, not a table"),
        ("fit.epochs.a=1", "'epochs' is 10, not a table"),
        ("data.augment.a=1", "'augment' is [{"),
    ],
)
def test_a_change_below_a_value(mine: str, change: str, said: str) -> None:
    assert said in complaint(mine, change)


PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab c"),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


def toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else repr(value)


@settings(deadline=None)
@given(value=PLAIN)
def test_every_toml_value_comes_as_written(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "given.toml"
    path.write_text(RECIPE)
    found = read_recipe(str(path), [f"network.arguments.it={toml(value)}"]).network.arguments["it"]
    assert found == value
    assert type(found) is type(value)


@settings(deadline=None)
@given(change=st.text(max_size=30) | st.text(".= \"'[]{}\nfitepochs15", max_size=30))
def test_any_change_is_made_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, change: str) -> None:
    path = tmp_path_factory.getbasetemp() / "given.toml"
    path.write_text(RECIPE)
    said = ""
    try:
        read_recipe(str(path), [change])
    except RecipeError as error:
        said = str(error)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        (["network.architecture=random-features"], {}),
        (["network.architecture=lenet", "network.arguments.classes=3"], {"classes": 3}),
        (["network.arguments={hidden=[4]}", "network.architecture='cnn'"], {"hidden": [4]}),
        (["network.architecture=mlp"], {"hidden": [50, 50], "standardise": True}),
        (["network.arguments.hidden=[4]"], {"hidden": [4], "standardise": True}),
    ],
)
def test_arguments_of_a_recipes_network_are_none_of_another(changes: list[str], arguments: dict[str, Any]) -> None:
    assert read_recipe("csv:table.csv", changes).network.arguments == arguments


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["posterior.options.rate=0.2"], "posterior.options: 'rate' is no option of ffg-u; there are: inducing, "),
        (["posterior.options.members=3"], "posterior.options: 'members' is no option of ffg-u; there are"),
        (["posterior.method=mc-dropout", "posterior.options.inducing=8"], "'inducing' is no option of mc-dropout"),
        (["posterior.method=ensemble-w", "posterior.options={spread = 0.1}"], "'spread' is no option of ensemble-w"),
        (["posterior.method=gi", "posterior.options={sigma_max = 0.1}"], "there are: inducing, prior, prior_scale."),
        (["posterior.method=deterministic", "posterior.options.members=3"], "of deterministic, which has none."),
        (['posterior.layers."net.1"={rate = 0.2}'], "posterior.layers.net.1: 'rate' is no option of ffg-u"),
        (["tune={trials = [{spread = 0.1}, {rate = 0.2}], epochs = 1}"], "tune.trials.1: 'rate' is no option of ffg-u"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(mine: str, changes: list[str], said: str) -> None:
    assert said in complaint(mine, *changes)


def test_options_of_other_methods_are_those_of_layers_that_have_them(mine: str) -> None:
    of_layer = ['posterior.layers."net.3"={method = "mc-dropout"}', "posterior.options.rate=0.3"]
    assert read_recipe(mine, of_layer).posterior.options["rate"] == 0.3
    composed = read_recipe(mine, ["posterior.method=fac-gi", "posterior.options={sigma_max = 0.3, inducing = 9}"])
    assert composed.posterior.options == {"sigma_max": 0.3, "inducing": 9}


@pytest.mark.parametrize(
    ("method", "options", "trials", "said"),
    [
        ("ffg-u", {"inducing": 32, "lam_share": 0.1}, 4, ""),
        ("fcg-u", {"inducing": 32, "lam_share": 0.1}, 4, ""),
        ("'ensemble-u'", {"inducing": 32, "lam_share": 0.1}, 4, "sigma_max of the trials"),
        ("li", {"inducing": 32}, 0, "lam_share 0.1, the trials"),
        ("mc-dropout", {}, 0, "inducing 32, lam_share 0.1, the trials"),
        ("subnetwork-laplace", {}, 0, "inducing 32, lam_share 0.1, the trials"),
    ],
)
def test_options_of_a_recipes_method_are_none_of_another(
    method: str, options: dict[str, Any], trials: int, said: str
) -> None:
    changes = [f"posterior.method={method}"]
    recipe = read_recipe("fashion-mnist", changes)
    assert recipe.posterior.options == options
    assert (0 if recipe.tune is None else len(recipe.tune.trials)) == trials
    assert left_out("fashion-mnist", changes).endswith(said)
    assert bool(said) == bool(left_out("fashion-mnist", changes))


def test_options_that_a_layer_of_the_recipe_takes_are_kept(tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(RECIPE.replace('"net.1" = {inducing = 8}', '"net.1" = "ffg-u"'))
    recipe = read_recipe(str(tmp_path / "mixed.toml"), ["posterior.method=mc-dropout"])
    assert recipe.posterior.options == {"inducing": 16}


def test_options_that_are_given_whole_leave_nothing_out() -> None:
    changes = ["posterior.options={rate = 0.2}", "posterior.method=mc-dropout"]
    assert read_recipe("digits", changes).posterior.options == {"rate": 0.2}
    assert left_out("digits", changes) == ""
