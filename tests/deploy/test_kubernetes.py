"""Manifests of Kubernetes and KServe, checked without a cluster: by published schemas, and against the program itself.

Each check is seen to fail on a broken copy.
"""

import asyncio
import base64
import re
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from dubito.cli import app
from dubito.service.settings import NAMES_FILE, SettingError, Settings, read_settings
from dubito.service.web.app import Server
from dubito.service.web.security import OPEN
from dubito.service.web.state import State
from tests.deploy.manifests import (
    DOCKERFILE,
    FOLDER,
    REPO,
    VERSIONS,
    Manifest,
    built,
    changed,
    complaint,
    environment,
    kserves_command,
    kubectl,
    kustomize,
    of_kind,
    pods_of,
    with_components,
)
from tests.deploy.test_prometheus import complaints, exposed, promtool
from tests.service.conftest import SOON, Live, Starter

OVERLAYS = ("overlays/cpu", "overlays/gpu", "overlays/replicas", "overlays/canary", "kserve")
COMPONENTS = ("model-volume", "model-remote", "monitoring", "tracing")
ENDS = 2  # seconds, at least, between the end of draining and the end of the grace period

pytestmark = kubectl


def every_manifest(folder: Path) -> list[Manifest]:
    manifests = [one for overlay in OVERLAYS for one in built(overlay)]
    return manifests + with_components(folder, "overlays/cpu", *COMPONENTS)


# schemas


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(version: str, tmp_path: Path) -> None:
    manifests = every_manifest(tmp_path)
    assert [said for one in manifests if (said := complaint(one, version))] == []
    kinds = {one["kind"] for one in manifests}
    assert kinds >= {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler"}
    assert kinds >= {"ServiceMonitor", "PrometheusRule", "ServingRuntime", "InferenceService"}


def test_every_folder_is_built() -> None:
    """A component or an overlay that no test builds may rot."""
    folders = {file.parent.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("kustomization.yaml")}
    assert folders == {"base", *OVERLAYS, *(f"components/{one}" for one in COMPONENTS)}


POD = "spec.template.spec"
BROKEN = [
    ("overlays/cpu", "Deployment", f"{POD}.containers.0.livenessProbe.httpGet.prot", "http"),
    ("overlays/cpu", "Deployment", f"{POD}.terminationGracePeriodSeconds", "soon"),
    ("overlays/cpu", "Deployment", "spec.selector", None),
    ("overlays/gpu", "Deployment", f"{POD}.containers.0.securityContext.readOnlyRootFileSystem", True),
    ("overlays/cpu", "PodDisruptionBudget", "spec.maxUnavaliable", 1),
    ("overlays/cpu", "NetworkPolicy", "spec.ingress.0.ports.0.port", ["http"]),
    ("overlays/replicas", "HorizontalPodAutoscaler", "spec.metrics.0.pods.metric.name", None),
    ("overlays/replicas", "HorizontalPodAutoscaler", "spec.maxReplicas", "8"),
    ("overlays/replicas", "ServiceMonitor", "spec.endpoints.0.intervall", "5s"),
    ("overlays/replicas", "ServiceMonitor", "spec.endpoints.0.interval", "5 seconds"),
    ("overlays/replicas", "PrometheusRule", "spec.groups.0.rules.0.expr", None),
    ("overlays/replicas", "PrometheusRule", "spec.groups.0.rules.0.fore", "5m"),
    ("kserve", "ServingRuntime", "spec.containers.0.args", "/mnt/models"),
    ("kserve", "ServingRuntime", "spec.containers.0.name", None),
    ("kserve", "ServingRuntime", "spec.protocolVersion", ["v2"]),
]


@pytest.mark.parametrize(("overlay", "kind", "path", "value"), BROKEN)
@pytest.mark.parametrize("version", VERSIONS[-1:])
def test_the_schemas_see_what_is_wrong(version: str, overlay: str, kind: str, path: str, value: Any) -> None:
    assert kind in complaint(changed(of_kind(built(overlay), kind), path, value), version)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.predictor.model.storageUrl", "s3://models"),
        ("spec.predictor.model.modelFormat", "dubito"),
        ("spec.predictor.minReplicas", "one"),
        ("spec.predictor.model.ports.0.containerPort", None),
    ],
)
def test_the_schema_of_an_inference_service_sees_what_is_wrong(path: str, value: Any) -> None:
    service = next(one for one in built("kserve") if one["kind"] == "InferenceService")
    assert complaint(service, VERSIONS[-1]) == ""
    assert complaint(changed(service, path, value), VERSIONS[-1]) != ""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("base/kustomization.yaml", "network.yaml", "networks.yaml"),
        ("base/kustomization.yaml", "includeTemplates", "includeTemplate"),
        ("base/service.yaml", "  name: dubito\n", ""),
        ("overlays/canary/kustomization.yaml", "/spec/selector/matchLabels/", "/spec/selectors/matchLabels/"),
    ],
)
def test_kustomize_sees_what_is_wrong(tmp_path: Path, file: str, old: str, new: str) -> None:
    shutil.copytree(FOLDER, tmp_path / "copy")
    text = (tmp_path / "copy" / file).read_text()
    assert old in text
    (tmp_path / "copy" / file).write_text(text.replace(old, new, 1))
    assert kustomize(tmp_path / "copy" / "overlays" / "canary").returncode != 0


