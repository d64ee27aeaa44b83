"""The normals of a seed on a CPU by a few lines of C: numpy's numbers, bit for bit, in a quarter of the time.

numpy calls its bit generator through a pointer for each number. Here the words of SFC64 come in blocks, and sixteen of
them at a time go through its ziggurat: 98.8 % end there, and the rest take numpy's slower steps.
The code is compiled when a server starts, where there is a C compiler, and is kept in the user's cache folder.
"""

import ctypes
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dubito.models.disk import draft_of
from dubito.models.numerics.processor import features

log = logging.getLogger("dubito")
R, AREA = 3.6541528853610088, 0.00492867323399  # where the tail begins, and the area of a layer
LAYERS, MANTISSA = 256, 1 << 23
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-shared", "-fPIC")
SECONDS = 60  # to compile

SOURCE = r"""
#include <math.h>
#include <stdint.h>
#define WORDS 512
#define TOGETHER 16

typedef struct { uint64_t s[4]; uint32_t at, words[WORDS]; } State;

static const uint32_t ki[256] = {KI};
static const float wi[256] = {WI};
static const float fi[256] = {FI};

static void refill(State *g) {
    uint64_t a = g->s[0], b = g->s[1], c = g->s[2], w = g->s[3];
    for (int i = 0; i < WORDS; i += 2) {
        const uint64_t t = a + b + w++;
        a = b ^ (b >> 11);
        b = c + (c << 3);
        c = ((c << 24) | (c >> 40)) + t;
        g->words[i] = (uint32_t)t;
        g->words[i + 1] = (uint32_t)(t >> 32);
    }
    g->s[0] = a; g->s[1] = b; g->s[2] = c; g->s[3] = w;
    g->at = 0;
}

static uint32_t next_word(State *g) {
    if (g->at == WORDS) refill(g);
    return g->words[g->at++];
}

static float next_float(State *g) { return (next_word(g) >> 8) * (1.0f / 16777216.0f); }

static float one(State *g) {
    for (;;) {
        const uint32_t r = next_word(g), rabs = (r >> 9) & 0x7fffff;
        const int idx = r & 0xff;
        float x = rabs * wi[idx];
        if ((r >> 8) & 1) x = -x;
        if (rabs < ki[idx]) return x;
        if (idx == 0) {
            for (;;) {
                const float xx = -INVERSE_R * log1pf(-next_float(g));
                const float yy = -log1pf(-next_float(g));
                if (yy + yy > xx * xx) return ((rabs >> 8) & 1) ? -(TAIL + xx) : TAIL + xx;
            }
        }
        if (((fi[idx - 1] - fi[idx]) * next_float(g) + fi[idx]) < exp(-0.5 * x * x)) return x;
    }
}

static void fill_one(State *g, float *out, int64_t n) {
    int64_t done = 0;
    while (done < n) {
        if (n - done >= TOGETHER && g->at + TOGETHER <= WORDS) {
            const uint32_t *words = g->words + g->at;
            uint32_t slow = 0;
            for (int i = 0; i < TOGETHER; i++) {
                const uint32_t r = words[i], rabs = (r >> 9) & 0x7fffff, idx = r & 0xff;
                const float x = (float)(int32_t)rabs * wi[idx];
                out[done + i] = (r >> 8) & 1 ? -x : x;
                slow |= (uint32_t)(rabs >= ki[idx]) << i;
            }
            const int fine = slow ? __builtin_ctz(slow) : TOGETHER;
            g->at += fine;
            done += fine;
            if (!slow) continue;
        }
        out[done++] = one(g);
    }
}

void fill(State *g, float *out, int64_t rows, const int64_t *sizes, int64_t parts) {
    for (int64_t row = 0; row < rows; row++) {
        float *part = out;
        for (int64_t i = 0; i < parts; i++) {
            fill_one(g, part + row * sizes[i], sizes[i]);
            part += rows * sizes[i];
        }
    }
}
"""


class _State(ctypes.Structure):
    _fields_ = (("s", ctypes.c_uint64 * 4), ("at", ctypes.c_uint32), ("words", ctypes.c_uint32 * 512))


