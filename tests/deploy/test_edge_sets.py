"""Prediction sets of an exported graph are those of the artifact to the bit: in onnxruntime, and as WebAssembly."""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from dubito.deploy.edge.check import check
from dubito.deploy.edge.data import LabelledData
from dubito.deploy.edge.export import export, save
from dubito.deploy.edge.graph import OPSET, Graph
from dubito.deploy.edge.runtime import EdgeModel
from dubito.deploy.edge.summary import prediction_sets
from dubito.models import bayesianize, build, load
from dubito.models import save as save_artifact
from dubito.models.errors import InputError
from dubito.models.manifest import Calibration, Card, Input, Part, Sets
from dubito.models.predictions.answers import Rule, columns_of
from dubito.models.predictions.uncertainty import Classified

C = 6
RULES = {
    "format 1": Rule(None, 0.6),
    "probability": Rule(None, 0.75, Sets(score="probability")),
    "aps": Rule(None, 0.75, Sets()),
    "aps, nothing but the first": Rule(None, 0.0, Sets()),
    "raps": Rule(None, 0.75, Sets(score="raps", lam=0.03, k_reg=2)),
    "by class": Rule(None, 0.5, Sets(), (0.0, 0.3, 0.5, 0.75, 0.9, 1.0)),
}
WASM = files("dubito.service").joinpath("console", "wasm")
IN_NODE = """
import * as ort from "./ort.wasm.bundle.min.mjs";
import { readFileSync } from "node:fs";
const [binary, numbers, rows, classes, ...graphs] = process.argv.slice(2);
ort.env.wasm.wasmBinary = readFileSync(binary);
ort.env.wasm.numThreads = 1;
const p = new Float32Array(new Uint8Array(readFileSync(numbers)).buffer);
for (const graph of graphs) {
  const session = await ort.InferenceSession.create(new Uint8Array(readFileSync(graph)));
  const out = await session.run({ p: new ort.Tensor("float32", p, [Number(rows), Number(classes)]) });
  console.log(JSON.stringify(Array.from(out.prediction_set.data, Number)));
}
"""


def probabilities() -> NDArray[np.float32]:
    """Of all kinds: many equal ones, zeros, and sums that lie on a quantile or a rounding beside it."""
    rng = np.random.default_rng(0)
    dyadic = np.stack([rng.multinomial(16, rng.dirichlet(np.ones(C))) for _ in range(300)]) / 16
    equal = np.full((1, C), 1 / C)
    p = np.concatenate([dyadic, rng.dirichlet(np.ones(C), 300), rng.dirichlet(np.full(C, 0.1), 100), equal, np.eye(C)])
    return p.astype(np.float32)


def expected(p: NDArray[np.float32], rule: Rule) -> NDArray[np.bool_]:
    nothing = torch.zeros(len(p))
    found: NDArray[np.bool_] = columns_of(Classified(torch.from_numpy(p), nothing, nothing, nothing), [rule] * len(p))[
        "prediction_set"
    ]
    return found


def graph_of(rule: Rule, path: Path) -> Path:
    """Probabilities in, sets out: the end of every exported classifier."""
    g = Graph()
    prediction_sets(g, "p", C, rule)
    inputs = [helper.make_tensor_value_info("p", TensorProto.FLOAT, ["batch", C])]
    outputs = [helper.make_tensor_value_info("prediction_set", TensorProto.BOOL, ["batch", C])]
    graph = helper.make_graph(g.nodes, "sets", inputs, outputs, g.initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10), path)
    return path


@pytest.mark.parametrize("name", RULES)
def test_a_graph_decides_as_python_does(name: str, tmp_path: Path) -> None:
    p, rule = probabilities(), RULES[name]
    session = onnxruntime.InferenceSession(graph_of(rule, tmp_path / "g.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"p": p})
    assert (found == expected(p, rule)).all()


@pytest.mark.slow
def test_webassembly_decides_as_python_does(tmp_path: Path) -> None:
    """The runtime of the console's page /edge, in node: no browser is needed to compute."""
    node = shutil.which("node")
    if node is None or not WASM.is_dir():
        pytest.skip("NO NODE OR NO WASM: sets are not computed as WebAssembly here; `make wasm` fetches it.")
    p = probabilities()
    (tmp_path / "p.bin").write_bytes(p.tobytes())
    shutil.copy(str(WASM.joinpath("ort.wasm.bundle.min.mjs")), tmp_path)
    (tmp_path / "run.mjs").write_text(IN_NODE)
    graphs = [graph_of(rule, tmp_path / f"{i}.onnx") for i, rule in enumerate(RULES.values())]
    given = [WASM.joinpath("ort-wasm-simd-threaded.wasm"), tmp_path / "p.bin", *p.shape, *graphs]
    command = [node, tmp_path / "run.mjs", *given]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name, line in zip(RULES, done.stdout.splitlines(), strict=True):
        found = np.array(json.loads(line), bool).reshape(p.shape)
        assert (found == expected(p, RULES[name])).all(), name


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Calibrated by group, with sets of several sizes."""
    torch.manual_seed(0)
    network = bayesianize(build("mlp", inputs=4, hidden=[8], outputs=C), "ffg-u", inducing=4, start="prior")
    groups = {
        name: Part(examples=99, coverage=0.9, quantiles={1: quantile}) for name, quantile in (("a", 0.2), ("b", 0.8))
    }
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="entropy",
        thresholds={"entropy": {1: 1.0}},
        quantiles={1: 0.5},
        sets=Sets(score="raps", lam=0.01, k_reg=2),
        groups=groups,
    )
    path = tmp_path / "model.safetensors"
    save_artifact(network, path, card=Card(input=Input(shape=(4,)), calibration=calibration))
    return path


def test_an_exported_file_has_the_rule_of_its_group(artifact: Path, tmp_path: Path) -> None:
    model, out = load(artifact), tmp_path / "model.onnx"
    sets = Sets(score="raps", lam=0.01, k_reg=2)
    for group, quantile in ((None, 0.5), ("a", 0.2), ("b", 0.8)):
        made = export(model, samples=8, group=group)
        save(made, out)
        edge = EdgeModel(out)
        assert (edge.facts["group"], edge.facts["quantile"]) == (group, quantile)
        assert edge.facts["sets"] == {"score": "raps", "lam": 0.01, "k_reg": 2}
        columns = edge.predict(3 * np.random.default_rng(0).standard_normal((50, 4)), 3)
        wanted = expected(columns["probabilities"], Rule(None, quantile, sets))
        assert (columns["prediction_set"] == wanted).all()
        assert wanted.any(1).all()
        rows: list[dict[str, Any]] = edge.answers(columns)
        assert [row["prediction_set"] for row in rows] == [[str(c) for c in np.flatnonzero(row)] for row in wanted]
    with pytest.raises(InputError, match="calibrated for: a, b"):
        export(model, samples=8, group="c")


def test_a_check_compares_sets_and_their_coverage(artifact: Path, tmp_path: Path) -> None:
    model, out = load(artifact), tmp_path / "model.onnx"
    save(export(model, samples=8, group="b"), out)
    rng = np.random.default_rng(1)
    data = LabelledData(rng.standard_normal((200, 4)).astype(np.float32), rng.integers(0, C, 200))
    report = check(out, model, artifact.stat().st_size, data)
    assert report["max_difference"] < 1e-4
    assert report["data"]["set_agreement"] > 0.3  # draws of their own
    for name in ("onnx", "artifact"):
        assert 0 < report["data"][name]["coverage"] <= 1 <= report["data"][name]["set_size"] <= C
