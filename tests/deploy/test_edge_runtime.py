"""The edge's one-file runtime without torch, the commands, and what they say of files that are not theirs."""

import io
import json
import os
import struct
import subprocess
import sys
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from dubito.cli import app
from dubito.deploy.edge.errors import OnnxError
from dubito.deploy.edge.export import export, save
from dubito.deploy.edge.runtime import EdgeError, EdgeModel, decode_png
from dubito.models import bayesianize, build, load
from dubito.models import save as save_artifact
from dubito.models.embedded import embedded
from dubito.models.errors import DubitoError, InputError
from dubito.models.manifest import Card, Input

RUNTIME = Path(__file__).parents[2] / "deploy/edge/runtime.py"
WITHOUT_TORCH = "import sys; sys.modules.update(torch=None, onnx=None, dubito=None, PIL=None); import runpy; "


@pytest.fixture(scope="module")
def digits(small_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of digits as a graph that takes pictures."""
    path = tmp_path_factory.mktemp("edge") / "digits.onnx"
    save(export(load(small_digits), samples=20, take="image"), path)
    return path


def some_digits(path: Path) -> str:
    """The last of the embedded digits as a data set of a user's own, in 256 shades."""
    with np.load(str(files("dubito.training").joinpath("digits.npz")), allow_pickle=False) as file:
        x, y = file["x"][-100:], file["y"][-100:]
    np.savez(path, x=(x * (255 / 16)).round().astype(np.uint8), y=y)
    return f"npz:{path}"


def picture(folder: Path, pixels: NDArray[np.uint8]) -> Path:
    path = folder / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


def dubito(*arguments: str | Path) -> str:
    """What a command prints; a DubitoError, which `main` prints as one line, is raised."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_the_runtime_alone_predicts_from_a_picture(digits: Path, tmp_path: Path) -> None:
    """In a process where torch, onnx, Pillow and dubito cannot be imported; as the model itself answers."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 17), dtype=np.uint8)
    path = picture(tmp_path, pixels)
    code = f"{WITHOUT_TORCH}sys.argv[1:] = {[str(digits), str(path), '--seed', '3', '--json']!r}; "
    code += f"runpy.run_path({str(RUNTIME)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["predictions"]
    edge = EdgeModel(digits)
    (same,) = edge.answers(edge.predict(pixels[None, ..., None], 3))
    assert answer == {"input": str(path), **same}
    assert {"label", "class", "probabilities", "max_probability", "entropy", "mutual_information"} <= answer.keys()
    assert answer["ood"].keys() == {"flag", "score", "threshold", "measure", "samples"}


def test_the_example_runs_beside_the_runtime(digits: Path) -> None:
    example = RUNTIME.with_name("example.py")
    assert len(example.read_text().splitlines()) <= 22
    done = subprocess.run([sys.executable, example, digits], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "probabilities" in done.stdout


def test_a_batch_cut_in_pieces_is_answered_as_a_whole(digits: Path) -> None:
    edge = EdgeModel(digits)
    x = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 1), dtype=np.uint8)
    whole, pieces = edge.predict(x, 5, rows=1000), edge.predict(x, 5, rows=40)
    for name in whole:
        np.testing.assert_allclose(whole[name], pieces[name], atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P"])
def test_pictures_are_read_as_pillow_reads_them(mode: str) -> None:
    """A photograph-like picture, so that the encoder uses every filter."""
    x, y = np.meshgrid(np.arange(37), np.arange(29))
    noise = np.random.default_rng(0).integers(0, 9, (29, 37, 3))
    rgb = (np.stack([x * 6, y * 8, (x + y) * 3], -1) + noise).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(rgb).convert(mode)
    content = io.BytesIO()
    image.save(content, "png", optimize=True, bits=8)
    expected = np.array(image.convert("RGB") if mode == "P" else image)
    np.testing.assert_array_equal(decode_png(content.getvalue()), expected.reshape(29, 37, -1))


def test_every_filter_of_a_png_is_undone() -> None:
    """Filtered here line by line, as the standard says, with each of the five kinds."""
    pixels = np.random.default_rng(1).integers(0, 256, (10, 6 * 3), dtype=np.int64)
    lines = b""
    for y, line in enumerate(pixels):
        above = pixels[y - 1] if y else np.zeros_like(line)
        left, corner = (np.concatenate([np.zeros(3, int), row[:-3]]) for row in (line, above))
        guess = left + above - corner
        distances = np.stack([abs(guess - left), abs(guess - above), abs(guess - corner)])
        paeth = np.choose(distances.argmin(0), [left, above, corner])
        told = [np.zeros_like(line), left, above, (left + above) // 2, paeth][y % 5]
        lines += bytes([y % 5]) + ((line - told) % 256).astype(np.uint8).tobytes()

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 6, 10, 8, 2, 0, 0, 0))
    content += chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    np.testing.assert_array_equal(decode_png(content), pixels.reshape(10, 6, 3))


