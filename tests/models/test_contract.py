"""What every posterior of the dictionary keeps: marginals, KL, seeds, files, layers together, ONNX.

The oracles read the numbers of a layer's state and compute the dense law of W in numpy, from the papers' formulas: they
share no code with what they judge. A new kind needs one here; all else it gets by being in the dictionary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import scipy.linalg
import torch
from numpy.typing import NDArray
from torch import Tensor

from dubito.deploy.edge.check import parity
from dubito.deploy.edge.errors import ExportError
from dubito.deploy.edge.export import export
from dubito.deploy.edge.export import save as save_onnx
from dubito.deploy.edge.writers import WRITERS
from dubito.models import bayesianize, build, load, predict, save
from dubito.models.manifest import Card, Input, Manifest
from dubito.models.network.layers import BayesianLayer
from dubito.models.network.network import BayesianNetwork, as_matrix
from dubito.models.posteriors.dictionary import POSTERIORS, entry_class
from dubito.models.posteriors.dropout import DropoutFactors
from dubito.models.posteriors.protocol import Factors

Array = NDArray[Any]
SEED = 0
N = 20_000  # draws of each component

# small sizes, and noise that can be seen
OPTIONS: dict[str, dict[str, Any]] = {
    "ffg-u": {"inducing": (2, 3), "noise": "exact", "lam_max": 0.9, "sigma_max": 0.9},
    "fcg-u": {"inducing": (2, 3), "noise": "exact", "lam_max": 0.9, "sigma_max": 0.9},
    "ensemble-u": {"inducing": (2, 3), "noise": "exact", "lam_max": 0.9, "members": 3},
    "ffg-w": {"sigma_max": 0.9},
    "fcg-w": {"sigma_max": 0.9},
    "ensemble-w": {"members": 3},
    "mc-dropout": {"rate": 0.3},
    "whvi": {"D": 2},
    "whvi-column": {"D": 4},
    "gi": {"inducing": 6},
    "li": {"inducing": 6},
    "dgp": {"inducing": 6},
    "dsvi": {"inducing": 6},
}


@dataclass(frozen=True)
class Law:
    """An equal mixture of distributions of vec(W), rows stacked, the bias as the last column."""

    means: Array  # (components, n)
    covariance: Array  # (n, n)  of each component
    kl: float


@dataclass(frozen=True)
class State:
    """What an artifact holds of a layer."""

    tensors: Mapping[str, Array]
    entry: Mapping[str, Any]
    shape: tuple[int, int]

    def positive(self, name: str, floor: float, cap: float | None) -> Array:
        raw = self.tensors[f"{name}.raw"]
        return floor + (np.log1p(np.exp(raw)) if cap is None else (cap - floor) / (1 + np.exp(-raw)))

    def gaussian(self, name: str, cap: float | None, prior: float) -> tuple[Array, Array, float]:
        """Mean and covariance of a Gaussian over a flattened tensor, and its KL to N(0, prior²)."""
        m = self.tensors[f"{name}.centre.value"].ravel()
        root = np.eye(len(m))
        if f"{name}.below" in self.tensors:
            root[np.tril_indices(len(m), -1)] = self.tensors[f"{name}.below"]
            root /= np.linalg.norm(root, axis=1, keepdims=True)
        root = self.positive(f"{name}.spread", 1e-6, cap).ravel()[:, None] * root
        S = root @ root.T
        log_det = np.linalg.slogdet(S)[1] - 2 * len(m) * np.log(prior)
        return m, S, float((m @ m / prior**2 + np.trace(S) / prior**2 - len(m) - log_det) / 2)


def inducing(s: State) -> Law:
    """[Ritter21, eq. 34], V integrated out; R(λ) of eq. 8."""
    sigma, A, P = s.entry["sigma"], [], []
    for side in ("r", "c"):
        Z, D = s.tensors[f"Z_{side}.value"], s.positive(f"D_{side}", 1e-6, None)
        Psi = Z @ Z.T + np.diag(D**2)
        Psi += 1e-4 * np.diag(Psi).mean() * np.eye(len(Psi))
        A.append(Z.T @ np.linalg.inv(np.linalg.cholesky(Psi)).T)
        P.append(Z.T @ np.linalg.inv(Psi) @ Z)
    T, n = sigma * np.kron(*A), s.shape[0] * s.shape[1]
    lam = float(s.positive("lam", 1e-6, s.entry["lam_max"]))
    noise, R = (lam * sigma) ** 2 * (np.eye(n) - np.kron(*P)), n * (lam**2 / 2 - np.log(lam) - 0.5)
    if s.entry["method"] == "ensemble-u":
        return Law(s.tensors["law.points.value"].reshape(s.entry["members"], -1) @ T.T, noise, R)
    m, S, kl = s.gaussian("law", s.entry["sigma_max"], 1.0)
    return Law((T @ m)[None], T @ S @ T.T + noise, R + kl)


def weights(s: State) -> Law:
    if s.entry["method"] == "ensemble-w":
        points = s.tensors["law.points.value"].reshape(s.entry["members"], -1)
        return Law(points, np.zeros((points.shape[1],) * 2), 0.0)
    m, S, kl = s.gaussian("law", s.entry["sigma_max"], s.entry["sigma"])
    return Law(m[None], S, kl)


def dropout(s: State) -> Law:
    """[Gal16]: each input column is there, 1/(1 − rate) times as large, with probability 1 − rate; the bias stays."""
    W, rate = s.tensors["W.value"], s.entry["rate"]
    column = np.tile(np.arange(s.shape[1]), s.shape[0])
    dropped = (column[:, None] == column) & (column != s.shape[1] - 1)
    squares = (W[:, :-1] ** 2).sum() / (1 - rate) + (W[:, -1] ** 2).sum()
    w = W.ravel()
    return Law(w[None], np.outer(w, w) * dropped * rate / (1 - rate), squares / (2 * s.entry["sigma"] ** 2))


def whvi(s: State) -> Law:
    """[Rossi20]: W = S_1 H diag(g) H S_2 in blocks, linear in g; the bias stands beside it."""
    (d_out, columns), D = s.shape, s.entry["D"]
    d_in, H = columns - 1, scipy.linalg.hadamard(D) / np.sqrt(D)
    across, down = -(-d_in // D), -(-d_out // D)
    g, S, kl = s.gaussian("law", None, 1.0)

    def affine(T: Array) -> Law:
        b, S_b, kl_b = s.gaussian("bias", None, s.entry["sigma"])
        of_g = np.pad(T[:, :d_out, :d_in], ((0, 0), (0, 0), (0, 1))).reshape(len(g), -1).T
        of_b = np.eye(d_out * columns)[:, d_in::columns]
        return Law((of_g @ g + of_b @ b)[None], of_g @ S @ of_g.T + of_b @ S_b @ of_b.T, kl + kl_b)

    if s.entry["method"] == "whvi-column":
        each = -(-d_in // D**2)  # blocks of an output
        S_1, S_2 = s.tensors["S_1"].reshape(-1, D), s.tensors["S_2"]
        T = np.zeros((len(g), d_out, each * D * D))
        for b in range(d_out * each):
            o, place = divmod(b, each)
            for k in range(D):
                square = np.diag(S_1[b]) @ np.outer(H[:, k], H[k]) @ np.diag(S_2[b])
                T[b * D + k, o, place * D * D : (place + 1) * D * D] = square.ravel()
        return affine(T)
    T = np.zeros((len(g), down * D, across * D))
    for i in range(down):
        for j in range(across):
            S_1, S_2 = np.zeros(D), np.zeros(D)
            rows, cells = s.tensors["S_1"][j, i * D : (i + 1) * D], s.tensors["S_2"][i, j * D : (j + 1) * D]
            S_1[: len(rows)], S_2[: len(cells)] = rows, cells
            for k in range(D):
                block = np.diag(S_1) @ np.outer(H[:, k], H[k]) @ np.diag(S_2)
                T[(i * across + j) * D + k, i * D : (i + 1) * D, j * D : (j + 1) * D] = block
    return affine(T)


def local(s: State) -> Law:
    """[Ober21, eq. 11] with inducing inputs of the layer's own; rows of W are independent."""
    d_out, d_in = s.shape
    Phi = np.concatenate([s.tensors["Z"], np.ones((len(s.tensors["Z"]), 1))], 1)
    Lam, precision = np.diag(np.exp(s.tensors["log_lam"])), np.eye(d_in) / s.entry["sigma"] ** 2
    Sigma = np.linalg.inv(precision + Phi.T @ Lam @ Phi)
    mean = (Sigma @ Phi.T @ Lam @ s.tensors["V"]).T
    log_dets = np.linalg.slogdet(precision)[1] + np.linalg.slogdet(Sigma)[1]
    squares = np.einsum("oi,ij,oj->", mean, precision, mean)
    kl = (squares + d_out * (np.trace(precision @ Sigma) - d_in - log_dets)) / 2
    return Law(mean.reshape(1, -1), np.kron(np.eye(d_out), Sigma), kl)


