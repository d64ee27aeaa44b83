"""FastAPI's routes, all but predictions: console, health, models and their metadata, repository, metrics."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from inspect import signature
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from dubito import __version__
from dubito.models.verdict import beside_plain
from dubito.service.metrics import merged
from dubito.service.problems import Problem
from dubito.service.repository import Repository, ServedModel
from dubito.service.web import oip, openapi
from dubito.service.web.bodies import json_object
from dubito.service.web.http import Headers, body_of, read_body
from dubito.service.web.oip import DRAWS, INPUT
from dubito.service.web.openapi import ANY, FLAG, OF_ANY, TEXT, answer, content, errors, ref, some, thing
from dubito.service.web.predict import declared_outputs
from dubito.service.web.security import check_page
from dubito.service.web.state import State

ASSETS = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript",
    "mjs": "text/javascript",
    "css": "text/css",
    "json": "application/json",
    "wasm": "application/wasm",
}
EXTENSIONS = ["binary_tensor_data", "model_repository"]
UNKNOWN = (404, *OF_ANY)
CONTROL_BYTES = 1 << 16  # of a body that is no prediction


def routes(state: State) -> FastAPI:
    """The FastAPI application."""
    app = FastAPI(
        title="dubito", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, lifespan=None
    )
    app.openapi = cache(lambda: openapi.document(app, state.settings))  # type: ignore[method-assign]

    @app.exception_handler(Problem)
    async def wrong(request: Request, problem: Problem) -> Response:
        if problem.reason:
            state.metrics.rejected.labels(problem.reason).inc()
        return _refusal(request, problem)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        detail = {404: "there is nothing at this path; /docs lists what there is.", 405: "this path has other methods."}
        problem = Problem(
            error.status_code, detail.get(error.status_code, str(error.detail)), dict(error.headers or {})
        )
        return _refusal(request, problem)

    _of_people(app, state)
    _of_models(app, state)
    _of_v2(app, state)
    _of_repository(app, state)
    return app


def without_parameters(app: FastAPI) -> dict[str, Callable[[], Awaitable[Response]]]:
    """The functions behind GET of fixed paths that take nothing. Called as they are, a reply costs about half of what
    it does through FastAPI (benchmarks/RESULTS.md), so that many of them hold up others less."""
    return {
        route.path: route.endpoint
        for route in app.routes
        if isinstance(route, APIRoute) and route.methods == {"GET"} and not signature(route.endpoint).parameters
    }


def _of_people(app: FastAPI, state: State) -> None:
    assets = Assets()

    @app.get("/", include_in_schema=False)
    async def console() -> Response:
        return await assets.reply("index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return await assets.reply("docs.html")

    @app.get("/edge", include_in_schema=False)
    async def edge() -> Response:
        return await assets.reply("edge.html")

    @app.get("/console/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return await assets.reply(name)

    @app.get("/console/wasm/{name}", include_in_schema=False)
    async def wasm(name: str) -> Response:
        return await assets.reply(name, "wasm")

    @app.get("/healthz", tags=["health"], summary="Whether the server lives", responses=_health("live"))
    async def healthz() -> Response:
        return _yes_or_no({"live": state.live}, state.live)

    ready = _health("ready", "missing")

    @app.get("/readyz", tags=["health"], summary="Whether every expected model answers", responses=ready)
    async def readyz() -> Response:
        return _yes_or_no({"ready": state.ready, "missing": state.missing}, state.ready)

    text: Any = {"200": {"description": "Prometheus' text.", "content": {"text/plain": {}}}, **errors(OF_ANY, v2=False)}

    scrape = Scrape(state)

    @app.get("/metrics", tags=["health"], summary="Metrics for Prometheus", responses=text)
    async def metrics() -> Response:
        return Response(await scrape.content(), media_type=CONTENT_TYPE_LATEST)


class Scrape:
    """Metrics as text, written off the event loop, since it takes milliseconds; those who wait share the next text."""

    def __init__(self, state: State) -> None:
        self.state, self.turn = state, asyncio.Lock()
        self.next: asyncio.Task[bytes] | None = None

    async def content(self) -> bytes:
        if self.next is None:
            self.next = asyncio.create_task(self._write())
        return await asyncio.shield(self.next)

    async def _write(self) -> bytes:
        async with self.turn:
            self.next = None  # who comes from now on wants to know what has happened since
            own, siblings = asyncio.to_thread(generate_latest, self.state.metrics.registry), self.state.siblings
            if siblings is None:
                return await own
            mine, others = await asyncio.gather(own, siblings.metrics())
            return await asyncio.to_thread(merged, [mine.decode(), *others])


def _of_models(app: FastAPI, state: State) -> None:
    listed: Any = answer(thing({"models": some(ref("Model"))}), "The models that answer.")

    @app.get("/v1/models", tags=["v1"], summary="The models that answer", responses=listed)
    async def models() -> Response:
        return _json({"models": [about(served, state) for _, served in sorted(repository_of(state).served.items())]})

    described: Any = answer(ref("Model"), "What is known about it.", UNKNOWN)

    @app.get("/v1/models/{name}", tags=["v1"], summary="One model", responses=described)
    async def model(name: str) -> Response:
        return _json(about(repository_of(state).get(name), state))


def _of_v2(app: FastAPI, state: State) -> None:
    def v2(schema: dict[str, Any], what: str, statuses: tuple[int, ...] = OF_ANY) -> Any:
        return answer(schema, what, statuses, v2=True)

    @app.get("/v2/health/live", tags=["v2"], summary="Whether the server lives", responses=_health("live"))
    async def v2_live() -> Response:
        return _yes_or_no({"live": state.live}, state.live)

    @app.get("/v2/health/ready", tags=["v2"], summary="Whether every model answers", responses=_health("ready", "live"))
    async def v2_ready() -> Response:
        return _yes_or_no({"ready": state.ready, "live": state.live}, state.ready)

    metadata = thing({"name": TEXT, "version": TEXT, "extensions": some(TEXT)})

    @app.get("/v2", tags=["v2"], summary="The server", responses=v2(metadata, "Name, version, extensions."))
    @app.get("/v2/", include_in_schema=False)
    async def v2_server() -> Response:
        return _json({"name": "dubito", "version": __version__, "extensions": EXTENSIONS})

    tensors = some(ref("Tensor"))
    described = thing({"name": TEXT, "versions": some(TEXT), "platform": TEXT, "inputs": tensors, "outputs": tensors})
    of_model = v2(described, "Inputs and outputs.", UNKNOWN)

    @app.get("/v2/models/{name}", tags=["v2"], summary="One model", responses=of_model)
    async def v2_model(name: str) -> Response:
        return _json(metadata_of(repository_of(state).get(name)))

    @app.get("/v2/models/{name}/versions/{version}", tags=["v2"], summary="One version", responses=of_model)
    async def v2_version(name: str, version: str) -> Response:
        return _json(metadata_of(repository_of(state).get(name, version)))

    of_ready = v2(thing({"name": TEXT, "ready": FLAG}), "It answers.", UNKNOWN)

    @app.get("/v2/models/{name}/ready", tags=["v2"], summary="Whether it answers", responses=of_ready)
    async def v2_model_ready(name: str) -> Response:
        return _json({"name": repository_of(state).get(name).name, "ready": True})

    @app.get(
        "/v2/models/{name}/versions/{version}/ready", tags=["v2"], summary="Whether it answers", responses=of_ready
    )
    async def v2_version_ready(name: str, version: str) -> Response:
        return _json({"name": repository_of(state).get(name, version).name, "ready": True})


def _of_repository(app: FastAPI, state: State) -> None:
    row = thing({"name": TEXT, "version": TEXT, "state": TEXT, "reason": TEXT})
    index: Any = answer(some(row), "Every version that lies there.", (400, 408, 413, 415, *OF_ANY), v2=True)
    every = {"every version": {"value": {"ready": False}}}
    filter_: Any = {"requestBody": {"required": False, **content(thing({"ready": FLAG}, []), examples=every)}}

    @app.post("/v2/repository/index", tags=["v2"], summary="The repository", responses=index, openapi_extra=filter_)
    async def v2_index(request: Request) -> Response:
        ready = (await _json_body(request, state)).get("ready", False)
        if not isinstance(ready, bool):
            raise Problem(400, "ready is no boolean.")
        repository = repository_of(state)
        await repository.look()
        return _json(repository.index(ready_only=ready))

    changed: Any = answer(ANY, "Done.", (400, 403, 404, 408, 413, 415, *OF_ANY), v2=True)
    nothing: Any = {"nothing": {"value": {}}}

    def described(**parameters: Any) -> Any:
        taken = {"type": "object", "properties": parameters, "additionalProperties": False}
        schema = {"type": "object", "properties": {"parameters": taken}, "additionalProperties": False}
        body = {"requestBody": {"required": False, **content(schema, examples=nothing)}}
        return {"tags": ["v2"], "responses": changed, "openapi_extra": body}

    @app.post("/v2/repository/models/{name}/load", summary="Load the newest version, and switch to it", **described())
    async def v2_load(name: str, request: Request) -> Response:
        oip.check_control(await _json_body(request, state), "load", ())
        await state.change("load", name)
        return _json({})

    @app.post(
        "/v2/repository/models/{name}/unload",
        summary="Unload a model, and free its memory",
        **described(unload_dependents=FLAG),
    )
    async def v2_unload(name: str, request: Request) -> Response:
        oip.check_control(await _json_body(request, state), "unload", ("unload_dependents",))
        await state.change("unload", name)
        return _json({})


def _refusal(request: Request, problem: Problem) -> Response:
    content, kind = body_of(problem, v2=request.url.path.startswith("/v2"))
    return Response(content, problem.status, problem.headers, kind)


def repository_of(state: State) -> Repository:
    if state.repository is None:
        raise Problem(503, "the server is starting; /readyz says when it is ready.", {"Retry-After": "1"})
    return state.repository


def check_changeable(state: State, headers: Headers) -> None:
    """Refuse a request with these headers that may not change models."""
    settings = state.settings
    if not (settings.api_keys if settings.repository_api is None else settings.repository_api):
        raise Problem(
            503,
            "models cannot be changed over HTTP here: the setting repository_api is off. It is on where it is set to "
            "true, and where there are API keys.",
        )
    check_page(headers, settings)
    repository_of(state)


async def _json_body(request: Request, state: State) -> dict[str, Any]:
    """The JSON object of a short body; empty if there is no body."""
    most, seconds = min(CONTROL_BYTES, state.settings.body_bytes), state.settings.body_seconds
    body = await read_body(dict(request.scope["headers"]), request.receive, most, seconds)
    return json_object(body) if body else {}


def _health(*names: str) -> Any:
    schema = thing({name: some(TEXT) if name == "missing" else FLAG for name in names})
    return {
        "200": {"description": "Yes.", **content(schema)},
        "503": {"description": "No.", **content(schema)},
    }


def _yes_or_no(fields: dict[str, Any], yes: bool) -> Response:
    return Response(orjson.dumps(fields), 200 if yes else 503, media_type="application/json")


def _json(value: object) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


class Assets:
    """The console's static files, read off the event loop when they are first asked for. All replies share them."""

    def __init__(self) -> None:
        self.paths: dict[tuple[str, str], Path] = {}  # of those that were asked for and are there
        self.contents: dict[Path, tuple[int, bytes]] = {}  # when the file last changed, what is in it
        self.reading = asyncio.Lock()

    async def reply(self, name: str, below: str = "") -> Response:
        """A file of the console's folder, or of the folder `below` in it."""
        kind, path = ASSETS.get(name.rpartition(".")[2]), self.paths.get((below, name)) or self._find(name, below)
        if kind is None or path is None:
            raise HTTPException(404)
        try:
            content = await self._content(path)
        except (FileNotFoundError, IsADirectoryError):
            raise HTTPException(404) from None
        self.paths[below, name] = path
        return Response(content, headers={"cache-control": "no-cache"}, media_type=kind)

    def _find(self, name: str, below: str) -> Path | None:
        folder = Path(str(files("dubito.service"))) / "console" / below
        return next((path for path in folder.iterdir() if path.name == name), None) if folder.is_dir() else None

    async def _content(self, path: Path) -> bytes:
        changed, content = self.contents.get(path, (-1, b""))
        if changed == path.stat().st_mtime_ns:
            return content
        async with self.reading:  # once, for all who ask
            changed = path.stat().st_mtime_ns
            if self.contents.get(path, (-1, b""))[0] != changed:
                self.contents[path] = changed, await asyncio.to_thread(path.read_bytes)
        return self.contents[path][1]


