"""Distances of features to a bank, against a search in float64; how they reach every kind of answer, and files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dubito.models import bayesianize, build, load, save
from dubito.models.artifact import artifact
from dubito.models.conversion.conversion import ensemble
from dubito.models.errors import ArtifactError, ConversionError
from dubito.models.manifest import Calibration, Card, Input
from dubito.models.network.feature_bank import FeatureBank
from dubito.models.network.features import is_linear, last_linear, watched
from dubito.models.network.linearised import Subnetwork
from dubito.models.network.network import BayesianNetwork, Draws
from dubito.models.network.plan import cheapest
from dubito.models.posteriors.subnetwork import SubnetworkEntry
from dubito.models.predictions.answers import scores
from dubito.models.predictions.prediction import Job, evaluating, predict
from dubito.models.predictions.uncertainty import Classified
from tests.small_models import mlp

K, SEED, D = 5, 3, 12
METHODS: dict[str, dict[str, Any]] = {
    "ffg-u": {"inducing": 4, "sigma_max": 0.5, "spread": 0.4},
    "whvi": {},
    "mc-dropout": {},
    "ffg-w": {},
    "ensemble-u": {"inducing": 4, "members": 3, "spread": 0.5},
    "deterministic": {},
}


def network_of(method: str, **more: Any) -> BayesianNetwork:
    torch.manual_seed(1)
    net = mlp(6, 10, D, 3, activation="tanh")
    if method == "ensemble-w":
        return ensemble([mlp(6, 10, D, 3, activation="tanh") for _ in range(3)])
    return bayesianize(net, method, **METHODS[method], **more).eval()


def head(network: BayesianNetwork) -> str:
    names: list[str] = [name for name, module in network.net.named_modules() if is_linear(module)]
    return names[-1]


def with_bank(network: BayesianNetwork, N: int = 9) -> FeatureBank:
    E = max(1, network.factors().members)
    points = torch.randn(E, N, D, generator=torch.Generator().manual_seed(7))
    bank = FeatureBank.of(nn.functional.normalize(points, dim=-1), head(network))
    network.set_feature_bank(bank)
    return bank


def features_by_hand(network: BayesianNetwork, x: Tensor, draws: Draws) -> list[Tensor]:
    """What the last layer is given, one draw at a time, by a hook of the test's own."""
    seen: list[Tensor] = []
    bare = network.factors()
    layer = network.net.get_submodule(head(network))
    hook = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0].clone()))
    with evaluating(network), torch.inference_mode():
        for k in range(draws.K):
            network.run(x, bare, draws.part(k, 1), cheapest(bare))
    hook.remove()
    return seen


def by_search(features: Sequence[Tensor], points: NDArray[np.float64], members: Sequence[int]) -> NDArray[np.float64]:
    """The mean over draws of the distance of each row, made of length 1, to the nearest point."""
    total = np.zeros(len(features[0]))
    for each, member in zip(features, members, strict=True):
        z = each.double().numpy()
        z = z / np.sqrt((z**2).sum(1, keepdims=True))
        total += np.array([min(np.linalg.norm(row - p) for p in points[member]) for row in z])
    return total / len(features)


@pytest.mark.parametrize("method", [*METHODS, "ensemble-w"])
def test_the_score_is_the_mean_distance_to_the_nearest_point(method: str) -> None:
    network = network_of(method)
    bank = with_bank(network)
    points = bank.levels.double().numpy() * bank.scale.double().numpy().reshape(*bank.levels.shape[:2], 1)
    x = torch.randn(8, 6)
    factors = network.factors()
    drawn = K if factors.random else 1
    found = predict(network, factors, x, K, SEED).summary
    job = Job.of(network, factors, x, SEED, most=drawn)
    draws = job.draws(0, drawn, 8)
    members = draws.member(factors.members).tolist() if factors.members else [0] * drawn
    expected = by_search(features_by_hand(network, x, draws), points, members)
    assert isinstance(found, Classified)
    assert found.distance is not None
    assert np.abs(found.distance.numpy() - expected).max() < 1e-5  # float32 under a square root
    assert torch.equal(scores(found)["knn"], found.distance)
    if factors.normals:  # other draws have other features
        other = predict(network, factors, x, K, SEED + 1).summary
        assert (vars(other)["distance"] - found.distance).abs().max() > 1e-5