def prior(s: State) -> Law:
    n = s.shape[0] * s.shape[1]
    return Law(np.zeros((1, n)), s.entry["sigma"] ** 2 * np.eye(n), 0.0)


ORACLES: dict[str, Callable[[State], Law]] = {
    "inducing": inducing,
    "weights": weights,
    "dropout": dropout,
    "whvi": whvi,
    "local": local,
    "prior": prior,
}
OF_WEIGHTS = [method for method in POSTERIORS if not entry_class(method).of_functions]  # others: test_deep_gp.py
ALONE = [method for method in OF_WEIGHTS if not entry_class(method).in_sequence]  # whose layers have laws of their own


def law_of(layer: BayesianLayer) -> Law:
    kind = layer.entry.kind
    assert kind in ORACLES, f"a new kind of posterior: write the dense law of {kind!r} and its KL in {__file__}"
    tensors = {name: t.double().numpy() for name, t in layer.posterior.state_dict().items()}
    return ORACLES[kind](State(tensors, layer.entry.model_dump(), layer.geometry.shape))


def network_of(method: str, seed: int = SEED) -> BayesianNetwork:
    """Two layers of one shape and one of another, no number where it started."""
    torch.manual_seed(seed)
    network = bayesianize(build("mlp", inputs=4, hidden=[4, 4], outputs=3), method, **OPTIONS.get(method, {}))
    with torch.no_grad():
        for name, p in network.named_parameters():
            if not p.requires_grad:
                continue
            p.add_(0.2 * torch.randn(p.shape) + (5.0 if name.endswith(("spread.raw", "lam.raw")) else 0.0))
    return network.eval()