def about(served: ServedModel, state: State) -> dict[str, Any]:
    """Description of a model for clients; without paths or names of machines."""
    model, known = served.model, served.known
    calibration = model.card.calibration
    calibrated = None
    if calibration is not None:
        calibrated = calibration.model_dump(
            mode="json", include={"false_positive_rate", "coverage", "measure", "temperature", "sets"}
        )
        if calibration.classes is not None:
            calibrated["classes"] = [part.coverage for part in calibration.classes]
        if calibration.groups is not None:
            calibrated["groups"] = {name: part.coverage for name, part in calibration.groups.items()}
    task, beside = model.manifest.task, model.card.plain
    return {
        "name": served.name,
        "version": served.version,
        "task": task.kind,
        "architecture": known["architecture"]["name"],
        "methods": model.manifest.methods,
        "method": model.method,
        "input": served.declared.model_dump(mode="json"),
        "labels": known["labels"],
        "targets": known["targets"],
        "noise": known["noise"],
        "outputs": task.outputs if task.kind == "regression" else None,
        "parameters": known["parameters"],
        "deterministic_parameters": known["deterministic"],
        "bytes": served.bytes,
        "calibration": calibrated,
        "metrics": known["metrics"],
        "plain": None if beside is None else beside.model_dump(mode="json") | {"verdict": beside_plain(beside)},
        "sha256": known["sha256"],
        "samples": state.settings.samples,
        "max_samples": state.settings.max_samples,
        "device": str(model.device),
    }


def metadata_of(served: ServedModel) -> dict[str, Any]:
    """Metadata of a model in the Open Inference Protocol."""
    return {
        "name": served.name,
        "versions": [served.version],
        "platform": "dubito_safetensors",
        "inputs": [{"name": INPUT, "datatype": "FP32", "shape": [-1, *served.declared.shape]}],
        "outputs": [
            {"name": output, "datatype": kind, "shape": shape}
            for output, (kind, shape) in declared_outputs(served.model).items()
            if output != DRAWS
        ],
    }
