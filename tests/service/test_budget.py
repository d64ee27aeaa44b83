"""The memory plan: passes are never thought smaller than they are, and what does not fit goes in parts."""

import logging
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dubito.models import bayesianize, load
from dubito.models.embedded import embedded
from dubito.models.errors import DubitoError
from dubito.models.manifest import Card, Input, Manifest
from dubito.models.network.layers import current
from dubito.models.numerics.normals import Normals
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import predict
from dubito.models.predictions.resident import reside
from dubito.service.engine.bank import bytes_of_sample
from dubito.service.engine.budget import TRIED, Budget, MemoryShare, peak_of
from dubito.service.engine.engine import Engine, PredictRequest, PredictResult
from dubito.service.engine.fusion import Unit
from tests import forked
from tests.service.test_batcher import network_of

CPU = torch.device("cpu")
BUCKETS = (1, 4, 16, 64)
X = np.random.default_rng(0).normal(size=(70, 1, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def model(convolved_digits: Path) -> Model:
    return reside(load(convolved_digits), CPU, torch.float32)


def bounded(model: Model, limit: int) -> Engine:
    share = Budget(limit).share()
    share.sample = bytes_of_sample(model)
    return Engine(model, BUCKETS, share=share)


def passes(engine: Engine) -> list[tuple[int, int]]:
    """(B, K) of each pass from now on."""
    seen: list[tuple[int, int]] = []
    first = next(module for module in network_of(engine).modules() if isinstance(module, Unit))

    def note(unit: Unit, arguments: tuple[Tensor]) -> None:
        run = current(unit.layer, arguments[0])
        seen.append((run.B, run.K))

    first.register_forward_pre_hook(note)
    return seen


def answer(engine: Engine, ask: PredictRequest) -> PredictResult:
    (found,) = engine.answer([ask])
    assert isinstance(found, PredictResult), found
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_pass_is_never_estimated_smaller_than_it_is(seed: int) -> None:
    """Against a pass of many moments, each with weights and activations of its own, some of it the same for any K."""
    rng = np.random.default_rng(seed)
    weights, activations, common = rng.lognormal(8, 2, 30), rng.lognormal(6, 2, 30), rng.lognormal(4, 1, 30)

    def truth(B: int, K: int) -> float:
        return float((common + K * (weights + B * activations)).max())

    share = MemoryShare(Budget(10**12))
    for B in (1, 4, 16):
        share.measured(B, int(np.ceil(truth(B, TRIED))))
    for B in (1, 2, 3, 4, 9, 16, 17, 64, 1000):
        for K in (1, 2, 7, 64):
            assert share.need(B, K) >= truth(B, K) - 1
    assert share.need(16, 2) <= truth(16, 2) + 1  # and it is right where it was measured


def test_what_lives_at_the_same_time_is_counted() -> None:
    def run() -> Tensor:
        a = torch.zeros(1000)
        b = a + 1  # two of them
        del a
        c = (b.view(10, 100) * 2).view(-1)  # two again: a view is no memory
        del b
        return torch.cat([c, c])  # three

    assert peak_of(run, CPU) == 3 * 4000
    layer, x = nn.Linear(10, 100), torch.zeros(5, 10)
    with torch.inference_mode():
        assert peak_of(lambda: layer(x).relu().sum(), CPU) == 2 * 4 * 500


def test_batches_that_do_not_fit_go_in_parts_to_the_same_answer(
    model: Model, convolved_digits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, wide = Engine(reside(load(convolved_digits), CPU, torch.float32), BUCKETS), bounded(model, 1 << 40)
    wide.warm(20, nullcontext())
    assert wide.buckets == BUCKETS
    tight = bounded(model, int(wide.share.need(16, 2)))
    with caplog.at_level(logging.WARNING, "dubito"):
        tight.warm(20, nullcontext())
    assert [getattr(record, "batches", None) for record in caplog.records] == [[64]]
    assert tight.buckets == (1, 4, 16)
    seen = passes(tight)
    for rows, K in ((1, 20), (5, 20), (64, 20), (70, 3)):
        for samples in (K, "auto", 0):
            ask = PredictRequest(X[:rows], samples, 5, K, 0.05)
            mine, theirs = answer(tight, ask), answer(whole, ask)
            for name, column in mine.columns.items():
                np.testing.assert_allclose(column, theirs.columns[name], rtol=1e-4, atol=1e-5)
    left = tight.share.budget.left
    assert seen
    assert [(B, K) for B, K in seen if tight.share.need(B, K) > left] == []
    assert max(K for _, K in seen) > 2  # small batches take many samples at once


def test_a_budget_for_nothing_is_an_error_in_one_line(model: Model) -> None:
    with pytest.raises(DubitoError, match="memory_bytes"):
        bounded(model, 1_000).warm(4, nullcontext())
    answer = forked.run("serve", embedded("digits"), "--port", "0", "--set", "memory_bytes=1000")
    assert answer.returncode == 2
    assert "the setting memory_bytes allows" in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr


def test_what_others_hold_is_not_left() -> None:
    budget = Budget(1000)
    first, second = budget.share(), budget.share()
    first.kinds = {"resident": lambda: 300, "bank": lambda: 200, "draws": lambda: 10**6}
    second.measured(1, 400)
    assert budget.left == 500
    assert second.fits(1, 2)
    second.kinds["plans"] = lambda: 200
    assert not second.fits(1, 2)
    budget.release(first)
    assert second.fits(1, 2)
    assert budget.held("plans") == 200


def test_a_cpu_has_no_bound_unless_one_is_set() -> None:
    assert Budget.of(0, CPU).limit is None
    assert Budget.of(5, CPU).limit == 5


class Tight(nn.Module):
    """Stands for a device with room for few rows, and tells what it was asked for."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.fc, self.room = nn.Linear(4, 3), room
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError(f"{len(x)} rows")
        return self.fc(x)  # type: ignore[no-any-return]


def test_out_of_memory_halves_the_samples_first_and_then_the_rows() -> None:
    torch.manual_seed(0)
    for room, expected in ((12, (6, 2)), (5, (3, 1))):  # inputs and samples of the passes that came through
        network = bayesianize(Tight(room), "ffg-u", inducing=2)
        asked: list[tuple[int, int]] = []
        network.net.fc.register_forward_pre_hook(  # type: ignore[union-attr]
            lambda layer, x, asked=asked: asked.append((current(layer, x[0]).B, current(layer, x[0]).K))
        )
        outputs = predict(network, network.factors(), torch.randn(6, 4), 8, 0, keep_outputs=True).outputs
        assert outputs is not None
        checked = {(1, 1), (1, 2)}  # of one input, foldability is checked
        assert {one for one in asked if one not in checked} == {expected}


def test_out_of_memory_while_drawing_changes_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network, x = bayesianize(Tight(1000), "ffg-u", inducing=2), torch.randn(3, 4)
    expected = predict(network, network.factors(), x, 11, 0, keep_outputs=True).outputs
    rows = Normals.rows

    def few(self: Normals, K: int, n: int) -> Tensor:
        if K > 2:
            raise torch.OutOfMemoryError(f"{K} samples")
        return rows(self, K, n)

    monkeypatch.setattr(Normals, "rows", few)
    told = predict(network, network.factors(), x, 11, 0, keep_outputs=True).outputs
    assert expected is not None
    torch.testing.assert_close(told, expected)
    model = Model(network, Manifest.model_construct(card=Card(input=Input(shape=(4,)))))
    found = answer(Engine(model, (1, 4)), PredictRequest(x.numpy(), 11, 0, 11, 0.5))
    np.testing.assert_allclose(found.columns["probabilities"], expected.softmax(-1).mean(0), atol=1e-5)
