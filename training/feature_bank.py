"""Makes a feature bank: a few points that represent the features of the training data."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dubito.models.network.feature_bank import FeatureBank
from dubito.models.network.features import AllFeatures, last_linear, watch
from dubito.models.network.network import BayesianNetwork, Draws, NetworkFactors
from dubito.models.network.plan import cheapest
from dubito.models.predictions.model import Model
from dubito.models.predictions.prediction import evaluating, predict
from dubito.training.data.data import Examples, enter
from dubito.training.evaluation.predicting import declared_by
from dubito.training.seeds import stream

MOST_EXAMPLES = 20_000  # training examples from which the points are found
ROUNDS = 25  # of Lloyd's algorithm
ROWS = 1 << 14  # rows of features compared with all points at a time


def make_bank(model: Model, train: Examples, N: int, seed: int) -> FeatureBank | None:
    """A bank of N points, divided evenly among members; None where the outputs do not come from one linear layer."""
    layer = find_layer(model, enter(train.x[:1], declared_by(model)).to(model.device))
    if layer is None:
        return None
    features = unit_features(FeatureReader(model, *layer), train, MOST_EXAMPLES, seed)
    each = max(1, N // len(features))
    return FeatureBank.of(torch.stack([centres(own, each, seed) for own in features]), layer[0])


def find_layer(model: Model, x: Tensor) -> tuple[str, int] | None:
    """Name of the last linear layer and its number of features d, found by a pass of the posterior mean."""
    network, factors = model.network, model.factors
    bare = replace(factors, form=None, read=None)

    def run() -> Tensor:
        return bare.outputs(network, x[:1], Draws(1, None, 0), lambda B, K: cheapest(factors), 1)

    with evaluating(network), torch.inference_mode():
        name = last_linear(network.net, run)
    if name is None:
        return None
    layer = network.net.get_submodule(name)
    return name, int(layer.in_features)  # type: ignore[arg-type]


class FeatureReader:
    """Reads the features of a model: the inputs of the layer `name`, d numbers each."""

    def __init__(self, model: Model, name: str, d: int) -> None:
        watch(model.network.net.get_submodule(name))
        self.model, self.network = model, model.network
        self.factors: NetworkFactors = replace(model.factors, read=AllFeatures(d))

    def read(self, x: Tensor, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Logits (K, B, C) and features (K, B, d) of K draws; with 0, of the posterior mean, or of each member's."""
        network: BayesianNetwork = self.network
        prediction = predict(
            network, self.factors, x, samples, seed, keep_outputs=True, temperature=self.model.temperature
        )
        assert prediction.outputs is not None
        assert prediction.read is not None
        return prediction.outputs, prediction.read


def unit_features(reader: FeatureReader, train: Examples, most: int, seed: int, samples: int = 0) -> Tensor:
    """Features of some training inputs, scaled to length 1, with the posterior mean of E members: (E, n, d).

    With `samples`, of as many draws, new ones for each 512 inputs: (samples, n, d).
    """
    declared = declared_by(reader.model)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(stream(seed, "bank")))[:most]
    device = reader.model.device
    chunks = [
        F.normalize(reader.read(enter(train.x[rows].to(device), declared), samples, stream(seed, "bank", i))[1], dim=-1)
        for i, rows in enumerate(order.sort().values.split(512))
    ]
    return torch.cat(chunks, 1)


def centres(features: Tensor, N: int, seed: int) -> Tensor:
    """N cluster centres of the features (n, d), by Lloyd's algorithm started at N of them: (N, d).

    A centre that loses all its features restarts at the feature farthest from all centres.
    """
    if len(features) <= N:
        return features
    rng = torch.Generator().manual_seed(stream(seed, "centres"))
    points = features[torch.randperm(len(features), generator=rng)[:N].to(features.device)].clone()
    for _ in range(ROUNDS):
        squares, nearest = (torch.cat(parts) for parts in zip(*_nearest(features, points), strict=True))
        sums = torch.zeros_like(points).index_add_(0, nearest, features)
        counts = torch.bincount(nearest, minlength=N)
        empty = counts == 0
        points = sums / counts.clamp(min=1)[:, None]
        points[empty] = features[squares.topk(int(empty.sum())).indices]
    return points


def _nearest(features: Tensor, points: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Squared distances to the nearest points and the indices of these, in chunks of features."""
    lengths = points.square().sum(-1)
    for some in features.split(ROWS):
        least, which = (lengths - 2 * some @ points.T).min(-1)
        yield least + some.square().sum(-1), which
