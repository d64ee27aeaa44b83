"""A traced network in ONNX: branches on sizes, class tokens, masks and attention of one's own, still Bayesian."""

from pathlib import Path

import pytest
import torch

from dubito.deploy.edge.check import parity
from dubito.deploy.edge.export import export
from dubito.models import bayesianize, load, save
from dubito.models.manifest import Card, Input
from tests.deploy.test_edge_export import inputs_for, written
from tests.models.test_tracing import OWN
from tests.models.test_window_attention import SHAPE, SWINS

CLOSE = 1e-4  # of every output, in float32


NETWORKS = OWN | {f"swin {kind}": (make, SHAPE) for kind, make in SWINS.items()}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "swin v1", "swin v2")]


@pytest.mark.parametrize("name", ["own", "causal", *SLOW])
def test_a_traced_network_is_exported_as_its_class_would_be(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = bayesianize(make().eval(), "ffg-u", inducing=2, unsupported="leave")
    save(network, tmp_path / "m", card=Card(input=Input(shape=shape)))
    model = load(tmp_path / "m")
    path = written(export(model, samples=3), tmp_path)
    assert parity(path, model, inputs_for(model)).largest < CLOSE