def matrices(f: Factors, noise: Tensor, member: Tensor | None) -> Tensor:
    return as_matrix(f.draw(noise, member)).detach().flatten(1).double()


@pytest.fixture(scope="module")
def skeletons() -> dict[str, onnx.ModelProto]:
    """The traced network, which is the same for all methods, once there is one."""
    return {}


@pytest.mark.parametrize("method", ALONE)
class TestLayer:
    """Draws of one layer; those of layers drawn in sequence are judged in test_inducing_points.py."""

    @pytest.mark.parametrize("form", ["served", "trained"])
    def test_draws_have_the_mean_and_covariance_of_the_dense_law(self, method: str, form: str) -> None:
        """To 5 standard errors, which the draws themselves give, for a mask is no Gaussian."""
        layer = list(network_of(method).double().layers.values())[-1]
        law, f = law_of(layer), layer.q.factors() if form == "served" else layer.q.trainable()
        rng = torch.Generator().manual_seed(SEED + 1)
        for k, mean in enumerate(law.means):
            member = torch.full((N,), k) if f.members else None
            noise = torch.randn(N, f.normals, generator=rng).double()
            if isinstance(f, DropoutFactors) and f.by_row:
                pytest.skip("in training its noise is in the inputs")
            W = matrices(f, noise, member).numpy() - mean
            assert (np.abs(W.mean(0)) < 5 * W.std(0) / N**0.5 + 1e-12).all()
            products = np.einsum("ni,nj->nij", W, W)
            assert (np.abs(products.mean(0) - law.covariance) < 5 * products.std(0) / N**0.5 + 1e-12).all()
            assert (W.std(0).max() > 1e-3) == bool(law.covariance.any())

    def test_the_mean_is_that_of_the_dense_law(self, method: str) -> None:
        for layer in network_of(method).double().layers.values():
            f, means = layer.q.factors(), law_of(layer).means
            mean = as_matrix(f.mean(torch.arange(f.members) if f.members else None)).flatten(1)
            np.testing.assert_allclose(mean.detach().numpy(), means, rtol=1e-7, atol=1e-9)

    def test_the_kl_is_that_of_the_dense_law_alone_and_together(self, method: str) -> None:
        network = network_of(method).double()
        expected = [law_of(layer).kl for layer in network.layers.values()]
        for layer, kl in zip(network.layers.values(), expected, strict=True):
            assert float(layer.q.kl().detach()) == pytest.approx(kl, rel=1e-9, abs=1e-9)
        assert float(network.kl().detach()) == pytest.approx(sum(expected), rel=1e-9, abs=1e-9)

    def test_layers_trained_together_have_the_laws_that_each_has_alone(self, method: str) -> None:
        """The mean, and the energy of all unit normals: which normal goes where is for the method to say."""
        layers = [layer.q for layer in list(network_of(method).double().layers.values())[:2]]
        kinds = [layers] if layers[0].kind == layers[1].kind else [[q] for q in layers]
        drawn: list[tuple[Tensor, Tensor]] = []
        for f in type(layers[0]).train_together(kinds):
            member = torch.zeros(1, dtype=torch.long) if f.members else None
            rows = torch.cat([torch.zeros(1, f.normals), torch.eye(f.normals)]).double()
            for operand in f.draw_each(rows, None if member is None else member.expand(len(rows))):
                W = as_matrix(operand).detach()
                drawn.append((W[0], (W - W[:1]).square().sum(0)))
        for q, (mean, energy) in zip(layers, drawn, strict=True):
            f = q.trainable()
            rows = torch.cat([torch.zeros(1, f.normals), torch.eye(f.normals)]).double()
            W = as_matrix(f.draw(rows, torch.zeros(len(rows), dtype=torch.long) if f.members else None)).detach()
            torch.testing.assert_close(mean, W[0])
            torch.testing.assert_close(energy, (W - W[:1]).square().sum(0))


