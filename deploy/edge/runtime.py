#!/usr/bin/env python3
"""Predictions of an exported model with their uncertainty, by numpy and onnxruntime: copy this file to the device.

python runtime.py model.onnx picture.png --seed 0 --json
"""

import argparse
import json
import secrets
import struct
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

KEY, FORMATS = "dubito", (1, 2)  # 2: pictures that are turned or cut
ROWS = 64  # draws × inputs of one pass, which bounds the memory
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)
STATED: dict[str, Any] = {
    "samples": int,
    "random": bool,
    "input": dict,
    "labels": (list, type(None)),
    "ood": (dict, type(None)),
    "task": str,
    "precision": str,
    "noise": str,
    "provenance": dict,
}  # keys of the metadata, and their types
MOST_THREADS = 1024
Columns = dict[str, NDArray[Any]]  # outputs by name, one row per input


class EdgeError(Exception):
    """An error with a message for the user."""


class EdgeModel:
    def __init__(self, path: str | Path, threads: int = 0) -> None:
        """`threads=0` takes all cores."""
        if not 0 <= threads <= MOST_THREADS:
            raise EdgeError(f"threads is {threads}; expected 0, for all cores, or up to {MOST_THREADS}.")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised, not logged
        try:
            content = Path(path).read_bytes()
            self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except OSError as error:
            raise EdgeError(f"cannot read {path}: {error.strerror}.") from None
        except Exception as error:  # onnxruntime raises many kinds, all of them about the file
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EdgeError(f"{path} is no ONNX model that runs here: cut, damaged or foreign ({reason}).") from None
        self.facts = facts_of(path, dict(self.session.get_modelmeta().custom_metadata_map))
        self.samples: int = self.facts["samples"]
        self.outputs = [output.name for output in self.session.get_outputs()]
        entries = [("image" if self.facts["input"]["takes"] == "image" else "input"), *["seed"] * self.facts["random"]]
        if [entry.name for entry in self.session.get_inputs()] != entries:
            raise EdgeError(
                f"{path} is damaged: its graph does not take what it says ({', '.join(entries)}). Export it again."
            )

    def predict(self, x: NDArray[Any], seed: int | None = None, rows: int = ROWS) -> Columns:
        """Predictions for inputs (B, ...), with the same K draws for all; a seed gives the same draws for any batch."""
        declared = self.facts["input"]
        image = declared["takes"] == "image"
        shape = x.shape[3:] if image else x.shape[1:]
        wanted = declared["shape"][:1] if image else declared["shape"]
        if list(shape) != wanted or len(x) == 0 or (image and (x.dtype != np.uint8 or 0 in x.shape)):
            what = f"uint8 (B, height, width, {wanted[0]})" if image else f"(B, {', '.join(map(str, wanted))})"
            raise EdgeError(f"inputs came as {x.dtype} {x.shape}; this model takes {what}.")
        entry = self.session.get_inputs()[0]
        if not image and x.dtype.kind not in "biuf":
            raise EdgeError(f"inputs came as {x.dtype}; expected numbers.")
        ids = "int64" in entry.type
        if ids and (x.dtype.kind not in "iu" or (x < 0).any()):
            raise EdgeError(f"inputs came as {x.dtype}; expected token ids, which are integers from 0 on.")
        x = x if image else x.astype(np.int64 if ids else np.float32)
        if not image and not np.isfinite(x).all():
            raise EdgeError("inputs hold NaN or infinity; expected finite numbers only.")
        more: dict[str, NDArray[Any]] = {}
        if self.facts["random"]:
            seed = secrets.randbits(53) if seed is None else seed
            if not 0 <= seed < 1 << 63:
                raise EdgeError(f"seed is {seed}; expected 0 to 2**63 - 1.")
            more["seed"] = np.array(seed, np.int64)
        step = max(1, rows // self.samples)
        try:
            parts = [self.session.run(None, {entry.name: x[i : i + step], **more}) for i in range(0, len(x), step)]
        except Exception as error:  # onnxruntime raises many kinds
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            hint = " A token id may be larger than the table." if ids else ""
            raise EdgeError(f"the file cannot answer these inputs: {why}.{hint}") from None
        return {name: np.concatenate(part) for name, part in zip(self.outputs, zip(*parts, strict=True), strict=True)}

    def answers(self, columns: Columns) -> list[dict[str, Any]]:
        """One dictionary per input, with the keys of the server's replies."""
        lists = {name: column.tolist() for name, column in columns.items()}
        return [
            self._answer({name: column[i] for name, column in lists.items()})
            for i in range(len(columns[self.outputs[0]]))
        ]

    def _answer(self, row: dict[str, Any]) -> dict[str, Any]:
        ood, rule = None, self.facts["ood"]
        if rule is not None:
            ood = {"flag": row.pop("ood"), "score": row.pop("ood_score"), **rule}
        if "probabilities" not in row:
            names = self.facts.get("targets")
            return {**({} if names is None else {"targets": names}), **row, "interval": row.get("interval"), "ood": ood}
        best = int(np.argmax(row["probabilities"]))
        fitting = None
        if "prediction_set" in row:
            fitting = [self.label(c) for c, fits in enumerate(row["prediction_set"]) if fits]
        top = {"label": self.label(best), "class": best, "max_probability": row["probabilities"][best]}
        return {**top, **row, "prediction_set": fitting, "ood": ood}

    def label(self, index: int) -> str:
        labels = self.facts["labels"]
        return labels[index] if labels is not None and index < len(labels) else str(index)

    def read(self, path: str | Path) -> NDArray[Any]:
        """The inputs of one file: a PNG, or numbers (.npy) of the model's input shape."""
        declared = self.facts["input"]
        fitting = declared.get("fitting") or {}
        try:
            if Path(path).suffix.lower() == ".npy":
                array: NDArray[Any] = np.load(path, allow_pickle=False)
                alone = array.ndim == (3 if declared["takes"] == "image" else len(declared["shape"]))
                return array[None] if alone else array
            pixels = decode_png(Path(path).read_bytes(), exif=fitting.get("exif", False))
        except OSError as error:
            raise EdgeError(f"cannot read {path}: {error.strerror or error}.") from None
        except (ValueError, zlib.error, struct.error, IndexError, EOFError) as error:
            reason = "it is cut, damaged or foreign" if Path(path).suffix.lower() == ".npy" else error
            raise EdgeError(
                f"cannot read {path}: {reason}; expected an 8-bit PNG that is not interlaced, or .npy."
            ) from None
        if declared["mean"] is None:
            raise EdgeError(f"this model takes tensors of shape {declared['shape']}, not pictures: give a .npy file.")
        pixels = with_channels(pixels, declared["shape"][0])
        if declared["takes"] == "image":
            return pixels[None]
        if list(pixels.shape[:2]) != declared["shape"][1:] or fitting.get("resize") is not None:
            cut = f", cut out of {fitting['resize']}" if fitting.get("resize") is not None else ""
            raise EdgeError(
                f"{path} has {pixels.shape[0]} x {pixels.shape[1]} pixels; this file takes {declared['shape'][1]} x "
                f"{declared['shape'][2]}{cut}. Export the model with --image to have pictures resized."
            )
        mean, std = (np.array(declared[key], np.float32) for key in ("mean", "std"))
        return np.moveaxis((pixels.astype(np.float32) / 255 - mean) / std, -1, 0)[None]


def facts_of(path: str | Path, metadata: dict[str, str]) -> dict[str, Any]:
    """The file's metadata, checked."""
    try:
        facts = dict(json.loads(metadata[KEY]))
        version = facts["format"]
    except (KeyError, ValueError, TypeError):
        raise EdgeError(f"{path} was not written by `dubito export`: it has no metadata of it.") from None
    if version not in FORMATS:
        raise EdgeError(
            f"{path} has format {version!r}; this runtime reads the formats {FORMATS[0]} and {FORMATS[1]}. "
            "Export it again, or copy the runtime of the dubito that wrote it."
        )
    wrong = [name for name, kind in STATED.items() if not isinstance(facts.get(name, ...), kind)]
    if not wrong and not {"takes", "shape", "mean", "std"} <= facts["input"].keys():
        wrong = ["input"]
    if wrong or facts["samples"] < 1:
        raise EdgeError(
            f"{path} is damaged: its metadata has no valid {', '.join(wrong or ['samples'])}. Export it again."
        )
    return facts


def with_channels(pixels: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """The picture (H, W, c) with the model's number of channels; transparency is dropped."""
    if pixels.shape[2] in (2, 4):
        pixels = pixels[..., :-1]
    if pixels.shape[2] == channels:
        return pixels
    if pixels.shape[2] == 1:
        return np.repeat(pixels, channels, axis=2)
    if channels == 1:
        grey: NDArray[np.uint8] = np.rint(pixels @ np.array(LUMINANCE)).astype(np.uint8)
        return grey[..., None]
    raise EdgeError(f"a picture has {pixels.shape[2]} channels; this model takes {channels}.")


def decode_png(content: bytes, exif: bool = False) -> NDArray[np.uint8]:
    """Pixels (H, W, channels) of a PNG with 8 bits per channel, turned by EXIF if asked; else raises ValueError."""
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("not a PNG")
    header, palette, packed, turn, offset = b"", b"", b"", 1, 8
    while offset < len(content):
        length, kind = struct.unpack(">I4s", content[offset : offset + 8])
        body = content[offset + 8 : offset + 8 + length]
        if (
            len(body) < length
            or zlib.crc32(kind + body) != struct.unpack(">I", content[offset + 8 + length : offset + 12 + length])[0]
        ):
            raise ValueError("the PNG is cut or damaged")
        if kind == b"IHDR":
            header = body
        elif kind == b"PLTE":
            palette = body
        elif kind == b"IDAT":
            packed += body
        elif kind == b"eXIf" and exif:
            turn = orientation(body)
        offset += 12 + length
    if len(header) != 13 or (header[9] == 3 and (not palette or len(palette) % 3)):
        raise ValueError("the PNG lacks its header or its colours")
    width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 0)
    if depth != 8 or interlaced or not channels:
        raise ValueError(f"a PNG of {depth} bits, colour type {colour}, interlaced {interlaced}")
    if width * height > 1 << 26:
        raise ValueError(f"a PNG of {width} x {height} pixels")
    stride = width * channels
    unpacker = zlib.decompressobj()
    data = np.frombuffer(unpacker.decompress(packed, height * (stride + 1)), np.uint8)
    if data.size != height * (stride + 1):
        raise ValueError("the PNG is cut or damaged")
    pixels = _unfiltered(data.reshape(height, stride + 1), channels).reshape(height, width, channels)
    if colour == 3:
        colours = np.frombuffer(palette, np.uint8).reshape(-1, 3)
        if pixels.size and pixels.max() >= len(colours):
            raise ValueError("the PNG has more colours than its palette")
        pixels = colours[pixels[..., 0]]
    return turned(pixels, turn)


def orientation(exif: bytes) -> int:
    """The orientation that EXIF states, 1 to 8; 1, as it is, where it states none."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or len(exif) < 10:
        return 1
    with suppress(struct.error):  # cut or damaged: as if there were none
        start: int = struct.unpack(order + "I", exif[4:8])[0]
        (entries,) = struct.unpack(order + "H", exif[start : start + 2])
        for i in range(entries):
            tag, _, _, value = struct.unpack(order + "HHIH", exif[start + 2 + 12 * i : start + 12 + 12 * i])
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    return 1


def turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Pixels (H, W, channels) as they are to be seen."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    rows, columns = (slice(None, None, -1 if orientation in those else 1) for those in ((3, 4, 7, 8), (2, 3, 6, 7)))
    return pixels[rows, columns]


def _unfiltered(lines: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Undo each line's PNG filter: its bytes are differences from a prediction by their left and upper neighbours."""
    out = np.zeros((len(lines), lines.shape[1] - 1), np.uint8)
    above = np.zeros(out.shape[1], np.uint8)
    for y, line in enumerate(lines):
        kind, values = int(line[0]), line[1:]
        if kind == 0:
            above = values
        elif kind == 1:
            above = np.cumsum(values.reshape(-1, channels), axis=0, dtype=np.uint8).ravel()
        elif kind == 2:
            above = values + above
        elif kind in (3, 4):
            above = _by_both(values.tolist(), above.tolist(), channels, kind == 4)
        else:
            raise ValueError(f"the PNG is damaged: no filter {kind}")
        out[y] = above
    return out


def _by_both(values: list[int], above: list[int], channels: int, paeth: bool) -> NDArray[np.uint8]:
    line: list[int] = []
    for i, value in enumerate(values):
        left, up = (line[i - channels] if i >= channels else 0), above[i]
        if paeth:
            corner = above[i - channels] if i >= channels else 0
            guess = left + up - corner
            predicted = min((left, up, corner), key=lambda v: abs(guess - v))
        else:
            predicted = (left + up) // 2
        line.append((value + predicted) & 255)
    return np.array(line, np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file that `dubito export` wrote")
    parser.add_argument("inputs", nargs="+", help="pictures (PNG) or numbers (.npy)")
    parser.add_argument("--seed", type=int, help="fixes the draws; without one they are fresh")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object for programs")
    args = parser.parse_args()
    try:
        model = EdgeModel(args.model, args.threads)
        rows = []
        for path in args.inputs:
            answers = model.answers(model.predict(model.read(path), args.seed))
            rows += [{"input": path if len(answers) == 1 else f"{path}[{i}]", **row} for i, row in enumerate(answers)]
    except EdgeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if args.json:
        print(json.dumps({"predictions": rows, "samples": model.samples}))
        return
    for row in rows:
        doubt = (
            "" if row["ood"] is None else f"  OOD {'yes' if row['ood']['flag'] else 'no'} ({row['ood']['score']:.4f})"
        )
        if "label" in row:
            fits = "" if row["prediction_set"] is None else f"  set {{{', '.join(row['prediction_set'])}}}"
            print(f"{row['input']}: {row['label']} {row['max_probability']:.4f}{fits}{doubt}")
        else:
            names = f"{', '.join(row['targets'])} " if "targets" in row else ""
            print(f"{row['input']}: {names}{row['mean']} interval {row['interval']}{doubt}")


if __name__ == "__main__":
    main()
