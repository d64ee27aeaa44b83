"""A repository with folders that cannot be served: the others are, and log, index and greeting give the reasons."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import forked

Fixture = Any  # the types of conftest.py
Make = Callable[..., Path]
FILE = "model.safetensors"
ASK = {"inputs": [[1, 2, 3, 4]], "seed": 0}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def rows(url: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The index: state and reason by name and version."""
    found = httpx.post(f"{url}/v2/repository/index").json()
    return {(row["name"], row["version"]): (row["state"], row["reason"]) for row in found}


def logged(log: Path, message: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, log.read_text().splitlines()) if line["message"] == message]


def load(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v2/repository/models/{name}/load", timeout=60)


def ask(url: str, name: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/models/{name}/predict", json=ASK, timeout=60)


def test_bad_folders_leave_the_others_as_they_are(serve: Fixture, make_artifact: Make, tmp_path: Path) -> None:
    root = tmp_path / "root"
    make_artifact(root / "good" / "1" / FILE)
    cut(make_artifact(root / "good" / "2" / FILE))  # the newest version is broken: the one before it answers
    cut(make_artifact(root / "broken" / "1" / FILE))
    make_artifact(root / "my model" / "1" / FILE)
    make_artifact(root / "unversioned" / FILE)
    make_artifact(root / "worded" / "v1" / FILE)
    make_artifact(root / ".hidden" / "1" / FILE)
    make_artifact(Path(os.fsdecode(bytes(root) + b"/caf\xe9")) / "1" / FILE)  # Latin-1, as old archives have it
    (root / "loop" / "1").mkdir(parents=True)
    (root / "loop" / "1" / FILE).symlink_to(FILE)
    (root / "nowhere" / "1").mkdir(parents=True)
    (root / "nowhere" / "1" / FILE).symlink_to("absent")
    (root / "folder" / "1" / FILE).mkdir(parents=True)
    (root / "out" / "1").mkdir(parents=True)
    (root / "out" / "1" / FILE).symlink_to(make_artifact(tmp_path / "elsewhere.safetensors"))

    server = serve(root)
    said = {
        ("broken", "1"): f"broken/1/{FILE}",
        ("caf?", "1"): "is no name for a model",
        ("folder", "1"): "is no file",
        ("good", "2"): f"good/2/{FILE}",
        ("loop", "1"): "a link to none",
        ("nowhere", "1"): "a link to none",
        ("my model", "1"): "is no name for a model",
        ("out", "1"): "leads out of the repository",
        ("unversioned", ""): f"move it to unversioned/1/{FILE}",
        ("worded", "v1"): "'v1' is no version; expected a whole number",
    }
    index = rows(server.url)
    assert index.pop(("good", "1")) == ("READY", "")
    assert index.keys() == said.keys()
    for key, (state, reason) in index.items():
        assert state == "UNAVAILABLE"
        assert said[key] in reason
        assert str(tmp_path) not in reason  # replies show no paths
    reasons = {(line["model"], line["version"]): line["error"] for line in logged(server.log, "cannot serve a folder")}
    reasons |= {(line["model"], line["version"]): line["error"] for line in logged(server.log, "cannot load model")}
    assert reasons.keys() == said.keys()  # hidden folders are nobody's business
    assert reasons["my model", "1"] == index["my model", "1"][1]
    assert reasons["broken", "1"] == index["broken", "1"][1].replace(f"broken/1/{FILE}", str(root / "broken/1" / FILE))
    assert ask(server.url, "good").json()["version"] == "1"
    assert httpx.get(f"{server.url}/readyz").json() == {"ready": True, "missing": []}
    refused = ask(server.url, "broken")
    assert refused.status_code == 503
    assert "/v2/repository/index says why" in refused.json()["detail"]

    # what comes later is loaded, and what was bad is, once it is mended
    make_artifact(root / "late" / "1" / FILE)
    assert load(server.url, "late").status_code == 200
    assert ask(server.url, "late").status_code == 200
    reply = load(server.url, "my%20model")
    assert (reply.status_code, "no name for a model" in reply.json()["error"]) == (400, True)
    reply = load(server.url, "broken")
    assert reply.status_code == 400
    assert f"the artifact cannot be loaded: broken/1/{FILE}: " in reply.json()["error"]
    shutil.copy(root / "good" / "1" / FILE, root / "broken" / "1" / FILE)
    assert load(server.url, "broken").status_code == 200
    assert ask(server.url, "broken").status_code == 200
    assert rows(server.url)["broken", "1"] == ("READY", "")
    assert len(logged(server.log, "cannot serve a folder")) == 8  # each once, however often folders are read


def test_a_served_model_whose_file_is_gone_stays_in_the_index(
    serve: Fixture, make_artifact: Make, tmp_path: Path
) -> None:
    """A folder of a repository, and an artifact given by its own path."""
    root, alone = tmp_path / "root", make_artifact(tmp_path / "alone.safetensors")
    for name in ("gone", "stays"):
        make_artifact(root / name / "1" / FILE)
    server = serve(root, alone)
    shutil.rmtree(root / "gone")
    alone.unlink()
    assert load(server.url, "stays").status_code == 200
    index = rows(server.url)
    assert index["stays", "1"] == ("READY", "")
    for name in ("gone", "alone"):
        state, reason = index[name, "1"]
        assert (state, "its file is gone" in reason) == ("READY", True)
        assert ask(server.url, name).status_code == 200
        reply = load(server.url, name)
        assert (reply.status_code, "the version that is served stays" in reply.json()["error"]) == (404, True)
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    shutil.rmtree(root)  # the whole repository: what is served answers, and can be unloaded
    assert load(server.url, "stays").status_code == 404
    assert ask(server.url, "stays").status_code == 200
    assert httpx.post(f"{server.url}/v2/repository/models/stays/unload").status_code == 200
    assert ask(server.url, "stays").status_code == 404


def test_a_model_that_was_expected_by_name_is_missing(serve: Fixture, make_artifact: Make, tmp_path: Path) -> None:
    make_artifact(tmp_path / "good" / "1" / FILE)
    cut(make_artifact(tmp_path / "broken" / "1" / FILE))
    server = serve(tmp_path, "--set", "expected=good,broken")
    ready = httpx.get(f"{server.url}/readyz")
    assert (ready.status_code, ready.json()["missing"]) == (503, ["broken"])
    assert ask(server.url, "good").status_code == 200


@pytest.mark.parametrize(
    ("folder", "said"),
    [("good/1", "model.safetensors: "), ("my model/1", "is no name for a model"), ("good", "move it to good/1")],
)
def test_a_repository_of_bad_folders_alone_does_not_start(
    make_artifact: Make, tmp_path: Path, folder: str, said: str
) -> None:
    cut(make_artifact(tmp_path / folder / FILE))
    answer = forked.run("serve", tmp_path, "--port", "0")
    assert answer.returncode == 2
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert said in last
    assert "Traceback" not in answer.stderr
