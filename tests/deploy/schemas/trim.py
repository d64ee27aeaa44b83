"""Writes the schemas beside it from the definitions that KServe and the Prometheus operator publish (Apache-2.0):

    python tests/deploy/schemas/trim.py COMMIT serving.kserve.io_inferenceservices.yaml ...

Texts, rules that only a cluster checks, and parts that no manifest of ours has are left out.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

FRAMEWORKS = "huggingface lightgbm onnx paddle pmml pytorch sklearn tensorflow triton xgboost"
LEFT_OUT = set(f"affinity canary explainer initContainers status transformer workerSpec {FRAMEWORKS}".split())
VOLUMES = {"name", "emptyDir", "persistentVolumeClaim", "secret", "configMap"}
TEXTS = {"description", "x-kubernetes-validations"}
SOURCES = {"serving.kserve.io": "kserve/kserve", "monitoring.coreos.com": "prometheus-operator/prometheus-operator"}


def trimmed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [trimmed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: trimmed(value) for key, value in schema.items() if key not in {*TEXTS, "properties"}}
    if "properties" in schema:
        parts = {name: trimmed(part) for name, part in schema["properties"].items() if name not in LEFT_OUT}
        if "volumes" in parts:
            volume = parts["volumes"]["items"]["properties"]
            parts["volumes"]["items"]["properties"] = {name: volume[name] for name in volume if name in VOLUMES}
        kept["properties"] = parts
    return kept


def main(commit: str, *files: str) -> None:
    for file in files:
        crd = yaml.safe_load(Path(file).read_text())
        group, kind = crd["spec"]["group"], crd["spec"]["names"]["kind"]
        for version in crd["spec"]["versions"]:
            source = f"https://github.com/{SOURCES[group]}, commit {commit}, Apache-2.0; trimmed by trim.py"
            schema = {"$comment": source, **trimmed(version["schema"]["openAPIV3Schema"])}
            out = Path(__file__).with_name(f"{kind}.{version['name']}.json")
            out.write_text(json.dumps(schema) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