# the command line, by the program's own reading of it


def settings_of(pod: Manifest, manifests: list[Manifest], folder: Path) -> tuple[int, str]:
    """Exit code and output of `--print-settings` after the container's command, in its environment."""
    (container,) = pod["containers"]
    words: list[str] = container["command"] + container.get("args", [])
    assert words[0] == "dubito"
    variables: dict[str, str | None] = dict(environment(container))
    if (file := variables.get(NAMES_FILE)) is not None:  # the secret that is mounted there
        mount = next(one for one in container["volumeMounts"] if str(file).startswith(one["mountPath"]))
        volume = next(one for one in pod["volumes"] if one["name"] == mount["name"])
        secrets = {one["metadata"]["name"]: one["data"] for one in manifests if one["kind"] == "Secret"}
        name = file.removeprefix(f"{mount['mountPath']}/")
        (folder / "settings.toml").write_bytes(base64.b64decode(secrets[volume["secret"]["secretName"]][name]))
        variables[NAMES_FILE] = str(folder / "settings.toml")
    done = CliRunner(env=variables).invoke(app, [*words[1:], "--print-settings"])
    return done.exit_code, done.output


def read(pod: Manifest, manifests: list[Manifest], folder: Path) -> dict[str, Any]:
    code, output = settings_of(pod, manifests, folder)
    assert code == 0, output
    return tomllib.loads(output)


def probes(container: Manifest) -> dict[str, Manifest]:
    return {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}


def port_of(container: Manifest, port: str | int) -> int:
    names = {one["name"]: one["containerPort"] for one in container["ports"]}
    found = names[port] if isinstance(port, str) else port
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_command_line_and_the_settings_are_read(overlay: str, tmp_path: Path) -> None:
    """The ports that containers, Services and probes name are those that the program listens on, at every address."""
    manifests = built(overlay)
    pods = dict(pods_of(manifests))
    assert pods
    for name, pod in pods.items():
        effective = read(pod, manifests, tmp_path)
        assert effective["host"] == "0.0.0.0"
        (container,) = pod["containers"]
        tag = container["image"].removeprefix("dubito:")
        assert effective["device"] == {"cpu": "cpu", "gpu": "cuda"}[tag]
        assert re.search(rf"^FROM system AS {tag}$", DOCKERFILE, re.M)
        ports = {"http": effective["port"], "grpc": effective["grpc_port"]}
        named = {"http1": "http", "h2c": "grpc"}
        for port in container["ports"]:
            assert port["containerPort"] == ports[named.get(port["name"], port["name"])], name
        for probe in probes(container).values():
            assert port_of(container, probe["port"]) == ports["http"]
        for service in (one for one in manifests if one["kind"] == "Service"):
            for port in service["spec"]["ports"]:
                assert port_of(container, port["targetPort"]) == port["port"] == ports[port["name"]]


def test_addresses_of_models_are_read(tmp_path: Path) -> None:
    """Of a volume: the image's own; of a remote repository: one more argument."""
    volume = with_components(tmp_path, "overlays/cpu", "model-volume")
    ((_, pod),) = pods_of(volume)
    assert read(pod, volume, tmp_path)["models"] == ["/models"]
    mount = next(one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "models")
    assert (mount["mountPath"], mount["readOnly"]) == ("/models", True)
    (tmp_path / "remote").mkdir()
    remote = with_components(tmp_path / "remote", "overlays/cpu", "model-remote")
    ((_, pod),) = pods_of(remote)
    assert pod["containers"][0]["args"][-1] == "s3://models/repository"
    assert len(read(pod, remote, tmp_path)["models"]) == 1


