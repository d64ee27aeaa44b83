"""Manifests of Kubernetes as `kubectl kustomize` builds them, and what published schemas have against them."""

import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from dubito.service.settings import PREFIX

REPO = Path(__file__).parents[2]
FOLDER = REPO / "deploy" / "kubernetes"
DOCKERFILE = (REPO / "Dockerfile").read_text()
VERSIONS = ("1.35", "1.36", "1.37")  # of Kubernetes: those that get fixes at the same time
Manifest = dict[str, Any]

kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="NOT CHECKED: the manifests, for there is no kubectl here (one file: https://kubernetes.io/docs/tasks/tools)",
)


def kustomize(folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=120)


@cache
def _built(folder: Path) -> tuple[Manifest, ...]:
    done = kustomize(folder)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # C: twenty times as fast


def built(name: str) -> list[Manifest]:
    """The manifests of a folder: `overlays/cpu`."""
    return deepcopy(list(_built(FOLDER / name)))


def with_components(folder: Path, overlay: str, *components: str) -> list[Manifest]:
    """The manifests of an overlay with components, as a user adds them; `folder` takes the new overlay."""
    words = {
        "resources": [os.path.relpath(FOLDER / overlay, folder)],
        "components": [os.path.relpath(FOLDER / "components" / one, folder) for one in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(words))
    return deepcopy(list(_built(folder)))


def of_kind(manifests: Sequence[Manifest], kind: str) -> Manifest:
    (found,) = (one for one in manifests if one["kind"] == kind)
    return found


def pods_of(manifests: Sequence[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod's spec of each Deployment, and of each InferenceService on the runtime that it names."""
    runtimes = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "ServingRuntime"}
    for one in manifests:
        if one["kind"] == "Deployment":
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]
        elif one["kind"] == "InferenceService":
            predictor = one["spec"]["predictor"]
            runtime = runtimes[predictor["model"]["runtime"]]
            containers = [runtime["containers"][0] | {"ports": predictor["model"]["ports"]}]
            yield one["metadata"]["name"], predictor | {"containers": containers, "volumes": runtime["volumes"]}


# schemas


def environment(container: Manifest) -> dict[str, str]:
    """The settings among the variables of a container: those of the image, and its own."""
    (block,) = re.findall(r"^ENV (PATH=.*?[^\\])$", DOCKERFILE, re.S | re.M)
    pairs = dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())
    pairs |= {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}
    return {name: value for name, value in pairs.items() if name.startswith(PREFIX)}


def kserves_command(models: Path) -> tuple[list[str], dict[str, str]]:
    """The command line of KServe's runtime on a repository here, without its ports, and its settings."""
    (container,) = of_kind(built("kserve"), "ServingRuntime")["spec"]["containers"]
    ports = {"--port=8080", "--grpc-port=9000"}
    words: list[str] = container["command"] + container["args"]
    assert {"/mnt/models"} | ports <= set(words)
    ours = [word.replace("/mnt/models", str(models)) for word in words if word not in ports]
    return ours, environment(container)


def strict(schema: Any) -> Any:
    """A schema of a cluster as one of JSON: what a cluster would drop without a word is refused."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key != "properties"}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["type"] = ["integer", "string"]
    if "(?i)" in made.get("pattern", ""):  # Go takes flags anywhere, Python at the beginning
        made["pattern"] = "(?i)" + made["pattern"].replace("(?i)", "")
    if "properties" in schema:
        made["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    return made


@cache
def _validator(kind: str, version: str) -> jsonschema.Draft202012Validator:
    """With a schema that is valid itself, which takes longer to see than that a manifest is."""
    file = Path(__file__).with_name("schemas").joinpath(f"{kind}.{version}.json")
    schema = strict(json.loads(file.read_text()))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@cache
def _library() -> ModuleType:
    """The library, which would read a megabyte of schemas again for each manifest."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports is not ours to mend
        library = import_module("kubernetes_validate.utils")
    vars(library)["schema_contents"] = cache(library.schema_contents)
    return library


def complaint(manifest: Manifest, version: str) -> str:
    """What the schemas of a version of Kubernetes, or of a custom resource, have against it; nothing if it is valid."""
    library = _library()
    group, _, of_group = manifest["apiVersion"].rpartition("/")
    try:
        if group in ("monitoring.coreos.com", "serving.kserve.io"):
            _validator(manifest["kind"], of_group).validate(manifest)
        else:
            library.validate(manifest, version, strict=True)
    except (jsonschema.ValidationError, library.ValidationError) as error:
        return f"{manifest['kind']}: {getattr(error, 'message', error)}"
    return ""


def changed(manifest: Manifest, path: str, value: Any) -> Manifest:
    """A copy with another value at `spec.ports.0.port`, which is removed where the value is None."""
    copy = deepcopy(manifest)
    *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    at: Any = copy
    for word in way:
        at = at[word]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return copy