def test_the_commands_export_and_check(tmp_path: Path) -> None:
    """As a user types them, with quality on the digits' own test data."""
    out = tmp_path / "digits.onnx"
    told = dubito("export", embedded("digits"), out, "--precision", "fp16", "--samples", "8")
    assert f"Next: dubito check-onnx {out}" in told
    check = ("check-onnx", out, "--against", embedded("digits"), "--data", some_digits(tmp_path / "some.npz"))
    report = json.loads(dubito(*check, "--json"))
    assert report["max_difference"] < 0.02
    assert report["bytes"] == out.stat().st_size
    assert report["data"]["class_agreement"] > 0.95
    assert report["data"]["onnx"]["accuracy"] > 0.95
    assert report["data"]["ood_agreement"] > 0.9
    assert "largest difference with the same noise" in dubito(*check)


@pytest.mark.parametrize("command", ["check-onnx", "runtime"])
def test_files_that_are_not_ours_are_refused_in_one_line(
    command: str, digits: Path, small_digits: Path, tmp_path: Path
) -> None:
    cut, foreign, noise, none = (tmp_path / name for name in ("cut.onnx", "foreign.onnx", "noise.onnx", "none.onnx"))
    content = digits.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    noise.write_bytes(os.urandom(4000))
    bare = onnx.load(digits)
    del bare.metadata_props[:]
    foreign.write_bytes(bare.SerializeToString())
    for path, words in ((cut, "damaged"), (noise, "damaged"), (foreign, "was not written by"), (none, "cannot read")):
        if command == "runtime":
            with pytest.raises(EdgeError, match=words):
                EdgeModel(path)
        else:
            with pytest.raises(OnnxError, match=words):
                dubito("check-onnx", path, "--against", small_digits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 3}, "has format 3; this runtime reads the formats 1 and 2"),
        ({"samples": "x"}, "its metadata has no valid samples"),
        ({"input": None, "noise": 3}, "its metadata has no valid input, noise"),
        ({"random": False}, r"does not take what it says \(image\)"),
    ],
)
def test_facts_that_do_not_fit_the_graph_are_refused(
    changes: dict[str, object], words: str, digits: Path, small_digits: Path, tmp_path: Path
) -> None:
    changed = onnx.load(digits)
    (facts,) = changed.metadata_props
    facts.value = json.dumps(json.loads(facts.value) | changes)
    path = tmp_path / "changed.onnx"
    path.write_bytes(changed.SerializeToString())
    with pytest.raises(EdgeError, match=words):
        EdgeModel(path)
    with pytest.raises(OnnxError, match=words):
        dubito("check-onnx", path, "--against", small_digits)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_network_too_small_to_be_rounded_says_so(precision: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for width, rounded in ((4, False), (100, True)):
        net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))
        file = tmp_path / "m.safetensors"
        save_artifact(bayesianize(net, "ffg-w"), file, card=Card(input=Input(shape=(8,))))
        told = dubito("export", file, tmp_path / "m.onnx", "--precision", precision)
        assert (f"nothing is stored in {precision}" in told) != rounded