def test_traces_are_turned_on_by_their_component(tmp_path: Path) -> None:
    manifests = with_components(tmp_path, "overlays/cpu", "tracing")
    ((_, pod),) = pods_of(manifests)
    assert read(pod, manifests, tmp_path)["traces"] is True
    names = {one["name"]: one["value"] for one in pod["containers"][0]["env"] if one["name"].startswith("OTEL_")}
    assert names.keys() == {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"}
    policies = [one for one in manifests if one["kind"] == "NetworkPolicy"]
    ports = {port["port"] for one in policies for rule in one["spec"].get("egress", []) for port in rule["ports"]}
    assert int(names["OTEL_EXPORTER_OTLP_ENDPOINT"].rpartition(":")[2]) in ports


@pytest.mark.parametrize("word", ["--devise=cpu", "--device=tpu", "--grpc-port=http"])
def test_a_wrong_command_line_is_refused(word: str, tmp_path: Path) -> None:
    manifests = built("overlays/cpu")
    ((_, pod),) = pods_of(manifests)
    pod["containers"][0]["args"] = [word]
    assert settings_of(pod, manifests, tmp_path)[0] != 0


def test_services_of_the_cluster_set_no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For a Service called dubito, Kubernetes sets DUBITO_SERVICE_HOST and more, which would end the server."""
    monkeypatch.setenv("DUBITO_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(SettingError, match="DUBITO_SERVICE_HOST"):
        read_settings()
    for name, pod in pods_of(every_manifest(tmp_path)):
        assert pod["enableServiceLinks"] is False, name


# how a pod starts and ends


def grace_left(pod: Manifest, effective: dict[str, Any]) -> float:
    """Seconds of the grace period after preStop, linger and drain."""
    (container,) = pod["containers"]
    program, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    ends = float(seconds) + effective["linger_seconds"] + effective["drain_seconds"]
    left: float = pod["terminationGracePeriodSeconds"] - ends
    return left


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_grace_period_covers_pre_stop_linger_and_drain(overlay: str, tmp_path: Path) -> None:
    manifests = built(overlay)
    for name, pod in pods_of(manifests):
        effective = read(pod, manifests, tmp_path)
        assert grace_left(pod, effective) >= ENDS, name
        assert effective["linger_seconds"] >= 2 * pod["containers"][0]["readinessProbe"]["periodSeconds"]
        assert grace_left({**pod, "terminationGracePeriodSeconds": 40}, effective) < ENDS  # without the last seconds
        assert grace_left(pod, effective | {"drain_seconds": 60.0}) < ENDS  # drain alone changed
    defaults = Settings()
    ((_, pod),) = pods_of(built("overlays/cpu"))  # whoever removes the settings gets the program's own
    assert grace_left(pod, defaults.model_dump()) >= ENDS


def statuses(server: Server, paths: list[str]) -> list[int]:
    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=server)
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            return [(await client.get(path)).status_code for path in paths]

    return asyncio.run(ask())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_mean_what_kubernetes_takes_them_for(overlay: str, url: str) -> None:
    """While models load and after SIGTERM a server lives and is not ready; a key is never needed."""
    for _, pod in pods_of(built(overlay)):
        asked = {kind: probe["path"] for kind, probe in probes(pod["containers"][0]).items()}
        assert set(asked.values()) <= OPEN
        assert [httpx.get(url + path).status_code for path in asked.values()] == [200, 200, 200]
        server = Server(State(Settings()))
        assert statuses(server, list(asked.values())) == [200, 200, 503]
        server.state.draining = True
        assert statuses(server, list(asked.values())) == [200, 200, 503]
        assert httpx.get(f"{url}/nowhere").status_code == 404


def test_a_pod_ends_in_the_order_that_the_settings_say(tmp_path: Path, small_digits: Path) -> None:
    """With its settings, after SIGTERM: not ready, alive, and each reply closes its connection."""
    manifests = built("overlays/cpu")
    ((_, pod),) = pods_of(manifests)
    read(pod, manifests, tmp_path)  # writes the settings
    starter = Starter(tmp_path)
    try:
        live = starter(small_digits, "--settings", tmp_path / "settings.toml")
        live.send(signal.SIGTERM)
        live.logged("draining")
        paths = probes(pod["containers"][0])
        assert httpx.get(live.url + paths["readiness"]["path"]).status_code == 503
        assert httpx.get(live.url + paths["liveness"]["path"]).status_code == 200
        reply = httpx.post(f"{live.url}/v1/models/digits/predict", json={"inputs": [[[[0.0] * 8] * 8]]})
        assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        assert live.wait() == 0
    finally:
        starter.close()


# what a pod may do


def leaks(pod: Manifest) -> list[str]:
    """What the Pod Security Standard `restricted`, and more, has against a pod."""
    (container,) = pod["containers"]
    own, inner = pod.get("securityContext", {}), container.get("securityContext", {})
    both = own | inner
    wanted = {
        "runAsNonRoot": both.get("runAsNonRoot") is True,
        "runAsUser": both.get("runAsUser") == int(re.findall(r"useradd --uid (\d+)", DOCKERFILE)[0]),
        "seccompProfile": both.get("seccompProfile") == {"type": "RuntimeDefault"},
        "allowPrivilegeEscalation": inner.get("allowPrivilegeEscalation") is False,
        "readOnlyRootFilesystem": inner.get("readOnlyRootFilesystem") is True,
        "capabilities": inner.get("capabilities") == {"drop": ["ALL"]},
        "automountServiceAccountToken": pod.get("automountServiceAccountToken") is False,
        "limits": "memory" in container["resources"]["limits"],
        "host": not any(pod.get(word) for word in ("hostNetwork", "hostPID", "hostIPC")),
        "hostPath": not any("hostPath" in one for one in pod["volumes"]),
    }
    return [word for word, holds in wanted.items() if not holds]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_restricted(overlay: str) -> None:
    for name, pod in pods_of(built(overlay)):
        assert leaks(pod) == [], name
        sizes = {one["name"]: one["emptyDir"] for one in pod["volumes"] if "emptyDir" in one}
        mounts = {one["name"]: one for one in pod["containers"][0]["volumeMounts"]}
        writable = {one["mountPath"] for one in mounts.values() if not one.get("readOnly")}
        assert writable == {"/cache", "/tmp"}
        assert all("sizeLimit" in sizes[volume] for volume in ("cache", "tmp"))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("containers.0.securityContext.readOnlyRootFilesystem", False, "readOnlyRootFilesystem"),
        ("containers.0.securityContext.capabilities.drop", ["NET_RAW"], "capabilities"),
        ("securityContext.runAsUser", 0, "runAsUser"),
        ("securityContext.seccompProfile", None, "seccompProfile"),
        ("hostNetwork", True, "host"),
    ],
)
def test_a_pod_that_may_do_more_is_reported(path: str, value: Any, said: str) -> None:
    ((_, pod),) = pods_of(built("overlays/cpu"))
    assert leaks(changed(pod, path, value)) == [said]


def test_a_gpu_is_asked_for_where_the_image_needs_one() -> None:
    for overlay, number in (("overlays/cpu", 0), ("overlays/gpu", 1), ("overlays/replicas", 1)):
        ((_, pod),) = pods_of(built(overlay))
        assert int(pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0)) == number


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_selectors_find_the_pods_of_both_tracks_and_deployments_their_own() -> None:
    stable, canary = built("overlays/replicas"), built("overlays/canary")
    labels = [of_kind(one, "Deployment")["spec"]["template"]["metadata"]["labels"] for one in (stable, canary)]
    for kind, way in (
        ("PodDisruptionBudget", ("selector", "matchLabels")),
        ("NetworkPolicy", ("podSelector", "matchLabels")),
    ):
        selector: Any = of_kind(stable, kind)["spec"]
        for word in way:
            selector = selector[word]
        assert all(selects(selector, one) for one in labels), kind
    services = [one for one in stable if one["kind"] == "Service"]
    assert all(selects(one["spec"]["selector"], mine) for one in services for mine in labels)
    own = [of_kind(one, "Deployment")["spec"]["selector"]["matchLabels"] for one in (stable, canary)]
    assert [[selects(selector, mine) for mine in labels] for selector in own] == [[True, False], [False, True]]
    names = [{(one["kind"], one["metadata"]["name"]) for one in manifests} for manifests in (stable, canary)]
    assert names[0] & names[1] == set()  # both may be applied to one namespace
    scaled = of_kind(stable, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert ("Deployment", scaled["name"]) in names[0]
    assert "replicas" not in of_kind(stable, "Deployment")["spec"]  # else each rollout would undo the autoscaler


# Prometheus


def test_the_monitor_scrapes_the_service_under_the_name_that_alerts_look_for(url: str) -> None:
    manifests = built("overlays/replicas")
    monitor = of_kind(manifests, "ServiceMonitor")["spec"]
    (endpoint,) = monitor["endpoints"]
    services = [one for one in manifests if one["kind"] == "Service"]
    found = [
        one
        for one in services
        if selects(monitor["selector"]["matchLabels"], one["metadata"]["labels"])
        and endpoint["port"] in [port["name"] for port in one["spec"]["ports"]]
    ]
    assert len(found) == 1  # two would count every pod twice
    assert found[0]["metadata"]["labels"][monitor["jobLabel"]] == "dubito"
    assert 'up{job="dubito"}' in (REPO / "deploy/prometheus/alerts.yml").read_text()
    assert httpx.get(url + endpoint["path"]).text.startswith("# HELP")


def test_the_operators_rules_are_those_of_prometheus(tmp_path: Path) -> None:
    file = FOLDER / "components" / "monitoring" / "rules.yaml"
    groups = [
        group
        for name in ("rules", "alerts")
        for group in yaml.safe_load((REPO / "deploy" / "prometheus" / f"{name}.yml").read_text())["groups"]
    ]
    assert yaml.safe_load(file.read_text())["spec"]["groups"] == groups, "run `make kubernetes`"
    make = ["make", "kubernetes", f"RULES={tmp_path / 'rules.yaml'}"]
    subprocess.run(make, cwd=REPO, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "rules.yaml").read_text() == file.read_text()


def adapted(rule: dict[str, Any], namespace: str, pods: str) -> tuple[str, str]:
    """The metric that prometheus-adapter serves by a rule, and its query, as its Go templates make them."""
    series = re.match(r"\w+", rule["seriesQuery"])
    assert series
    name = re.sub(rule["name"]["matches"], rule["name"]["as"].replace("$1", r"\1"), series[0])
    matchers = f'namespace="{namespace}",pod=~"{pods}"'
    query = rule["metricsQuery"].replace("<<.Series>>", series[0]).replace("<<.LabelMatchers>>", matchers)
    return name, query.replace("<<.GroupBy>>", "pod")


@promtool
def test_the_autoscalers_metric_is_one_of_the_servers(url: str, tmp_path: Path) -> None:
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter" / "rules.yaml").read_text())["rules"]
    assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}
    name, query = adapted(rule, "default", "dubito-1|dubito-2")
    metric = of_kind(built("overlays/replicas"), "HorizontalPodAutoscaler")["spec"]["metrics"][0]
    assert metric["type"] == "Pods"
    assert metric["pods"]["metric"]["name"] == name
    known = {metric: labels | {"namespace", "pod"} for metric, labels in exposed(url).items()}  # the operator adds both
    assert complaints([query, rule["seriesQuery"]], known) == []
    assert complaints([query.replace("depth", "length")], known) != []
    (tmp_path / "rules.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "adapter", "rules": [{"record": "adapted", "expr": query}]}]})
    )
    check = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


# KServe


@pytest.fixture(scope="module")
def kserve(small_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The command line of the runtime, started on a repository as KServe downloads it, on free ports."""
    folder = tmp_path_factory.mktemp("kserve")
    (folder / "models/digits/1").mkdir(parents=True)
    shutil.copy(small_digits, folder / "models/digits/1/model.safetensors")
    (*command, models, device), settings = kserves_command(folder / "models")
    assert command == ["dubito", "serve"]
    starter = Starter(folder, usual=SOON)  # plans that are measured may differ, and then sums by a rounding
    yield starter(models, device, "--port=0", "--grpc-port=0", **settings | {"DUBITO_HOST": "127.0.0.1"})
    starter.close()


def test_kserves_runtime_answers_with_the_bits_of_the_plain_server(kserve: Live, url: str) -> None:
    """Over HTTP, as JSON and as bytes, and over gRPC."""
    from tests.service.grpc_clients import Bare, output_of
    from tests.service.grpc_clients import request as grpc_request

    x = np.random.default_rng(5).normal(size=(3, 1, 8, 8)).astype(np.float32)
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.tolist()}
    asked = {"inputs": [tensor], "parameters": {"samples": 20, "seed": 11}}
    replies = [httpx.post(f"{one}/v2/models/digits/infer", json=asked).json() for one in (url, kserve.url)]
    assert replies[0]["outputs"] == replies[1]["outputs"]  # JSON writes a float32 so that it is read back as it was
    other = {**asked, "parameters": {"samples": 20, "seed": 12}}
    assert httpx.post(f"{url}/v2/models/digits/infer", json=other).json()["outputs"] != replies[0]["outputs"]
    with Bare(kserve.grpc) as client:
        reply = client.infer(grpc_request(x, samples=20, seed=11))
    for output in replies[0]["outputs"]:
        values = output_of(reply, output["name"])
        plain = np.array(output["data"], values.dtype).reshape(values.shape)
        assert values.tobytes() == plain.tobytes(), output["name"]
