"""A picture of odd size with an EXIF orientation becomes the same tensor in training, evaluation, `dubito predict`,
REST, client, ONNX runtime and browser. The network answers with its own input, so that every road shows it.

`test_edge.py` has the browser."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from pydantic import ValidationError
from torchvision.transforms import v2
from typer.testing import CliRunner

from dubito.cli import app
from dubito.deploy.edge.data import read as labelled
from dubito.deploy.edge.export import export
from dubito.deploy.edge.export import save as write_onnx
from dubito.deploy.edge.runtime import EdgeError, EdgeModel
from dubito.models import bayesianize, images, load, save
from dubito.models.errors import InputError
from dubito.models.images import fitted, prepare, prepare_all, prepare_array, read_pixels
from dubito.models.manifest import Card, Fitting, Input, Interpolation, Regression, format_of
from dubito.models.manifest import Image as ImageInput
from dubito.service.client import Client
from dubito.service.scoring.rows import rows_of_input
from dubito.training.data.data import enter
from dubito.training.data.sources import read_for
from tests.small_models import mlp

pytestmark = pytest.mark.usefixtures("quick_exports")
SIDE, TURN = 6, 6  # of the input; EXIF: to be turned by a quarter, clockwise
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STEP = 1 / 255 / min(STD)  # one step of a uint8 pixel, normalised
FITTINGS = {
    "crop": Fitting(resize=8, exif=True),
    "bicubic": Fitting(resize=9, interpolation="bicubic", exif=True),
    "as it lies": Fitting(resize=8),
    "squeezed": None,
}


def artifact(fitting: Fitting | None, path: Path, channels: int = 3) -> Path:
    """A regression whose predictions are its inputs."""
    n = channels * SIDE * SIDE
    net = mlp(n, n)
    with torch.no_grad():
        net.get_parameter("1.weight").copy_(torch.eye(n))
        net.get_parameter("1.bias").zero_()
    image = ImageInput(mean=MEAN[:channels], std=STD[:channels], fitting=fitting)
    card = Card(input=Input(shape=(channels, SIDE, SIDE), image=image))
    save(bayesianize(net, "deterministic", task=Regression(outputs=n)), path, card=card)
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one class with one picture of 23 × 37 pixels, which EXIF says to turn; smooth, for JPEG's sake."""
    folder = tmp_path_factory.mktemp("pictures") / "class"
    folder.mkdir()
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)).resize((37, 23), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = TURN
    coarse.save(folder / "x.png", exif=exif)
    return folder.parent


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Of each fitting the artifact and the graph."""
    files = {}
    for name, fitting in FITTINGS.items():
        folder = tmp_path_factory.mktemp("exported")
        files[name] = artifact(fitting, folder / "m.safetensors"), folder / f"{name}.onnx"
        write_onnx(export(load(files[name][0]), take="image"), files[name][1])
    return files


def torchvisions(fitting: Fitting | None, path: Path) -> torch.Tensor:
    """The input by torchvision's own transforms of a Pillow picture, which round to uint8 after each pass."""
    with Image.open(path) as picture:
        seen = ImageOps.exif_transpose(picture) if fitting is not None and fitting.exif else picture.copy()
    if fitting is None:
        steps: list[Any] = [v2.Resize((SIDE, SIDE))]
    else:
        steps = [v2.Resize(fitting.resize, v2.InterpolationMode(fitting.interpolation)), v2.CenterCrop(SIDE)]
    whole = v2.Compose([*steps, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    found: torch.Tensor = whole(seen)
    return found


def by_rest(url: str, content: bytes) -> NDArray[Any]:
    reply = httpx.post(url, content=content, headers={"content-type": "image/png"})
    coded = httpx.post(url, json={"images": [base64.b64encode(content).decode()]})
    assert reply.json()["predictions"][0]["mean"] == coded.json()["predictions"][0]["mean"]
    return np.array(reply.json()["predictions"][0]["mean"])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_pictures_of_data_sets_are_resized_as_torchvision_resizes_them(interpolation: Interpolation) -> None:
    """In uint8, to the bit where torch's own kernels are used; elsewhere a rounding may differ by one step."""
    rng = np.random.default_rng(0)
    for height, width, resize in [(23, 37, None), (37, 23, 9), (5, 4, 12), (64, 64, 7)]:
        picture = torch.from_numpy(rng.integers(0, 256, (3, height, width), dtype=np.uint8))
        fitting = Fitting(resize=resize, interpolation=interpolation)
        small = fitted(picture, (3, SIDE, SIDE), fitting)
        size = [SIDE, SIDE] if resize is None else [resize]
        whole = v2.functional.resize(picture, size, v2.InterpolationMode(interpolation))
        expected = v2.functional.center_crop(whole, [SIDE, SIDE])
        assert small.dtype == torch.uint8
        assert (small.int() - expected.int()).abs().max() <= 1
        exact = fitted(picture.float() / 255, (3, SIDE, SIDE), fitting) * 255  # as the server does
        assert (small - exact).abs().max() < 1.01


@pytest.mark.parametrize("name", FITTINGS)
def test_every_road_makes_the_same_tensor(
    name: str, pictures: Path, serve: Callable[..., Any], exported: dict[str, tuple[Path, Path]]
) -> None:
    fitting, picture = FITTINGS[name], pictures / "class" / "x.png"
    path, graph = exported[name]
    model = load(path)
    declared = model.card.input
    assert declared is not None
    assert model.manifest.format == (1 if fitting is None else 4)
    x = prepare(torch.from_numpy(read_pixels(picture, fitting)), declared)  # as `dubito predict` does
    assert (x - torchvisions(fitting, picture)).abs().max() < 2 * STEP  # its two passes each round by half a step
    read = read_for(model.manifest, f"folder:{pictures}", labelled=False).train.x
    assert (enter(read, declared)[0] - x).abs().max() < 1.01 * STEP  # data sets are kept as uint8
    live = serve(path)
    content = picture.read_bytes()
    assert np.abs(by_rest(f"{live.url}/v1/models/m/predict", content) - x.numpy().ravel()).max() < 1e-5
    with Client(live.url) as client:
        sent = client.predict("m", read_pixels(picture, fitting))["mean"]
    assert np.abs(sent[0] - x.numpy().ravel()).max() < 1e-5
    edge = EdgeModel(graph)
    assert np.abs(edge.predict(edge.read(picture))["mean"][0] - x.numpy().ravel()).max() < 1e-4
    wide = np.array(Image.open(io.BytesIO(content)))[:5]  # 5 × 37: the shorter side grows
    again = prepare(torch.from_numpy(wide), declared).numpy().ravel()
    assert np.abs(edge.predict(wide[None])["mean"][0] - again).max() < 1e-4


def by_command(path: Path, file: Path) -> NDArray[Any]:
    answer = CliRunner().invoke(app, ["predict", str(path), str(file), "--json"])
    assert answer.exit_code == 0, answer.exception
    return np.array([row["mean"] for row in json.loads(answer.stdout)["predictions"]])


def by_score(path: Path, declared: Input) -> NDArray[Any]:
    """What `dubito score` gives the model, three rows at a time."""
    rows = rows_of_input(str(path), declared)
    blocks = [rows.read(i, min(i + 3, rows.count)).x for i in range(0, rows.count, 3)]
    return np.concatenate(blocks).reshape(rows.count, -1)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_shape_of_an_array_says_how_its_pictures_lie(
    channels: int, serve: Callable[..., Any], tmp_path: Path
) -> None:
    """Alike for `dubito predict`, the server and `dubito score`, at other sizes than the model's and at its own."""
    model = load(path := artifact(None, tmp_path / "m.safetensors", channels))
    declared = model.card.input
    assert declared is not None
    live, rng = serve(path), np.random.default_rng(3)
    for height, width in ((20, 13), (SIDE, SIDE)):
        colour = rng.integers(0, 256, (5, height, width, 3), dtype=np.uint8)
        grey = colour[..., 1]
        transparent = np.concatenate([colour, grey[..., None]], -1)
        first = np.moveaxis(colour, -1, -3)
        cases = [  # the array, and its pictures
            (grey[0], grey[:1]),
            (grey[:1], grey[:1]),
            (grey, grey),
            (grey[..., None], grey),
            (grey[:, None], grey),
            (colour[0], colour[:1]),
            (colour, colour),
            (first, colour),
            (transparent, colour),
            (np.moveaxis(transparent, -1, -3), colour),
            (first[0], colour[:1] if channels == 3 else first[0]),  # of a grey model they are three grey pictures
        ]
        for array, pictures in cases:
            x = torch.stack([prepare(torch.from_numpy(np.array(p)), declared) for p in pictures]).flatten(1).numpy()
            np.save(tmp_path / "x.npy", array)
            np.savez(tmp_path / "x.npz", x=np.ascontiguousarray(array))
            with Client(live.url) as client:
                np.testing.assert_allclose(client.predict("m", array)["mean"], x, atol=1e-5)
            np.testing.assert_allclose(by_command(path, tmp_path / "x.npy"), x, atol=1e-5)
            np.testing.assert_allclose(by_score(tmp_path / "x.npy", declared), x, atol=1e-5)
            np.testing.assert_allclose(by_score(tmp_path / "x.npz", declared), x, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((3, 20, 3), "of which the channels may be first or last; expected pictures of the model's own 6 × 6 pixels"),
        ((2, 3, 20, 4), "of which the channels may be first or last"),
        ((2, 5, 20, 13), "expected (H, W), (H, W, channels), (channels, H, W) or several of them."),
        ((7,), "expected (H, W)"),
        ((0, 20, 13), "expected (H, W)"),
        ((2, 0, 3), "expected (H, W)"),
        ((2, 2, 3, 20, 13), "expected (H, W)"),
    ],
)
def test_a_shape_that_may_be_read_in_two_ways_or_in_none_is_refused_alike(
    shape: tuple[int, ...], said: str, serve: Callable[..., Any], tmp_path: Path
) -> None:
    declared = load(path := artifact(None, tmp_path / "m.safetensors")).card.input
    assert declared is not None
    np.save(file := tmp_path / "x.npy", np.zeros(shape, np.uint8))
    headers = {"content-type": "application/x-npy"}
    reply = httpx.post(f"{serve(path).url}/v1/models/m/predict", content=file.read_bytes(), headers=headers)
    assert reply.status_code == 400
    with pytest.raises(InputError) as scored:
        rows_of_input(str(file), declared)
    predicted = CliRunner().invoke(app, ["predict", str(path), str(file)]).exception
    assert isinstance(predicted, InputError)
    for complaint in (reply.json()["detail"], str(scored.value), str(predicted)):
        assert f"pixels have shape {shape}" in complaint
        assert said in complaint


def test_labelled_pictures_are_counted_by_their_labels(tmp_path: Path) -> None:
    """Three grey pictures of a model that takes colour are no colour picture with its channels first."""
    model = load(artifact(None, tmp_path / "m.safetensors"))
    grey = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x=grey, y=np.zeros((3, 3 * SIDE * SIDE)))
    data = labelled(f"npz:{tmp_path / 'd.npz'}", model)
    assert len(data.tensors(model)) == 3


def test_a_graph_that_takes_tensors_refuses_pictures_that_would_be_cut(pictures: Path, tmp_path: Path) -> None:
    model = load(artifact(FITTINGS["crop"], tmp_path / "m.safetensors"))
    write_onnx(export(model), tmp_path / "m.onnx")
    Image.new("RGB", (SIDE, SIDE)).save(tmp_path / "small.png")
    with pytest.raises(EdgeError, match=r"takes 6 x 6, cut out of 8\. Export the model with --image"):
        EdgeModel(tmp_path / "m.onnx").read(tmp_path / "small.png")


def test_a_fitting_belongs_to_format_4_and_holds_the_input() -> None:
    of = {"mean": MEAN, "std": STD, "fitting": {"resize": 8}}
    card = Card(input=Input(shape=(3, 6, 6), image=ImageInput.model_validate(of)))
    assert format_of(card) == 4
    assert "fitting" not in Card(input=Input(shape=(3, 6, 6), image=ImageInput(mean=MEAN, std=STD))).model_dump_json()
    for resize in (5, 1 << 20):
        with pytest.raises(ValidationError, match=f"resized to {resize}; expected 6 to 4096"):
            Input(shape=(3, 6, 6), image=ImageInput.model_validate(of | {"fitting": {"resize": resize}}))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("fitting", [None, Fitting(resize=9), Fitting(interpolation="bicubic")])
def test_pictures_of_one_size_are_fitted_together_as_they_are_one_by_one(channels: int, fitting: Any) -> None:
    rng = np.random.default_rng(5)
    for wanted in (1, 3):
        image = ImageInput(mean=(0.4,) * wanted, std=(0.3,) * wanted, fitting=fitting)
        declared = Input(shape=(wanted, 8, 7), image=image)
        for height, width in ((8, 7), (20, 13), (3, 5)):
            pixels = torch.from_numpy(rng.integers(0, 256, (6, height, width, channels), dtype=np.uint8))
            alone = torch.stack([prepare(one, declared) for one in pixels])
            torch.testing.assert_close(prepare_all(pixels, declared), alone, rtol=0, atol=1e-6)


def test_large_pictures_are_prepared_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a file that is mapped, and may not be written to."""
    pictures = np.random.default_rng(5).integers(0, 256, (7, 20, 13, 3), dtype=np.uint8)
    pictures.flags.writeable = False
    declared = Input(shape=(3, 8, 7), image=ImageInput(mean=MEAN, std=STD))
    whole = prepare_array(pictures, declared)
    monkeypatch.setattr(images, "AT_ONCE", 3 * 20 * 13 * 3)
    for again in (prepare_array(pictures, declared), prepare_all(torch.from_numpy(np.array(pictures)), declared)):
        torch.testing.assert_close(again, whole, rtol=0, atol=1e-6)


def test_a_picture_of_absurd_proportions_is_refused_before_it_fills_the_memory() -> None:
    image = ImageInput(mean=MEAN, std=STD, fitting=Fitting(resize=256))
    with pytest.raises(InputError, match="a picture of 1 × 60000 pixels is too long"):
        prepare(torch.zeros(1, 60000, 3, dtype=torch.uint8), Input(shape=(3, 224, 224), image=image))