def test_points_in_int8_are_near_what_they_stand_for() -> None:
    points = nn.functional.normalize(torch.randn(2, 50, 64, dtype=torch.double), dim=-1)
    stored = FeatureBank.of(points.float(), "fc").reading().points.double()
    step = points.abs().amax(-1) / 127
    assert ((stored - points).abs().amax(-1) <= 0.5 * step + 1e-6).all()


def test_other_answers_are_as_without_a_bank(tmp_path: Path) -> None:
    """Outputs, their summary and the temperature's effect are the same numbers; passes in blocks change nothing."""
    network = network_of("ffg-u")
    x = torch.randn(7, 6)
    before = predict(network, network.factors(), x, K, SEED, keep_outputs=True, temperature=1.7)
    with_bank(network)
    factors = network.factors()
    after = predict(network, factors, x, K, SEED, keep_outputs=True, temperature=1.7)
    assert before.outputs is not None
    assert after.outputs is not None
    assert torch.equal(before.outputs, after.outputs)
    small = predict(network, factors, x, K, SEED, max_rows=3, temperature=1.7).summary
    for name, value in vars(before.summary).items():
        if value is not None:
            assert torch.allclose(value, vars(after.summary)[name], atol=1e-6)
            assert torch.allclose(value, vars(small)[name], atol=1e-5)
    assert isinstance(after.summary, Classified)
    assert after.summary.distance is not None
    cold = predict(network, factors, x, K, SEED).summary
    assert torch.allclose(after.summary.distance, vars(cold)["distance"], atol=1e-6)  # no temperature moves features
    assert torch.allclose(after.summary.distance, vars(small)["distance"], atol=1e-5)


def test_settled_answers_have_the_distance_of_their_draws(tmp_path: Path) -> None:
    network = network_of("ffg-u")
    with_bank(network)
    path = tmp_path / "model.safetensors"
    save(network, path, card=Card(input=Input(shape=(6,))))
    model, x = load(path), torch.randn(40, 6)
    found = model.predict(x, "auto", SEED, tolerance=0.015, max_samples=64)
    assert found.settled is not None
    assert isinstance(found.summary, Classified)
    assert found.summary.distance is not None
    drawn = found.settled.samples.tolist()
    assert len(set(drawn)) > 1  # three to eight numbers of draws, for twenty networks
    for i, k in enumerate(drawn):
        alone = model.predict(x[i : i + 1], k, SEED).summary
        assert isinstance(alone, Classified)
        assert alone.distance is not None
        assert abs(float(alone.distance[0] - found.summary.distance[i])) < 1e-5


def test_a_linearised_network_has_the_features_of_its_weights(tmp_path: Path) -> None:
    network = network_of("deterministic")
    S = 6
    entry = SubnetworkEntry(size=S, select="random", prior_precision=1.0, examples=1)
    network.subnetwork = Subnetwork.of(torch.arange(S) * 11, 3 * torch.eye(S), entry)
    bank = with_bank(network)
    path = tmp_path / "model.safetensors"
    save(network, path, card=Card(input=Input(shape=(6,))))
    model, x = load(path), torch.randn(5, 6)
    points = bank.levels.double().numpy() * bank.scale.double().numpy().reshape(1, -1, 1)
    with torch.no_grad():
        features: Tensor = network.net[:-1](x)  # type: ignore[index]
    expected = by_search([features], points, [0])
    for found in (model.predict(x, 4, 0), model.predict(x, method="probit"), model.predict(x, "auto", 0)):
        assert isinstance(found.summary, Classified)
        assert found.summary.distance is not None
        assert np.abs(found.summary.distance.numpy() - expected).max() < 1e-5


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_a_bank_comes_back_from_a_file(precision: str, tmp_path: Path) -> None:
    network = network_of("ffg-u", layers={"5": "deterministic"})  # the last layer: an nn.Linear
    bank = with_bank(network)
    path = tmp_path / "model.safetensors"
    manifest = save(network, path, card=Card(input=Input(shape=(6,))), precision=precision)  # type: ignore[arg-type]
    assert manifest.format == 3
    model = load(path).to("cpu")
    again = model.network.feature_bank
    assert again is not None
    assert again.entry == bank.entry == manifest.feature_bank
    assert torch.equal(again.levels, bank.levels)
    assert torch.allclose(again.scale, bank.scale, rtol=1e-3)
    summary = model.predict(torch.randn(3, 6), 2, 0).summary
    assert isinstance(summary, Classified)
    assert summary.distance is not None
    network.set_feature_bank(None)
    plain = save(network, tmp_path / "plain.safetensors", card=Card(input=Input(shape=(6,))))
    assert (plain.format, "feature_bank" in plain.model_dump(mode="json")) == (1, False)


