"""Where models run and in what: every fallback runs, and says why in one line."""

import asyncio
import json
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from dubito.models.errors import DubitoError, NumericsError
from dubito.models.manifest import Card, Input, Manifest
from dubito.models.predictions.model import Model
from dubito.models.predictions.resident import reside
from dubito.service.engine.device import device_of, dtype_of, trusted
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.service.settings import Settings
from dubito.service.web.state import State
from tests import forked
from tests.faulty import FOUR, Faulty, known_anew, one_column, one_convolution, patches, those_right
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
def test_a_server_says_in_one_line_what_it_runs_in_and_bfloat16_runs_on_a_cpu(
    serve: Serve, convolved_digits: Path
) -> None:
    """Where the CPU computes right in it: elsewhere the line says that it does not, and float32 is what runs."""
    answers = {}
    trusts = bool(those_right(torch.bfloat16))
    doubt = "the settings say so" if trusts else trusted(torch.bfloat16, CPU)[1]
    for dtype, why in (("auto", "there is no GPU here"), ("bfloat16", doubt)):
        server = serve(convolved_digits, "--set", f"dtype={dtype}", "--set", "buckets=1,4")
        told = said(server.log.read_text())
        assert told["device"] == "cpu"
        assert told["asked"] == {"auto": "float32", "bfloat16": "bfloat16"}[dtype]
        assert told["dtype"] == (told["asked"] if trusts else "float32")
        assert told["why"] == why
        ask = {"inputs": X.tolist(), "samples": 32, "seed": 1}
        reply = httpx.post(f"{server.url}/v1/models/digits/predict", json=ask, timeout=60).json()
        answers[dtype] = np.array([row["probabilities"] for row in reply["predictions"]])
    assert (0 if trusts else -1) < np.abs(answers["auto"] - answers["bfloat16"]).max() < 0.05


def test_a_type_that_this_device_gets_wrong_is_not_trusted() -> None:
    for such in (patches, one_column):
        with known_anew(), Faulty(such):
            dtype, fault = trusted(torch.bfloat16, CPU)
            assert dtype == torch.float32
            assert fault is not None
            assert fault.startswith("this cpu computes wrongly in bfloat16: a convolution of (2, ")
            assert trusted(torch.float32, CPU) == (torch.float32, None)
        with known_anew(), Faulty(such, torch.float32), pytest.raises(NumericsError, match="wrongly even in float32"):
            trusted(torch.bfloat16, CPU)


@pytest.mark.parametrize("method", ["deterministic", "ffg-u", "ffg-w"])
@pytest.mark.parametrize("asked", [torch.bfloat16, torch.float16])
def test_what_would_be_served_gives_right_answers(asked: torch.dtype, method: str) -> None:
    """Networks of the four convolutions in the type that the server would take, plans measured; against float32 without
    any. On a CPU with AMX this fails where `trusted` says nothing."""
    dtype, _ = trusted(asked, CPU)
    for x_shape, W_shape, options in FOUR:
        network = one_convolution(W_shape, options, method)
        model = Model(network, Manifest.model_construct(card=Card(input=Input(shape=x_shape[1:])), subnetwork=None))
        engine = Engine(reside(model, CPU, dtype), (1, 2), plan_seconds=0.2)
        engine.warm(4, threading.Lock())
        x = torch.randn(x_shape)
        (found,) = engine.answer([PredictRequest(x.numpy(), 4, 0, 4, 0.5, keep=True)])
        assert isinstance(found, PredictResult), found
        expected = model.predict(x, 4, 0, keep_outputs=True).outputs
        assert found.outputs is not None
        assert expected is not None
        error = (found.outputs.double() - expected.double()).abs().max() / expected.abs().max()
        assert error < 16 * max(torch.finfo(dtype).eps, 1e-5)


def test_a_server_on_a_faulty_cpu_says_so_once_and_computes_in_float32(
    caplog: pytest.LogCaptureFixture, small_digits: Path
) -> None:
    settings = Settings.model_validate(
        {"models": [small_digits], "dtype": "bfloat16", "buckets": (1, 4), "plan_seconds": 0.1, "device": "cpu"}
    )

    async def body() -> tuple[State, torch.dtype]:
        faulty = ThreadPoolExecutor(1, initializer=Faulty(patches).__enter__)  # the thread that loads models
        asyncio.get_running_loop().set_default_executor(faulty)
        state = State(settings)
        await state.start()
        assert state.repository is not None
        dtype = state.repository.get("digits").model.factors.dtype
        seen = {"model": "digits", "device": "cpu", "asked": "bfloat16", "dtype": "float32"}
        assert state.metrics.registry.get_sample_value("dubito_device_proven", seen) == 0
        assert state.metrics.registry.get_sample_value("dubito_ways_excluded", {"model": "digits"}) == 0
        await state.stop(1.0)
        return state, dtype

    with known_anew(), caplog.at_level(logging.INFO, "dubito"):
        _, dtype = asyncio.run(body())
    assert dtype == torch.float32
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert line.getMessage() == "models run"
    told = vars(line)
    assert (told["asked"], told["dtype"]) == ("bfloat16", "float32")
    assert told["why"].startswith("this cpu computes wrongly in bfloat16: a convolution of (2, 16, 16, 16)")


ALONE = """
import sys
sys.modules["triton"] = None  # as where it is not installed: to import it is an error, to look for it finds none
from contextlib import nullcontext
import numpy as np
import torch
from dubito.models import bayesianize, build, load, predict
from dubito.models.embedded import embedded
from dubito.models.predictions.resident import reside
from dubito.service.engine.budget import Budget
from dubito.service.engine.engine import Engine, PredictRequest
model = reside(load(embedded("digits")), torch.device("cpu"), torch.float32)
engine = Engine(model, (1, 4), share=Budget(1 << 30).share())
engine.warm(4, nullcontext())
(found,) = engine.answer([PredictRequest(np.zeros((2, 1, 8, 8), np.float32), 4, 0, 4, 0.5)])
assert np.isfinite(found.columns["probabilities"]).all()
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
import dubito.service.run
from dubito.models.numerics.hadamard import transform
network = bayesianize(build("mlp", inputs=4, hidden=[8], outputs=3), "whvi")
predict(network, network.factors(), torch.zeros(2, 4), 3, 0)
transform(torch.zeros(2, 256))
print("answered")
"""


@pytest.mark.slow
def test_models_are_served_without_triton_and_without_importing_the_compiler() -> None:
    """In a process of its own. The compiler takes two seconds of every command: arithmetic on the meta device would
    import it, where a file is checked, and so would modes that see every operator, where a device proves itself and
    memory is measured."""
    answer = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=180)
    assert answer.stdout == "[]\nanswered\n", answer.stderr
