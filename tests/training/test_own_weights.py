"""`dubito laplace` and `dubito train` with weights from elsewhere and a folder of pictures: the digits, in colour and
of odd sizes, and a small network that was trained on others of them with torch alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, save
from dubito.models.manifest import Card, Classification, Fitting, Input
from dubito.models.manifest import Image as Manifested
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.training.data.data import divide, input_of
from dubito.training.data.sources import read_data
from dubito.training.plain import look_first
from tests.training.test_train import refused, run

pytestmark = pytest.mark.usefixtures("few_requests")
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
ORDER = tuple(sorted(NAMES))  # as torchvision's ImageFolder numbers them
PICTURES = 240
SIZE = ["--input-size", "16", "--crop", "0.8", "--normalise", "unit"]
CODE = """
from torch import nn
def small(num_classes=10):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 3), nn.ReLU(), nn.Conv2d(8, 16, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(64, num_classes)
    )
class Two(nn.Module):
    def forward(self, picture, mask):
        return picture
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 10)
    def forward(self, ids):
        return self.table(ids).mean(1)
class Pixels(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 10, 1)
class Several(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 10, 1)
    def forward(self, x):
        return {"out": x}
"""


def digits() -> tuple[NDArray[np.uint8], Tensor]:
    """Pictures of 20 × 20 in a frame of 2 and 6 pixels, which the crop cuts off, and classes in `ORDER`."""
    train = read_data("digits").train
    numbered = torch.tensor([ORDER.index(name) for name in NAMES])
    rows = [np.array(Image.fromarray(x[0]).resize((20, 20), Image.Resampling.BICUBIC)) for x in train.x.numpy()]
    framed = np.pad(np.stack(rows), ((0, 0), (2, 2), (6, 6)), constant_values=255)
    return np.repeat(framed[..., None], 3, axis=3), numbered[train.y]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `pictures`, their weights `w.pth`, and the code that makes the network."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "their_nets.py").write_text(CODE)
    x, y = digits()
    for i in range(PICTURES):
        place = folder / "pictures" / ORDER[int(y[i])]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[i]).save(place / f"{i}.png")
    scope: dict[str, type[nn.Module]] = {}
    exec(CODE, scope)
    torch.manual_seed(0)
    net = scope["small"]()
    inner = torch.from_numpy(x[PICTURES:, 2:22, 8:24]).permute(0, 3, 1, 2).float() / 255  # what the crop leaves, about
    inner = nn.functional.interpolate(inner, (16, 16), mode="bilinear", antialias=True)
    optimiser = torch.optim.Adam(net.parameters(), 2e-2)
    for _ in range(12):
        for rows in torch.randperm(len(inner)).split(150):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(inner[rows]), y[PICTURES:][rows]).backward()
            optimiser.step()
    torch.save(net.state_dict(), folder / "w.pth")
    torch.save({"state_dict": net.state_dict(), "class_to_idx": {n: i for i, n in enumerate(ORDER)}}, folder / "n.ckpt")
    return folder


@pytest.fixture(autouse=True)
def here(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine)
    monkeypatch.syspath_prepend(mine)


def command(*more: str | Path, net: str = "their_nets:small", weights: str = "w.pth") -> list[str | Path]:
    return ["laplace", net, "--weights", weights, "--data", "folder:pictures", *more]


def test_from_a_checkpoint_to_a_calibrated_model_that_carries_its_network(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    told = run("laplace", "n.ckpt", "--network", "their_nets:small", *command("--out", out, "--size", "300", *SIZE)[4:])
    assert told.exit_code == 0, told.exception
    for words in (
        "n.ckpt: the weights stand under state_dict",
        "inputs: colour, 16 × 16, the middle of a picture resized to 20, bilinear, turned by EXIF, mean 0, 0, 0, std 1",
        "plain network: ",
        f"of {PICTURES} examples right; the most frequent class has ",
    ):
        assert words in " ".join(told.stderr.split())
    model = load(out)
    image = model.card.input.image  # type: ignore[union-attr]
    assert image is not None
    assert image.fitting == Fitting(resize=20, exif=True)
    assert model.manifest.traced is not None  # it needs no code of theirs any more
    assert model.card.labels == ORDER
    assert model.card.metrics["accuracy"] > 0.65  # ten seeds and other parts gave 0.75 and more
    calibration = model.card.calibration
    assert calibration is not None
    assert calibration.temperature != 1
    assert isinstance(model.manifest.subnetwork, SubnetworkEntry)
    assert model.manifest.subnetwork.select == "variance"  # a small network
    assert f"temperature {calibration.temperature:.3g}" in told.stdout
    assert calibration.closed is not None
    assert f"OOD by {calibration.closed.measure} at" in told.stdout  # what replies name too
    answer = json.loads(run("predict", out, next((Path("pictures") / "two").iterdir()), "--json").stdout)
    assert answer["predictions"][0]["ood"]["measure"] == calibration.closed.measure


def test_an_artifact_that_says_nothing_of_pictures_takes_the_same_options(tmp_path: Path) -> None:
    net = build("their_nets:small")
    net.load_state_dict(torch.load("w.pth", weights_only=True))
    plain, out = tmp_path / "plain.safetensors", tmp_path / "m.safetensors"
    save(bayesianize(net, "deterministic"), plain, card=Card(input=Input(shape=(3, 16, 16)), labels=ORDER))
    asked: list[str | Path] = ["laplace", plain, "--data", "folder:pictures", "--out", out]
    told = run(*asked, *SIZE[2:], "--size", "100")
    assert told.exit_code == 0, told.exception
    assert "inputs: colour, 16 × 16, the middle of a picture resized to 20" in " ".join(told.stderr.split())
    model = load(out)
    assert model.card.input is not None
    assert model.card.input.image == Manifested(mean=(0, 0, 0), std=(1, 1, 1), fitting=Fitting(resize=20, exif=True))
    assert model.card.metrics["accuracy"] > 0.65  # ten seeds and other parts gave 0.75 and more
    assert "--input-size is 20 × 20; " in refused(*asked, "--input-size", "20")
    said = refused("evaluate", plain, "--data", "folder:pictures")
    assert "this model does not say how they become its inputs: save it with Card(input=Input(shape=(3, 16, 16)" in said


def test_a_network_that_does_not_know_the_data_stops_with_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out: list[str | Path] = ["--out", tmp_path / "m.safetensors"]
    said = refused(*command(*out, *SIZE[:4], "--mean=-20", "--std=0.5"))
    assert "it is no better than a guess" in said
    assert "With --normalise unit it has " in said
    assert "--force goes on all the same" in said
    Path("order.txt").write_text("\n".join(reversed(ORDER)))
    said = refused(*command(*out, *SIZE, "--labels", "order.txt"))
    assert "The classes seem to be in another order: with output 0 for eight" in said
    data = read_data("folder:pictures", size=(16, 16), fitting=Fitting(resize=20))
    parts = divide(replace(data, labels=tuple(reversed(ORDER))), 0.1, 0.1, 0.1, 0)
    linear = nn.Linear(768, 10)
    nn.init.zeros_(linear.weight)  # the same class whatever the picture
    look_first(nn.Sequential(nn.Flatten(), linear), parts, input_of(parts.train), Classification(), force=True)
    assert "--force goes on" in capsys.readouterr().err


def test_the_wrong_size_stops_too(tmp_path: Path) -> None:
    """A network that takes any size, as most do: 28 × 28 for 64 × 64 went unnoticed once."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    torch.save(net.state_dict(), "any.pth")
    Path("any_size.py").write_text(
        "from torch import nn\nmade = lambda: nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())"
    )
    said = refused(*command("--out", tmp_path / "m.safetensors", net="any_size:made", weights="any.pth"))
    assert "Look at the input (colour, 24 × 32, resized" in said


