"""`dubito count`, `inspect` and `predict` through the real command: what they print, and how they fail."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dubito.cli import main
from dubito.models import bayesianize, build, load, save
from dubito.models.conversion.architectures import input_of
from dubito.models.images import prepare
from dubito.models.manifest import Architecture, Calibration, Card, Input, Regression
from dubito.models.numerics.parameters import count
from dubito.models.predictions.answers import answers
from dubito.models.pruning import prune
from tests import forked
from tests.small_models import bayesian_mlp

# running it


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def dubito(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The script's entry point, in this process: torch takes seconds to import."""
    monkeypatch.setenv("COLUMNS", "200")  # rich cuts tables to the width of the terminal
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # else `python -m pytest` names the program

    def run(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["dubito", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        code = end.value.code
        return Answer(code if isinstance(code, int) else 0, out, err)

    return run


def complaint(answer: Answer) -> str:
    """The one line of a command that failed."""
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert answer.err.count("\n") == 1
    assert answer.err.endswith("\n")
    return answer.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts: `digits` and `colours` take pictures, `vectors` and `curve` tensors, `blank` does not say."""
    folder = tmp_path_factory.mktemp("artifacts")
    torch.manual_seed(0)
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="mutual_information",
        thresholds={"mutual_information": {4: 0.0}, "entropy": {0: 0.0}},
        quantiles={0: 1.0},
    )

    def lenet(channels: int) -> nn.Module:
        """Far from the even odds of a fresh network, so that answers tell inputs apart."""
        net = build("lenet", channels=channels)
        for p in net.parameters():
            p.data *= 2
        return net

    pictures = input_of(Architecture(name="lenet", arguments={"channels": 1}))
    labels = ("zero", "[/b]", ":smile:", *map(str, range(3, 10)))
    card = Card(input=pictures, labels=labels, calibration=calibration, metrics={"accuracy": 0.9123})
    save(bayesianize(lenet(1), "ffg-u", inducing=4, layers={"0": "deterministic"}), folder / "digits", card=card)
    save(bayesianize(lenet(3), "ensemble-u", inducing=4, members=3), folder / "colours")
    vectors = bayesian_mlp((6, 5, 3), "ffg-u", inducing=3)
    save(vectors, folder / "vectors")
    save(vectors, folder / "blank", card=Card())
    curve = bayesian_mlp((2, 5, 2), "ffg-u", inducing=3, task=Regression(outputs=2))
    found = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="epistemic_variance",
        thresholds={"epistemic_variance": {0: 1e9}},
        quantiles={0: 2.0},
    )
    save(curve, folder / "curve", card=Card(input=Input(shape=(2,)), calibration=found))
    return folder


# count

TABLES = [
    *((f"--method ffg-u --inducing {M}", n) for M, n in ((16, 1_384_662), (32, 2_771_446), (64, 5_710_902))),
    *((f"--method ffg-u --inducing {M}", n) for M, n in ((128, 12_253_366), (256, 27_992_502))),
    *((f"--method ensemble-u --members 5 --inducing {M}", n) for M, n in ((16, 1_426_134), (32, 2_937_334))),
    *((f"--method ensemble-u --inducing {M}", n) for M, n in ((64, 6_374_454), (128, 14_907_574), (256, 38_609_334))),
    *((f"--method ffg-u --keep {k}", n) for k, n in ((0.75, 4_408_790), (0.5, 3_106_678), (0.25, 1_804_566))),
    *((f"--method ffg-w --keep {k}", n) for k, n in ((1, 46_988_564), (0.5, 23_520_852), (0.1, 4_746_682))),
    *((f"--method ffg-w --keep {k}", n) for k, n in ((0.01, 522_494), (0.001, 100_075))),
]


QUICK = (1_384_662, 6_374_454, 3_106_678, 4_746_682)  # one of each method, and both that are pruned


@pytest.mark.parametrize(
    ("options", "parameters"),
    [pytest.param(*row, marks=() if row[1] in QUICK else pytest.mark.slow) for row in TABLES],
)
def test_the_counts_of_the_papers_tables(dubito: Run, options: str, parameters: int) -> None:
    """[Ritter21, tables 9 and 10], every integer of the ResNet-50, counted on the network itself."""
    found = dubito("count", "resnet50-cifar", *options.split(), "--json").json
    assert (found["parameters"], found["deterministic"]) == (parameters, 23_520_842)


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-u", "ffg-w"])
@pytest.mark.parametrize("keep", [0.9, 0.33, 0.001])
def test_the_count_is_that_of_a_network_that_was_pruned(dubito: Run, method: str, keep: float) -> None:
    options: dict[str, Any] = {} if method == "ffg-w" else {"inducing": 7}
    network = bayesianize(build("lenet"), method, start="prior", **options)
    prune(network, keep)
    found = dubito("count", "lenet", "--method", method, "--inducing", "7", "--keep", str(keep), "--json").json
    assert found["parameters"] == count(network)


def test_count_answers_programs_and_people(dubito: Run) -> None:
    found = dubito("count", "lenet", "--method", "ffg-u", "--inducing", "8", "--json").json
    layers = ((6, 26), (16, 151), (120, 401), (84, 121), (10, 85))  # d_out and d_in, the bias included
    parameters = sum(8 * (d_out + d_in) + 2 * 8 + 1 + 2 * 8 * 8 for d_out, d_in in layers)
    plain = sum(d_out * d_in for d_out, d_in in layers)
    expected = {"architecture": "lenet", "method": "ffg-u", "parameters": parameters, "deterministic": plain}
    assert found == expected | {"ratio": parameters / plain}
    answer = dubito("count", "lenet", "--method", "ffg-u", "--inducing", "8")
    assert answer.code == 0
    assert f"lenet as ffg-u: {parameters:,} parameters" in answer.out
    assert f"lenet as it is: {plain:,} parameters" in answer.out
    assert f"ratio: {parameters / plain:.2%}" in answer.out


def test_count_has_options_for_the_head_and_the_classes(dubito: Run) -> None:
    one = dubito("count", "lenet", "--method", "ffg-u", "--inducing", "16", "--json").json
    head = dubito("count", "lenet", "--method", "ffg-u", "--inducing", "16", "--head", "10", "--json").json
    # Z_r, D_r and V of the head have 10 rows instead of 16
    assert one["parameters"] - head["parameters"] == 6 * 10 + 6 + 2 * 6 * 16
    wider = dubito("count", "lenet", "--method", "deterministic", "--classes", "20", "--json").json
    assert wider["parameters"] == wider["deterministic"] == one["deterministic"] + 10 * 85


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("resnet51 --method ffg-u", "no architecture 'resnet51'; there are: mlp"),
        ("torchvision/resnet51 --method ffg-u", "torchvision has no classifier 'resnet51'"),
        ("lenet --method ffg-v", "no method 'ffg-v'; there are: ffg-u"),
        ("lenet --method fcg-w", "layer '3': a full covariance over 2,416 entries"),
        ("lenet --method ffg-u --keep 0", "keep is 0.0; expected a share above 0 and up to 1"),
        ("lenet --method ffg-u --keep 1.5", "keep is 1.5"),
        ("lenet --method ffg-u --keep nan", "keep is nan"),
        ("lenet --method deterministic --keep 0.5", "nothing to prune"),
        ("mlp --method ffg-u --classes 3", "mlp: got an unexpected keyword argument 'classes'"),
    ],
)
def test_count_refuses_in_one_line(dubito: Run, options: str, reason: str) -> None:
    assert reason in complaint(dubito("count", *options.split()))


# inspect


def test_inspect_for_programs(dubito: Run, folder: Path) -> None:
    found = dubito("inspect", folder / "digits", "--json").json
    model = load(folder / "digits")
    assert found["format"] == 1
    assert found["architecture"] == {"name": "lenet", "arguments": {"channels": 1}}
    assert found["task"] == "classification"
    assert found["parameters"] == sum(p.numel() for p in model.network.parameters())
    assert found["deterministic"] == 61_706
    assert found["bytes"] == (folder / "digits").stat().st_size
    assert found["batchnorm"] == "kept"
    assert [row["name"] for row in found["layers"]] == ["3", "7", "9", "11"]
    second = found["layers"][1]
    assert (second["method"], second["d_out"], second["d_in"]) == ("ffg-u", 120, 401)
    assert (second["M_out"], second["M_in"]) == (4, 4)
    assert second["parameters"] == 4 * (120 + 401) + 2 * 4 + 1 + 2 * 16
    assert second["lambda"] == pytest.approx(1e-3, rel=1e-3)
    assert found["labels"][1] == "[/b]"
    assert found["metrics"] == {"accuracy": 0.9123}
    assert found["calibration"]["measure"] == "mutual_information"
    assert found["input"]["shape"] == [1, 28, 28]
    assert found["provenance"]["versions"]["torch"] == torch.__version__
    assert found["sha256"] == model.manifest.sha256


def test_inspect_for_people(dubito: Run, folder: Path) -> None:
    answer = dubito("inspect", folder / "digits")
    assert answer.code == 0, answer.err
    assert "lenet(channels=1), classification, format 1" in answer.out
    assert "of the plain network's" in answer.out
    assert "ffg-u: factorised Gaussian over inducing weights" in answer.out
    assert "120 × 401" in answer.out
    assert "4 × 4" in answer.out
    assert "labels: zero, [/b], :smile:, 3" in answer.out
    assert "calibrated: OOD by mutual_information at 5% false positives, prediction sets for 90% coverage" in answer.out
    assert "accuracy: 0.9123" in answer.out
    assert f"SHA-256 {load(folder / 'digits').manifest.sha256} (checked)" in answer.out
    assert "not calibrated" in dubito("inspect", folder / "vectors").out
    assert "regression" in dubito("inspect", folder / "curve").out


def test_inspect_refuses_in_one_line(dubito: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no artifact at all")
    (tmp_path / "cut").write_bytes((folder / "digits").read_bytes()[:-9])
    for name, reason in (("text", "not a safetensors file"), ("cut", "cut or damaged"), ("none", "No such file")):
        for command in (["inspect", tmp_path / name], ["predict", tmp_path / name, "x.npy"]):
            found = complaint(dubito(*command))
            assert reason in found
            assert str(tmp_path / name) in found


# predict: pictures

GREY = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (28, 28, 3), dtype=np.uint8)
FINE = np.random.default_rng(2).integers(0, 1 << 16, (28, 28), dtype=np.uint16)
ALPHA = np.random.default_rng(3).integers(0, 256, (28, 28, 1), dtype=np.uint8)
LUMINANCE = np.array([0.299, 0.587, 0.114])


def expected(artifact: Path, x: Any, samples: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    """The rows for inputs that the test prepared itself, as the model's file says."""
    model = load(artifact)
    rows: list[dict[str, Any]] = answers(
        model.predict(torch.from_numpy(np.array(x, dtype=np.float32)), samples, seed), model.card
    )
    return rows


def assert_rows(found: Any, rows: list[dict[str, Any]]) -> None:
    """The same but for the rounding of the pixels' arithmetic."""
    assert len(found) == len(rows)
    for one, other in zip(found, rows, strict=True):
        assert one.keys() == {"input", *other}
        for key in ("probabilities", "entropy", "expected_entropy", "max_probability"):
            assert one[key] == pytest.approx(other[key], abs=1e-5)
        for key in ("label", "class"):
            assert one[key] == other[key]


def palette() -> Image.Image:
    return Image.fromarray(COLOUR).convert("P", palette=Image.Palette.ADAPTIVE)


# each picture, and the pixels in [0, 1] that a model of one channel and one of three should see
PICTURES: dict[str, tuple[Callable[[], Image.Image], str, Any, Any]] = {
    "grey": (lambda: Image.fromarray(GREY), "PNG", GREY, GREY),
    "RGB": (lambda: Image.fromarray(COLOUR), "PNG", COLOUR @ LUMINANCE, COLOUR),
    "RGBA": (lambda: Image.fromarray(np.concatenate([COLOUR, ALPHA], 2)), "PNG", COLOUR @ LUMINANCE, COLOUR),
    "grey and alpha": (lambda: Image.fromarray(np.stack([GREY, ALPHA[..., 0]], 2)), "PNG", GREY, GREY),
    "black and white": (
        lambda: Image.fromarray(GREY > 99),
        "PNG",
        255 * (GREY > 99),
        255 * (GREY > 99),
    ),
    "palette": (palette, "PNG", None, None),
    "16 bits": (lambda: Image.fromarray(FINE), "PNG", FINE // 256, FINE // 256),
    "JPEG": (lambda: Image.fromarray(COLOUR), "JPEG", None, None),
    "grey JPEG": (lambda: Image.fromarray(GREY), "JPEG", None, None),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_of_any_kind(dubito: Run, folder: Path, tmp_path: Path, name: str) -> None:
    make, kind, grey, colour = PICTURES[name]
    path = tmp_path / "picture"  # the content says what it is, not the name
    make().save(path, kind)
    if grey is None:  # lossy: what the file really holds, by Pillow
        with Image.open(path) as picture:
            colour = np.array(picture.convert("RGB"))
            grey = colour @ LUMINANCE
    if np.ndim(colour) == 2:
        colour = np.stack([colour] * 3, 2)
    found = dubito("predict", folder / "digits", path, "--seed", "0", "--json").json
    assert found["predictions"][0]["input"] == str(path)
    assert_rows(found["predictions"], expected(folder / "digits", grey[None, None] / 255))
    found = dubito("predict", folder / "colours", path, "--seed", "0", "--json").json
    assert_rows(found["predictions"], expected(folder / "colours", np.moveaxis(colour, 2, 0)[None] / 255))


def test_a_picture_of_another_size_is_resized(dubito: Run, folder: Path, tmp_path: Path) -> None:
    plain = np.full((40, 61), 200, dtype=np.uint8)
    Image.fromarray(plain).save(tmp_path / "large.png")
    Image.fromarray(plain[:3, :2]).save(tmp_path / "small.png")
    paths = tmp_path / "large.png", tmp_path / "small.png"
    found = dubito("predict", folder / "digits", *paths, "--seed", "0", "--json").json
    assert_rows(found["predictions"], expected(folder / "digits", np.full((2, 1, 28, 28), 200 / 255)))


# predict: arrays

BATCH = np.random.default_rng(4).integers(0, 256, (3, 28, 28), dtype=np.uint8)
PLAIN = np.random.default_rng(5).standard_normal((3, 6))

ARRAYS: dict[str, tuple[str, Any, Any]] = {  # the artifact, what the file holds, and what the model should see
    "pixels (H, W)": ("digits", GREY, GREY[None, None] / 255),
    "pixels (H, W, 1)": ("digits", GREY[..., None], GREY[None, None] / 255),
    "pixels (H, W, 3)": ("colours", COLOUR, np.moveaxis(COLOUR, 2, 0)[None] / 255),
    "pixels (n, H, W)": ("digits", BATCH, BATCH[:, None] / 255),
    "pixels (3, H, W)": ("colours", np.moveaxis(COLOUR, 2, 0), np.moveaxis(COLOUR, 2, 0)[None] / 255),
    "pixels (n, 3, H, W)": ("colours", np.moveaxis(COLOUR, 2, 0)[None], np.moveaxis(COLOUR, 2, 0)[None] / 255),
    "pixels (n, H, W, 1)": ("digits", BATCH[..., None], BATCH[:, None] / 255),
    "pixels (1, H, W)": ("digits", BATCH[:1], BATCH[:1, None] / 255),
    "numbers (1, H, W)": ("digits", BATCH[:1] / 255, BATCH[None, :1] / 255),
    "numbers (n, 1, H, W)": ("digits", BATCH[:, None] / 255, BATCH[:, None] / 255),
    "one vector": ("vectors", PLAIN[0], PLAIN[:1]),
    "vectors": ("vectors", PLAIN, PLAIN),
    "a batch of one": ("vectors", PLAIN[:1], PLAIN[:1]),
    "float32": ("vectors", PLAIN.astype("<f4"), PLAIN),
    "float16": ("vectors", PLAIN.astype("<f2"), PLAIN.astype("<f2")),
    "big-endian": ("vectors", PLAIN.astype(">f8"), PLAIN),
    "columns first": ("vectors", np.asfortranarray(PLAIN), PLAIN),
    "whole numbers": ("vectors", np.arange(12).reshape(2, 6), np.arange(12).reshape(2, 6)),
    "bytes that are no pixels": ("vectors", np.arange(12, dtype=np.uint8).reshape(2, 6), np.arange(12).reshape(2, 6)),
    "one vector of bytes": ("vectors", np.arange(6, dtype=np.uint8), np.arange(6)[None]),
    "flags": ("vectors", np.ones((2, 6), dtype=bool), np.ones((2, 6))),
}


SINGLE = {name for name in ARRAYS if name.startswith(("pixels (H", "pixels (1", "pixels (3", "numbers (1", "one "))}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_kind(dubito: Run, folder: Path, tmp_path: Path, name: str) -> None:
    artifact, array, x = ARRAYS[name]
    path = tmp_path / "array.npy"
    np.save(path, array)
    found = dubito("predict", folder / artifact, path, "--seed", "0", "--json").json
    assert_rows(found["predictions"], expected(folder / artifact, x))
    names = [str(path)] if name in SINGLE else [f"{path}[{i}]" for i in range(len(x))]
    assert [row["input"] for row in found["predictions"]] == names


# predict: options


def test_a_seed_gives_the_same_answer_again(dubito: Run, folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PLAIN)
    command = ["predict", folder / "vectors", tmp_path / "x.npy", "--json"]
    first, again, other = (dubito(*command, "--seed", seed).json for seed in ("3", "3", "4"))
    assert first == again
    assert first["seed"] == 3
    assert first["samples"] == 20
    assert first["predictions"] != other["predictions"]
    fresh = dubito(*command).json
    assert dubito(*command, "--seed", str(fresh["seed"])).json == fresh
    assert dubito(*command).json["seed"] != fresh["seed"]


def test_no_samples_is_the_posterior_mean(dubito: Run, folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PLAIN)
    command = ["predict", folder / "vectors", tmp_path / "x.npy", "--samples", "0", "--json"]
    first, other = (dubito(*command, "--seed", seed).json for seed in ("3", "4"))
    assert first["predictions"] == other["predictions"]
    assert first["samples"] == load(folder / "vectors").predict(torch.zeros(1, 6), 0).samples
    assert all(row["mutual_information"] == 0 for row in first["predictions"])
    one = dubito(*command[:-2], "1", "--json", "--seed", "3").json
    assert one["samples"] == 1
    assert one["predictions"] != first["predictions"]
    Image.fromarray(COLOUR).save(tmp_path / "x.png")
    ensemble = dubito("predict", folder / "colours", tmp_path / "x.png", "--samples", "0", "--json").json
    assert ensemble["predictions"][0]["mutual_information"] > 0  # of an ensemble, each member once


def test_samples_auto_is_what_the_model_does_with_auto(dubito: Run, folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", BATCH)
    command = ["predict", folder / "digits", tmp_path / "x.npy", "--samples", "auto", "--seed", "3"]
    said = dubito(*command, "--json").json
    model = load(folder / "digits")
    declared = model.card.input
    assert declared is not None
    x = torch.stack([prepare(torch.from_numpy(pixels), declared) for pixels in BATCH])
    prediction = model.predict(x, "auto", 3)
    assert prediction.settled is not None
    assert [row["samples"] for row in said["predictions"]] == prediction.settled.samples.tolist()
    for row, expected in zip(said["predictions"], answers(prediction, model.card), strict=True):
        assert row["probabilities"] == pytest.approx(expected["probabilities"], abs=1e-6)
    shown = dubito(*command).out
    assert "K = auto, seed 3" in shown


def test_several_inputs_share_their_draws(dubito: Run, folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", BATCH)
    for i, pixels in enumerate(BATCH):
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    together = dubito("predict", folder / "digits", *paths, tmp_path / "all.npy", "--seed", "1", "--json").json
    rows = together["predictions"]
    assert [row["input"] for row in rows[:3]] == [str(path) for path in paths]
    for one, other in zip(rows[:3], rows[3:], strict=True):
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-6)


def test_predict_for_programs_is_calibrated(dubito: Run, folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", BATCH)
    for row in dubito("predict", folder / "digits", tmp_path / "x.npy", "--json").json["predictions"]:
        assert row["ood"]["measure"] == "mutual_information"
        assert row["ood"]["samples"] == 4
        assert row["ood"]["flag"] == (row["ood"]["score"] > 0)
        assert isinstance(row["prediction_set"], list)
    for row in dubito("predict", folder / "digits", tmp_path / "x.npy", "--samples", "1", "--json").json["predictions"]:
        assert (row["ood"]["measure"], row["ood"]["samples"]) == ("entropy", 0)


def test_predict_for_people(dubito: Run, folder: Path, tmp_path: Path) -> None:
    """Labels and paths are printed as they are, whatever they would mean to rich."""
    path = tmp_path / "[red]x.npy"
    np.save(path, BATCH)
    answer = dubito("predict", folder / "digits", path, "--seed", "7", "--samples", "5")
    assert answer.code == 0, answer.err
    assert "K = 5, seed 7" in answer.out
    titles = ("input", "label", "probability", "entropy", "mutual information", "prediction set", "OOD")
    assert all(title in answer.out for title in titles)
    assert answer.out.count("[red]x.npy") == 3
    assert "[/b], :smile:" in answer.out  # in a prediction set, where every class fits
    np.save(tmp_path / "x.npy", PLAIN)
    assert dubito("predict", folder / "vectors", tmp_path / "x.npy").out.count("not calibrated") == 1


def test_predict_a_regression(dubito: Run, folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", PLAIN[:, :2])
    found = dubito("predict", folder / "curve", tmp_path / "x.npy", "--seed", "0", "--json").json
    for row, other in zip(found["predictions"], expected(folder / "curve", PLAIN[:, :2]), strict=True):
        assert row == {"input": row["input"], **other}
        for mean, between, *variances in zip(
            row["mean"], row["interval"], row["epistemic_variance"], row["aleatoric_variance"], strict=True
        ):
            half = 2 * sum(variances) ** 0.5
            assert between == pytest.approx([mean - half, mean + half])
        assert row["ood"]["flag"] is False
    answer = dubito("predict", folder / "curve", tmp_path / "x.npy", "--seed", "0")
    assert all(title in answer.out for title in ("mean", "std from weights", "std from noise", "interval", "OOD"))
    assert f"{found['predictions'][0]['mean'][0]:.4g}" in answer.out


# predict: what cannot be read


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(shape: tuple[int, ...]) -> bytes:
    """A .npy header that claims this shape, with a few bytes behind it."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(16)


def png(array: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=PLAIN)
    return file.getvalue()


def floats() -> bytes:
    file = io.BytesIO()
    Image.fromarray(PLAIN.astype(np.float32)).save(file, "TIFF")
    return file.getvalue()


NAN = np.where(np.arange(18).reshape(3, 6) == 8, np.nan, 0)
UNFIT: dict[str, tuple[str, str, Callable[[], bytes | None], str]] = {
    "no file": ("digits", "x.png", lambda: None, "No such file or directory"),
    "no array": ("digits", "x.npy", lambda: None, "No such file or directory"),
    "empty picture": ("digits", "x.png", lambda: b"", "no picture that can be read; expected PNG, JPEG"),
    "empty array": ("digits", "x.npy", lambda: b"", "cannot read"),
    "text": ("digits", "x.png", lambda: b"a text, no picture", "no picture that can be read"),
    "picture cut": ("digits", "x.png", lambda: png(GREY)[:300], "no picture that can be read"),
    "picture damaged": ("digits", "x.png", lambda: png(GREY)[:60] + bytes(99) + png(GREY)[159:], "cannot read"),
    "header of a picture damaged": ("digits", "x.png", lambda: png(GREY)[:20] + bytes(99), "cannot read"),
    "picture of floats": ("digits", "x.tiff", floats, "its pixels are floats"),
    "picture for a model of vectors": (
        "vectors",
        "x.png",
        lambda: png(GREY),
        "takes tensors of shape (6,), not pictur",
    ),
    "Python objects": ("vectors", "x.npy", lambda: npy(np.array([{"a": 1}], dtype=object)), "Python objects"),
    "text in an array": ("vectors", "x.npy", lambda: npy(np.array(["a"])), "holds <U1; expected numbers"),
    "complex numbers": ("vectors", "x.npy", lambda: npy(PLAIN + 1j), "holds complex128; expected numbers"),
    "an archive": ("vectors", "x.npy", zipped, "cannot read"),
    "a picture called .npy": ("digits", "x.npy", lambda: png(GREY), "cannot read"),
    "array cut": ("vectors", "x.npy", lambda: npy(PLAIN)[:-9], "cannot read"),
    "absurd array": ("vectors", "x.npy", lambda: header((1 << 40, 6)), "cannot read"),
    "more absurd array": ("vectors", "x.npy", lambda: header((1 << 62, 1 << 62)), "cannot read"),
    "negative array": ("vectors", "x.npy", lambda: header((-6,)), "cannot read"),
    "header of an array damaged": ("vectors", "x.npy", lambda: npy(PLAIN).replace(b"}", b" ", 1), "cannot read"),
    "another length": ("vectors", "x.npy", lambda: npy(PLAIN[:, :5]), "has shape (3, 5); expected (6,), or a batch"),
    "another rank": ("vectors", "x.npy", lambda: npy(PLAIN[None]), "has shape (1, 3, 6); expected (6,), or a batch"),
    "a number": ("vectors", "x.npy", lambda: npy(np.float32(3)), "has shape (); expected inputs of shape (6,)"),
    "no inputs": ("vectors", "x.npy", lambda: npy(PLAIN[:0]), "has shape (0, 6); expected inputs of shape (6,)"),
    "pictures of another size": ("digits", "x.npy", lambda: npy(np.zeros((2, 1, 27, 28))), "has shape (2, 1, 27, 28)"),
    "pixels of 5 channels": (
        "digits",
        "x.npy",
        lambda: npy(np.zeros((2, 28, 28, 5), "u1")),
        "pixels have shape (2, 28, 28, 5)",
    ),
    "pixels of 5 dimensions": (
        "digits",
        "x.npy",
        lambda: npy(np.zeros((1, 2, 28, 28, 3), "u1")),
        "expected (H, W), (H, W, channels)",
    ),
    "picture without pixels": ("digits", "x.npy", lambda: npy(np.zeros((0, 28), "u1")), "expected (H, W)"),
    "NaN": ("vectors", "x.npy", lambda: npy(NAN), "input 1 holds NaN or infinity"),
    "infinity": ("vectors", "x.npy", lambda: npy(np.full((1, 6), np.inf)), "input 0 holds NaN or infinity"),
    "beyond float32": ("vectors", "x.npy", lambda: npy(np.full((1, 6), 1e300)), "input 0 holds NaN or infinity"),
    "model that does not say": ("blank", "x.npy", lambda: npy(PLAIN), "does not say what its inputs look like"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_input_is_refused_in_one_line(dubito: Run, folder: Path, tmp_path: Path, name: str) -> None:
    artifact, called, make, reason = UNFIT[name]
    content = make()
    if content is not None:
        (tmp_path / called).write_bytes(content)
    found = complaint(dubito("predict", folder / artifact, tmp_path / called))
    assert reason in found
    if "cannot read" in reason or "has shape" in reason or "No such" in reason:
        assert str(tmp_path / called) in found


def test_a_folder_is_no_input(dubito: Run, folder: Path, tmp_path: Path) -> None:
    assert "Is a directory" in complaint(dubito("predict", folder / "digits", tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [("--samples 65537", "samples is 65537; expected"), (f"--seed {1 << 63}", f"seed is {1 << 63}; expected")],
)
def test_options_out_of_range_are_refused_in_one_line(
    dubito: Run, folder: Path, tmp_path: Path, options: str, reason: str
) -> None:
    np.save(tmp_path / "x.npy", PLAIN)
    assert reason in complaint(dubito("predict", folder / "vectors", tmp_path / "x.npy", *options.split()))


@pytest.mark.parametrize(
    "command",
    [
        "predict model x.npy --samples -1",
        "predict model x.npy --samples many",
        "predict model x.npy --seed -1",
        "predict model",
        "predict",
        "inspect",
        "count lenet",
        "count lenet --method ffg-u --inducing 0",
        "count lenet --method ffg-u --members 0",
    ],
)
def test_wrong_usage_says_how_to_use_it(dubito: Run, command: str) -> None:
    answer = dubito(*command.split())
    assert answer.code == 2
    assert answer.err.startswith(f"Usage: dubito {command.split()[0]}")
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("name", ["count", "inspect", "predict"])
def test_each_help_has_an_example(dubito: Run, name: str) -> None:
    answer = dubito(name, "--help")
    assert answer.code == 0
    assert re.search(rf"(Try:|^)\s+dubito {name} \S+", answer.out, re.M), answer.out
    assert "--json" in answer.out


def test_a_process_of_its_own_refuses_in_one_line(folder: Path, tmp_path: Path) -> None:
    """Nobody catches its warnings."""
    np.save(tmp_path / "x.npy", np.full((1, 6), 1e300))
    ended = forked.run("predict", folder / "vectors", tmp_path / "x.npy")
    assert "holds NaN or infinity" in complaint(Answer(ended.returncode, ended.stdout, ended.stderr))
