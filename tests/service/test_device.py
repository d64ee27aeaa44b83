"""Where models run and in what: every fallback runs, and says why in one line."""

import json
import subprocess
import sys
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dubito.models.errors import DubitoError
from dubito.service.device import device_of, dtype_of
from tests import forked
from tests.service.conftest import Serve

CPU, GPU = torch.device("cpu"), torch.device("cuda")
X = np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)
here = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@here
def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error() -> None:
    assert device_of("auto") == device_of("cpu") == CPU
    with pytest.raises(DubitoError, match="finds no GPU here; take --device cpu or auto"):
        device_of("cuda")
    answer = forked.run("serve", "--device", "cuda", "--port", "0")
    assert answer.returncode == 2
    (line,) = answer.stderr.splitlines()
    assert line.startswith("error: ")
    assert "no GPU" in line


@pytest.mark.parametrize(
    ("capability", "dtype", "why"),
    [
        ((7, 5), torch.float32, "Old GPU has no bfloat16 of its own"),
        ((8, 0), torch.bfloat16, "the GPU has it"),
        ((9, 0), torch.bfloat16, "the GPU has it"),
    ],
)
def test_auto_is_bfloat16_where_a_gpu_has_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    assert dtype_of("auto", GPU) == (dtype, why)
    assert dtype_of("float16", GPU)[0] == torch.float16
    assert dtype_of("auto", CPU) == (torch.float32, "models run on the CPU")


def said(log: str) -> dict[str, Any]:
    (line,) = [told for line in log.splitlines() if (told := json.loads(line))["message"] == "models run"]
    return line  # type: ignore[no-any-return]


@here
def test_a_server_says_in_one_line_what_it_runs_in_and_bfloat16_runs_on_a_cpu(serve: Serve) -> None:
    answers = {}
    for dtype, why in (("auto", "there is no GPU here"), ("bfloat16", "the settings say so")):
        server = serve("--set", f"dtype={dtype}", "--set", "buckets=1,4")
        told = said(server.log.read_text())
        assert told["device"] == "cpu"
        assert told["dtype"] == {"auto": "float32", "bfloat16": "bfloat16"}[dtype]
        assert told["why"] == why
        ask = {"inputs": X.tolist(), "samples": 32, "seed": 1}
        reply = httpx.post(f"{server.url}/v1/models/digits/predict", json=ask, timeout=60).json()
        answers[dtype] = np.array([row["probabilities"] for row in reply["predictions"]])
    assert 0 < np.abs(answers["auto"] - answers["bfloat16"]).max() < 0.05


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # as where it is not installed: to import it is an error, to look for it finds none
from contextlib import nullcontext
import numpy as np
import torch
from dubito.models import bayesianize, build, load, predict
from dubito.models.embedded import embedded
from dubito.models.resident import reside
from dubito.service.engine import Ask, Engine
import dubito.service.run
model = reside(load(embedded()), torch.device("cpu"), torch.float32)
engine = Engine(model, (1, 4))
engine.warm(4, nullcontext())
(found,) = engine.answer([Ask(np.zeros((2, 1, 8, 8), np.float32), 4, 0, 4, 0.5)])
assert np.isfinite(found.columns["probabilities"]).all()
network = bayesianize(build("mlp", inputs=4, hidden=[8], outputs=3), "whvi")
predict(network, network.factors(), torch.zeros(2, 4), 3, 0)
print("answered")
"""


def test_without_triton_everything_runs() -> None:
    answer = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=180)
    assert answer.stdout == "answered\n", answer.stderr