def test_other_numbers_of_classes_are_named_on_both_sides(tmp_path: Path) -> None:
    out: list[str | Path] = ["--out", tmp_path / "m.safetensors", *SIZE]
    Path("few.txt").write_text("one\ntwo\n")
    assert "folder:pictures has 10 classes" in refused(*command(*out, "--labels", "few.txt"))
    Path("more.json").write_text(json.dumps([*ORDER, "ten"]))
    assert "w.pth tells 10 classes apart, but 11 are named" in refused(*command(*out, "--labels", "more.json"))
    state = torch.load("w.pth", weights_only=True)
    state["5.weight"], state["5.bias"] = torch.zeros(12, 64), torch.zeros(12)
    torch.save(state, "twelve.pth")
    assert "tells 12 classes apart, but folder:pictures has 10" in refused(*command(*out, weights="twelve.pth"))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        ("Two", "takes 2 inputs (picture, mask); expected one"),
        ("Words", "takes token ids"),
        ("Pixels", "answers with (10, 16, 16) numbers, as for each pixel"),
        ("Several", "answers with a dict; expected one tensor"),
    ],
)
def test_networks_of_other_kinds_are_refused_in_a_line(net: str, words: str, tmp_path: Path) -> None:
    scope: dict[str, type[nn.Module]] = {}
    exec(CODE, scope)
    torch.save(scope[net]().state_dict() or {"x": torch.ones(1)}, "other.pth")
    said = refused(*command("--out", tmp_path / "m.safetensors", *SIZE, net=f"their_nets:{net}", weights="other.pth"))
    assert words in said or (net == "Two" and "none of its names" in said)


