"""The engine on a GPU; skipped, aloud, where there is none."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from dubito.models import bayesianize, build, load, save
from dubito.models.manifest import Card, Input
from dubito.models.model import Model
from dubito.models.network import Draws
from dubito.models.normals import Normals
from dubito.models.plan import cheapest
from dubito.models.resident import reside
from dubito.service.engine import Answered, Ask, Engine
from tests.service import interpreted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the GPU's engine is not tested")

SHAPE = (3, 32, 32)


def kept(path: Path, method: str, lam_max: float) -> Model:
    torch.manual_seed(0)
    network = bayesianize(build("resnet18-cifar"), method, inducing=16, lam_max=lam_max, members=3)
    save(network.eval(), path, card=Card(input=Input(shape=SHAPE)))
    return load(path)


@pytest.mark.parametrize("case", interpreted.CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels(case: tuple[int, ...], dtype: torch.dtype) -> None:
    interpreted.check_convolution(*case, dtype)  # type: ignore[arg-type, call-arg]


def test_normals_are_functions_of_their_place() -> None:
    interpreted.check_normals((1 << 52) + 12345, 7, 3, 5000)
    whole = Normals(5, torch.device("cuda")).rows(6, 1000)
    parts = Normals(5, torch.device("cuda"))
    assert torch.equal(whole, torch.cat([parts.rows(2, 1000), parts.rows(4, 1000)]))


@pytest.mark.parametrize("method", ["ffg-u", "ensemble-u", "ffg-w", "whvi"])
@pytest.mark.parametrize("lam_max", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_answers_as_the_network_does(
    method: str, lam_max: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Planned and captured, a seed's samples are those of the plain network in float32, near enough for the type."""
    model, device = kept(tmp_path / "m.safetensors", method, lam_max), torch.device("cuda")
    engine = Engine(reside(model, device, dtype), (1, 4), None, 30.0)
    engine.warm(8, nullcontext())
    assert engine.programs is not None
    assert bool(engine.programs.known) == (method != "ensemble-u")  # the order of its members is the host's
    torch.cuda.empty_cache()  # what a graph uses must not be among what is given back
    x = torch.randn(3, *SHAPE)
    (found,) = engine.answer([Ask(x.numpy(), 8, 3, 8, 0.05)])
    assert isinstance(found, Answered), found
    wide = load(tmp_path / "m.safetensors").to(device)
    noise = Normals(3, device).rows(8, wide.factors.normals)
    with torch.inference_mode():
        plan = cheapest(wide.factors)
        expected = wide.network.run(x.to(device), wide.factors, Draws(8, noise, 3), plan).softmax(-1).mean(0)
    np.testing.assert_allclose(
        found.columns["probabilities"], expected.cpu().numpy(), atol=1e-3 if dtype == torch.float32 else 3e-2
    )
    again, other = engine.answer([Ask(x.numpy(), 8, 3, 8, 0.05), Ask(x.numpy(), 8, None, 8, 0.05)])
    assert isinstance(again, Answered)
    assert isinstance(other, Answered)
    assert np.array_equal(found.columns["probabilities"], again.columns["probabilities"])
    assert not np.array_equal(found.columns["probabilities"], other.columns["probabilities"])