class NativeGenerator:
    """The stream of numpy's SFC64 of one seed."""

    def __init__(self, seed: int, fill: Callable[..., None]) -> None:
        self._fill, state = fill, np.random.SFC64(seed).state["state"]["state"]
        self._state = _State((ctypes.c_uint64 * 4)(*state.tolist()), 512)
        self._at = ctypes.addressof(self._state)

    def fill(self, out: NDArray[np.float32], rows: int, parts: NDArray[np.int64]) -> None:
        """Fill a contiguous array with the next normals of so many rows, whose parts have these sizes: (rows, size) of
        the first part, then of the second, and so on."""
        self._fill(self._at, out.ctypes.data, rows, parts.ctypes.data, len(parts))


_fill: Callable[..., None] | None = None


def generator(seed: int) -> NativeGenerator | None:
    """A generator for the seed; None where nothing was compiled."""
    return None if _fill is None else NativeGenerator(seed, _fill)


def prepare(folder: Path | None) -> bool:
    """Compile the generator, or load it from the folder, and check its numbers; False where there is none."""
    global _fill
    if _fill is None and folder is not None:
        try:
            _fill = _checked(_library(folder))
        except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError) as error:
            log.info("normals come from numpy", extra={"why": str(error)[:200]})
    return _fill is not None


def _library(folder: Path) -> Path:
    """The compiled library in the folder, whose name holds the checksum of what it was made from."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    source = _source()
    key = hashlib.sha256(repr((source, FLAGS, platform.machine(), features())).encode()).hexdigest()[:32]
    path, sums = folder / f"normals-{key}.so", folder / f"normals-{key}.sha256"
    try:
        if hashlib.sha256(path.read_bytes()).hexdigest() == sums.read_text():
            return path
    except OSError:
        pass
    if compiler is None:
        raise RuntimeError("there is no C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path)
    try:
        command = [*compiler.split(), *FLAGS, "-x", "c", "-", "-o", str(draft), "-lm"]
        run = subprocess.run(command, input=source.encode(), capture_output=True, timeout=SECONDS, check=False)
        if run.returncode:
            raise RuntimeError(f"{compiler} fails: {run.stderr.decode(errors='replace')[:200]}")
        content = draft.read_bytes()
        draft.replace(path)
        sums.write_text(hashlib.sha256(content).hexdigest())
    finally:
        draft.unlink(missing_ok=True)
    return path


def _checked(path: Path) -> Callable[..., None]:
    """The function of the library, after its numbers were compared with numpy's."""
    library: Any = ctypes.CDLL(str(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.fill.argtypes, library.fill.restype = (pointer, pointer, number, pointer, number), None
    for seed, sizes in ((0, (1, 15, 16, 17, 200_000)), (1, (500, 511, 512, 513, 100_000))):
        ours, theirs = NativeGenerator(seed, library.fill), np.random.Generator(np.random.SFC64(seed))
        for n in sizes:
            out = np.empty(n, np.float32)
            ours.fill(out, 1, np.array([n]))
            if not np.array_equal(out, theirs.standard_normal(n, np.float32)):
                raise RuntimeError("the compiled generator does not give numpy's numbers")
    function: Callable[..., None] = library.fill
    return function


def _source() -> str:
    """The C code, with the tables of numpy's ziggurat: layers of equal area below exp(−x²/2)."""
    k, w, f = [0] * LAYERS, [0.0] * LAYERS, [1.0] * LAYERS
    x = R
    w[-1], f[-1] = x / MANTISSA, math.exp(-0.5 * x * x)
    k[0], w[0] = round(x * f[-1] / AREA * MANTISSA), AREA / f[-1] / MANTISSA
    for i in range(LAYERS - 2, 0, -1):
        inner = math.sqrt(-2 * math.log(AREA / x + f[i + 1]))
        k[i + 1], w[i], f[i], x = round(inner / x * MANTISSA), inner / MANTISSA, math.exp(-0.5 * inner * inner), inner
    numbers = {
        "KI": ", ".join(map(str, k)),
        "WI": ", ".join(f"{float(np.float32(v)).hex()}f" for v in w),
        "FI": ", ".join(f"{float(np.float32(v)).hex()}f" for v in f),
        "INVERSE_R": f"{float(np.float32(1 / R)).hex()}f",
        "TAIL": f"{float(np.float32(R)).hex()}f",
    }
    source = SOURCE
    for name, text in numbers.items():
        source = source.replace(
            f"{{{name}}}" if name in ("KI", "WI", "FI") else name, f"{{{text}}}" if "," in text else text
        )
    return source
