"""A small stand-in for the Hugging Face hub: repositories, trees, files, LFS uploads and commits, over HTTP."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from tests.stores import HOST, listening

TOKEN = "hf_never_shown"
API = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree|preupload|commit|paths-info)/([^/?]+)(?:/([^?]*))?)?")


@dataclass
class Hub:
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)  # name -> path -> content
    private: set[str] = field(default_factory=set)
    stored: dict[str, bytes] = field(default_factory=dict)  # LFS, by SHA-256
    seen: list[tuple[str, str]] = field(default_factory=list)
    wrong: dict[str, bytes] = field(default_factory=dict)  # path -> what is sent instead
    port: int = 0

    def environment(self, token: str = TOKEN) -> dict[str, str]:
        return {
            "HF_ENDPOINT": f"http://{HOST}:{self.port}",
            "HF_TOKEN": token,
            "HF_HUB_DISABLE_XET": "1",  # a protocol of its own, which is not played here
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        }


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry


def _tree(files: dict[str, bytes], below: str, recursive: bool) -> list[dict[str, Any]]:
    rows = []
    start = f"{below}/" if below else ""
    for path, content in sorted(files.items()):
        if path.startswith(start):
            first, deeper, _ = path[len(start) :].partition("/")
            if not deeper or recursive:
                rows.append(_entry(path, content))
            if deeper and not any(row["path"] == start + first for row in rows):
                rows.append({"type": "directory", "path": start + first, "size": 0, "oid": "0" * 40})
    return rows


@contextmanager
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.answer()

        def do_PUT(self) -> None:
            self.answer()

        def answer(self) -> None:
            state.seen.append((self.command, self.path))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, _, query = self.path.partition("?")
            if path.startswith("/lfs/"):  # a signed address: no token comes with it
                state.stored[path.removeprefix("/lfs/")] = body
                return self.reply({})
            if path == "/api/validate-yaml":
                return self.reply({"errors": [], "warnings": []})
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                state.repositories[name] = {}
                state.private |= {name} if asked.get("private") else set()
                return self.reply({"url": f"http://{HOST}:{state.port}/{name}", "id": name, "name": name})
            if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                return self.reply({"objects": [self.upload(one) for one in json.loads(body)["objects"]]})
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path):
                return self.file(found[1], unquote(found[3]))
            if (found := API.fullmatch(path)) and self.visible(found[1]):
                return self.reply(self.api(found[1], found[2] or "", unquote(found[4] or ""), query, body))
            self.refuse("RepoNotFound", 401)

        def visible(self, name: str) -> bool:
            allowed = name not in state.private or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            return name in state.repositories and allowed

        def upload(self, one: dict[str, Any]) -> dict[str, Any]:
            actions = {"upload": {"href": f"http://{HOST}:{state.port}/lfs/{one['oid']}", "header": {}}}
            return one if one["oid"] in state.stored else one | {"actions": actions}

        def api(self, name: str, what: str, below: str, query: str, body: bytes) -> Any:
            files = state.repositories[name]
            if what == "tree":
                return _tree(files, below, "recursive=true" in query.lower())
            if what == "paths-info":
                return [_entry(path, files[path]) for path in json.loads(body)["paths"] if path in files]
            if what == "preupload":
                asked = json.loads(body)["files"]
                modes = {one["path"]: "lfs" if one["path"].endswith(".safetensors") else "regular" for one in asked}
                return {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
            if what == "commit":
                for line in map(json.loads, body.splitlines()):
                    value = line["value"]
                    if line["key"] == "lfsFile":
                        files[value["path"]] = state.stored[value["oid"]]
                    if line["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                where = f"http://{HOST}:{state.port}/{name}/commit/{'1' * 40}"
                return {"success": True, "commitOid": "1" * 40, "commitUrl": where, "hookOutput": ""}
            rows = [{"rfilename": path} for path in files]
            return {"id": name, "modelId": name, "sha": "1" * 40, "private": name in state.private, "siblings": rows}

        def file(self, name: str, path: str) -> None:
            if not self.visible(name):
                return self.refuse("RepoNotFound", 401)
            if path not in state.repositories[name]:
                return self.refuse("EntryNotFound", 404)
            content = state.wrong.get(path, state.repositories[name][path])
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{sha256(state.repositories[name][path]).hexdigest()}"')
            self.send_header("X-Repo-Commit", "1" * 40)
            self.end_headers()
            if self.command != "HEAD":
                with suppress(ConnectionError):
                    self.wfile.write(content)

        def refuse(self, code: str, status: int) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def reply(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with listening(ThreadingHTTPServer((HOST, 0), Handler)) as state.port:
        yield state