@pytest.mark.parametrize("method", POSTERIORS)
class TestNetwork:
    def test_a_seed_gives_the_same_draws_and_another_seed_others(self, method: str) -> None:
        network, x = network_of(method), torch.randn(3, 4, generator=torch.Generator().manual_seed(SEED))
        factors = network.factors()
        outputs = [
            predict(network, factors, x, K, seed, keep_outputs=True).outputs for K, seed in ((8, 1), (4, 1), (8, 2))
        ]
        first, fewer, other = (o for o in outputs if o is not None)
        torch.testing.assert_close(fewer, first[:4])
        assert not torch.allclose(first, other)
        assert len(first.flatten(1).unique(dim=0)) == (8 if factors.normals else factors.members)

    def test_a_saved_layer_answers_as_before(self, method: str, tmp_path: Path) -> None:
        network, x = network_of(method), torch.randn(3, 4, generator=torch.Generator().manual_seed(SEED))
        manifest = save(network, tmp_path / "model", card=Card(input=Input(shape=(4,))))
        model = load(tmp_path / "model")
        assert {name: layer.entry for name, layer in model.network.layers.items()} == manifest.layers
        assert {type(entry) for entry in Manifest.model_validate_json(manifest.model_dump_json()).layers.values()} == {
            type(layer.entry) for layer in network.layers.values()
        }
        ours, theirs = (predict(n, n.factors(), x, 8, 1, keep_outputs=True) for n in (network, model.network))
        assert ours.outputs is not None
        assert theirs.outputs is not None
        assert torch.equal(ours.outputs, theirs.outputs)

    @pytest.mark.usefixtures("quick_exports")
    def test_an_exported_graph_answers_as_torch_does_or_the_export_is_refused(
        self, method: str, tmp_path: Path, skeletons: dict[str, onnx.ModelProto]
    ) -> None:
        save(network := network_of(method), tmp_path / "model", card=Card(input=Input(shape=(4,))))
        model, x = load(tmp_path / "model"), np.random.default_rng(SEED).normal(size=(3, 4)).astype(np.float32)
        if next(iter(network.layers.values())).entry.kind not in WRITERS:
            with pytest.raises(ExportError, match=f"{method} layers cannot be exported"):
                export(model)
            return
        skeletons["mlp"] = (
            exported := export(model, samples=3, law="artifact", skeleton=skeletons.get("mlp"))
        ).skeleton
        save_onnx(exported, tmp_path / "graph.onnx")
        assert parity(tmp_path / "graph.onnx", model, x).largest < 1e-4


def test_every_line_of_the_dictionary_names_a_class_that_knows_its_method() -> None:
    for method in POSTERIORS:
        for layer in network_of(method).layers.values():
            assert layer.entry.method == method
            assert method in layer.entry.what