def test_data_that_do_not_fit_are_refused(digits: Path, small_digits: Path, tmp_path: Path) -> None:
    good, path = np.zeros((5, 1, 8, 8), np.float32), tmp_path / "data.npz"
    cases: list[tuple[dict[str, NDArray[Any]], str]] = [
        ({"x": good}, "lacks x or y"),
        ({"x": good, "y": np.zeros(4)}, "as many inputs as labels"),
        ({"x": good[..., :3], "y": np.zeros(5)}, r"takes \(1, 8, 8\)"),
        ({"x": good + np.nan, "y": np.zeros(5)}, "expected finite numbers"),
        ({"x": good.astype(str), "y": np.zeros(5)}, "expected finite numbers"),
        ({"x": good, "y": np.zeros((5, 2))}, "expected the number of a class"),
        ({"x": np.array(1.0), "y": np.array(1.0)}, "as many inputs as labels"),
        ({"x": np.zeros((5, 8, 8), np.uint8), "y": np.arange(8, 13)}, "classes run from 8 to 12.*0 to 9"),
    ]
    for arrays, words in cases:
        np.savez(path, **arrays)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=words):
            dubito("check-onnx", digits, "--against", small_digits, "--data", f"npz:{path}")
    np.savez(path, x=good, y=np.zeros(5))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(InputError, match="cut or damaged"):
        dubito("check-onnx", digits, "--against", small_digits, "--data", path)
    path.write_bytes(b"text")
    with pytest.raises(InputError, match=r"is no \.npz file"):
        dubito("check-onnx", digits, "--against", small_digits, "--data", path)


def test_a_file_of_another_artifact_is_refused(digits: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    torch.manual_seed(0)
    save_artifact(bayesianize(build("mlp", inputs=4, hidden=[3], outputs=2), "ffg-u", inducing=2), other)
    with pytest.raises(OnnxError, match="was exported from another artifact"):
        dubito("check-onnx", digits, "--against", other)


def test_inputs_that_do_not_fit_are_refused(digits: Path, tmp_path: Path) -> None:
    edge = EdgeModel(digits)
    for x in (np.zeros((1, 8, 8, 3), np.uint8), np.zeros((1, 8, 8, 1), np.float32), np.zeros((0, 8, 8, 1), np.uint8)):
        with pytest.raises(EdgeError, match="this model takes uint8"):
            edge.predict(x)
    (tmp_path / "no.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 40)
    (tmp_path / "text.png").write_text("no picture")
    for name in ("no.png", "text.png", "none.png"):
        with pytest.raises(EdgeError, match="cannot read"):
            edge.read(tmp_path / name)


@pytest.mark.parametrize("exif", [b"MM\0*" + b"\xff" * 8, b"MM\0*\0\0\0\x08\0\x01\x01\x12", b"II*\0\0"])
def test_a_picture_with_damaged_exif_is_seen_as_it_is(exif: bytes) -> None:
    content = io.BytesIO()
    pixels = np.arange(60, dtype=np.uint8).reshape(5, 4, 3)
    Image.fromarray(pixels).save(content, "png", exif=exif)
    np.testing.assert_array_equal(decode_png(content.getvalue(), exif=True), pixels)


def test_a_damaged_palette_is_said(tmp_path: Path) -> None:
    content = io.BytesIO()
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).convert("P").save(content, "png", bits=8)
    good = content.getvalue()
    at = good.index(b"PLTE") - 4
    (size,) = struct.unpack(">I", good[at : at + 4])
    for kept in (0, 4, 6):  # bytes of the palette
        body = good[at + 8 : at + 8 + kept]
        chunk = struct.pack(">I", kept) + b"PLTE" + body + struct.pack(">I", zlib.crc32(b"PLTE" + body))
        with pytest.raises(ValueError, match=r"its header or its colours|more colours than its palette"):
            decode_png(good[:at] + chunk + good[at + 12 + size :])
    with pytest.raises(ValueError, match="its header"):
        decode_png(good[:8])


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(DubitoError, match="cannot write"):
        dubito("export", embedded("digits"), tmp_path / "no" / "folder.onnx")
    with pytest.raises(DubitoError, match="cannot be read"):
        dubito("export", tmp_path / "none.safetensors", tmp_path / "out.onnx")