def training(*more: str | Path, weights: str = "w.pth") -> list[str | Path]:
    return ["train", "folder:pictures", "--network", "their_nets:small", "--weights", weights, *more]


def test_train_takes_the_same_options(tmp_path: Path) -> None:
    """The same input and classes as by `dubito laplace`, and a posterior that is trained from these weights."""
    Path("order.txt").write_text("\n".join(ORDER))
    short = ["--set=fit.epochs=2", "--set=tune=none", "--set=fit.likelihood_epochs=0", "--set=fit.warmup_epochs=1"]
    out = tmp_path / "m.safetensors"
    told = run(*training("--out", out, *SIZE, "--labels", "order.txt", *short, weights="n.ckpt"))
    assert told.exit_code == 0, told.exception
    said = " ".join(told.stderr.split())
    assert "n.ckpt: the weights stand under state_dict" in said
    assert f"of {PICTURES} examples right; the most frequent class has " in said
    assert "about " in said.partition("calibration and measurement")[0]  # the time it will take
    model = load(out)
    image = model.card.input.image  # type: ignore[union-attr]
    assert image is not None
    assert (image.mean, image.std, image.fitting) == ((0.0,) * 3, (1.0,) * 3, Fitting(resize=20, exif=True))
    assert model.card.labels == ORDER
    assert model.card.plain is not None
    assert model.card.plain.metrics["accuracy"] > 0.65  # ten seeds and other parts gave 0.75 and more
    Path("order.txt").write_text("\n".join(reversed(ORDER)))
    said = refused(*training("--out", out, *SIZE, "--labels", "order.txt", *short))
    assert "The classes seem to be in another order: with output 0 for eight" in said


@pytest.mark.parametrize("of", [command, training])
def test_options_that_make_no_sense_are_refused(of: Callable[..., list[str | Path]], tmp_path: Path) -> None:
    """By both commands in the same words."""
    out: list[str | Path] = ["--out", tmp_path / "m.safetensors"]
    assert "--input-size is 2.5; expected a number of pixels" in refused(*of(*out, "--input-size", "2.5"))
    assert "--crop is 1.5; expected a share" in refused(*of(*out, "--input-size", "16", "--crop", "1.5"))
    assert "--normalise is 'nicely'; expected data, imagenet" in refused(*of(*out, "--normalise", "nicely"))
    assert "--interpolation is 'cubic'; expected bilinear or bicubic" in refused(*of(*out, "--interpolation", "cubic"))
    assert "--mean or --std alone came" in refused(*of(*out, "--mean", "0.5"))
    both = ["--mean", "0.5", "--std", "1"]
    assert "--normalise with --mean or --std came" in refused(*of(*out, *both, "--normalise", "unit"))
    assert "--std is 0; expected numbers above 0" in refused(*of(*out, "--mean", "0.5", "--std", "0"))
    assert "crop is 0.8, which needs a size" in refused(*of(*out, "--crop", "0.8"))
    assert "one for each channel" in refused(*of(*out, *SIZE[:4], "--mean", "0.5", "--mean", "0.5", "--std", "1"))
    assert "which belongs to csv:… alone" in refused(*of(*out, "--target", "price"))


def test_options_of_weights_need_weights(tmp_path: Path) -> None:
    out = tmp_path / "m.safetensors"
    for option in ("--labels=order.txt", "--rename=a=b"):
        said = refused("train", "folder:pictures", "--out", out, option)
        assert said == f"{option.partition('=')[0]} belongs to the weights of a trained network; give them by " + (
            "--weights FILE."
        )


def test_a_target_that_is_no_column_is_told_the_columns(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,b,price\n" + "\n".join(f"{i},{i % 7},{i % 5}" for i in range(200)))
    said = refused("train", f"csv:{table}", "--target", "prize", "--out", tmp_path / "m.safetensors")
    assert said == f"{table} has no column 'prize'; its columns are: a, b, price."