def test_a_bank_that_fits_no_layer_is_refused(tmp_path: Path) -> None:
    network = network_of("ffg-u")
    bank = with_bank(network)
    with pytest.raises(ConversionError, match="features of layer '1'; the network has no such linear layer"):
        network.set_feature_bank(FeatureBank(bank.levels, bank.scale, bank.entry.model_copy(update={"layer": "1"})))


def test_thresholds_of_knn_need_a_bank(tmp_path: Path) -> None:
    network = network_of("ffg-u")
    calibration = Calibration(
        false_positive_rate=0.05, coverage=0.9, measure="knn", thresholds={"knn": {0: 0.5}}, quantiles={0: 0.5}
    )
    with pytest.raises(ArtifactError, match="thresholds for knn, but no bank of features"):
        save(network, tmp_path / "model.safetensors", card=Card(input=Input(shape=(6,)), calibration=calibration))


def test_an_older_reader_is_told_the_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an energy that decides; a calibration by what format 1 knows still has that number."""
    network = network_of("ffg-u")
    for measure, expected in (("entropy", 1), ("energy", 3)):
        calibration = Calibration(
            false_positive_rate=0.05,
            coverage=0.9,
            measure=measure,  # type: ignore[arg-type]
            thresholds={measure: {0: 0.5}},  # type: ignore[dict-item]
            quantiles={0: 0.5},
        )
        path = tmp_path / "m.safetensors"
        assert save(network, path, card=Card(input=Input(shape=(6,)), calibration=calibration)).format == expected
    monkeypatch.setattr(artifact, "FORMATS", (1, 2))  # as it was before
    with pytest.raises(ArtifactError, match="its format is 3; this version of dubito reads format 1 and 2"):
        load(path)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.fc(x).relu())
        return out


class Words(nn.Module):
    """A layer that is given several vectors for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.view(-1, 2, 3)).mean(1)  # type: ignore[no-any-return]


def test_the_layer_that_makes_the_outputs_is_found() -> None:
    x = torch.randn(1, 1, 28, 28)
    cases: list[tuple[nn.Module, Tensor, str | None]] = [
        (build("lenet"), x, "11"),
        (build("cnn", width=4, hidden=8), x, "17"),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.Linear(5, 3), nn.Softmax(-1)), x, None),
        (nn.Sequential(nn.Conv2d(1, 3, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten()), x, None),
        (nn.Linear(9000, 2), torch.randn(1, 9000), None),
        (Twice(), torch.randn(1, 6), None),
        (Words(), torch.randn(1, 6), None),
    ]
    for net, given, expected in cases:
        net.eval()
        assert last_linear(net, lambda net=net, given=given: net(given)) == expected  # type: ignore[misc]
        assert not any(module._forward_hooks for module in net.modules())


def test_a_network_with_a_bank_can_be_made_bayesian_again() -> None:
    network = network_of("deterministic")
    with_bank(network)
    again = bayesianize(network.net, "ffg-u", inducing=4)
    assert len(again.layers) == 3
    assert not any(watched(layer) for layer in again.layers.values())


def test_threads_keep_their_features_apart(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    network = network_of("ffg-u")
    with_bank(network)
    factors = network.factors()
    inputs = [torch.randn(n, 6) for n in (1, 3, 8)] * 6
    alone = [predict(network, factors, x, K, SEED).summary for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: predict(network, factors, x, K, SEED).summary, inputs))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(vars(one)["distance"], vars(other)["distance"])
