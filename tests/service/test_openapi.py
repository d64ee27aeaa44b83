"""The OpenAPI document against the live server: nothing is answered that it does not say, and nothing is left out."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from dubito.service.settings import Settings
from dubito.service.web.predict import V1, V2
from dubito.service.web.routes import routes
from dubito.service.web.state import State
from tests.service.conftest import Live, Serve

INPUTS = {"digits": np.full((2, 1, 8, 8), 0.25), "prices": np.full((3, 4), -0.5)}
UNLOAD = "/v2/repository/models/{name}/unload"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(
    serve: Serve, make_artifact: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, small_digits: Path
) -> Live:
    """One of its own, whose second model may be unloaded; quick to start, and to answer whatever is asked for."""
    second = make_artifact(tmp_path_factory.mktemp("openapi") / "prices.safetensors", kind="regression")
    return serve(small_digits, second, "--set", "buckets=1,2", "--set", "max_samples=64")


@pytest.fixture(scope="module")
def document(server: Live) -> Json:
    found: Json = httpx.get(f"{server.url}/openapi.json").json()
    return found


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield path, method.upper(), operation


def strict(value: Any) -> Any:
    """A copy in which objects have the properties that they name and no others."""
    if isinstance(value, list):
        return [strict(part) for part in value]
    if not isinstance(value, dict):
        return value
    found = {key: strict(part) for key, part in value.items()}
    if value.get("type") == "object" and "properties" in value:
        found.setdefault("additionalProperties", False)
    return found


def test_document_has_every_route_and_no_other(document: Json) -> None:
    expected = {
        (route.path, method)
        for route in routes(State(Settings())).routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods or ()
    }
    expected |= {(path, "POST") for pattern in (V1, V2) for path in templates(pattern)}
    assert {(path, method) for path, method, _ in operations(document)} == expected
    assert len({operation["operationId"] for _, _, operation in operations(document)}) == len(expected)


def templates(pattern: re.Pattern[str]) -> list[str]:
    """The paths that a pattern of ours takes, with names for its groups."""
    optional = re.compile(r"\(\?:(.*)\)\?")
    shapes = {optional.sub(r"\1", pattern.pattern), optional.sub("", pattern.pattern)}
    found = [shape.replace("([^/]+)", "{name}", 1).replace("([^/]+)", "{version}") for shape in shapes]
    assert all(pattern.fullmatch(path) for path in found)
    return found


def test_every_path_of_the_document_is_there(server: Live, document: Json) -> None:
    """A wrong method is told the right ones."""
    for path, method, _ in operations(document):
        other = "DELETE"
        reply = httpx.request(other, server.url + path.format(name="digits", version="1"))
        assert reply.status_code == 405, path
        assert method in reply.headers["allow"]
        assert "error" in reply.json() if path.startswith("/v2") else reply.json()["status"] == 405


def test_examples_are_answered(server: Live, document: Json) -> None:
    """Every operation, by the examples of its parameters and of its body; the one that unloads comes last."""
    sent: Counter[str] = Counter()
    for path, method, operation in sorted(operations(document), key=lambda found: found[0] == UNLOAD):
        parameters = {p["name"]: p["example"] for p in operation.get("parameters", []) if p["in"] == "path"}
        url = server.url + path.format(**parameters)
        bodies = [
            (kind, example["value"])
            for kind, content in operation.get("requestBody", {}).get("content", {}).items()
            for example in content.get("examples", {}).values()
        ]
        assert (method == "POST") == bool(bodies), f"{path} has no example of a body"
        for kind, body in bodies:
            assert kind == "application/json"
            reply = httpx.request(method, url, json=body)
            assert reply.status_code == 200, f"{path}: {reply.text}"
            sent[path] += 1
        if not bodies:
            assert httpx.request(method, url).status_code == 200, path
    assert {path for path in sent if "predict" in path or "infer" in path} == {
        *templates(V1),
        *templates(V2),
    }
    assert httpx.post(f"{server.url}/v2/repository/models/digits/load", timeout=60).status_code == 200


def test_every_operation_says_what_may_go_wrong(document: Json) -> None:
    for path, _, operation in operations(document):
        assert operation["summary"], path
        assert all(reply["description"] for reply in operation["responses"].values()), path
        kind = "application/json" if path.startswith("/v2") else "application/problem+json"
        for status, reply in operation["responses"].items():
            if status != "200" and "health" not in path and path != "/readyz":
                assert list(reply["content"]) == [kind], (path, status)


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("hard", "easy"), [(6, 3), pytest.param(100, 20, marks=pytest.mark.slow)])
def test_no_reply_is_undocumented(server: Live, document: Json, mode: str, hard: int, easy: int) -> None:
    """Neither a status, nor a type, nor a field; and no operation fails, whatever comes."""
    import schemathesis  # takes seconds, and this test alone needs it

    told = strict({part: value for part, value in document.items() if part != "components"})
    requests = ("PredictRequest", "InferenceRequest")
    told["components"] = {
        "schemas": {
            name: schema if name in requests else strict(schema)
            for name, schema in document["components"]["schemas"].items()
        }
    }
    schema = schemathesis.openapi.from_dict(told)
    schema.config.update(base_url=server.url)
    seen: Counter[tuple[str, int]] = Counter()
    for found in schema.get_all_operations():
        operation: Any = found.ok()
        if mode == "negative" and "requestBody" not in operation.definition.raw:
            continue  # paths are text, so that no wrong one can be made
        many = "predict" in operation.path or "infer" in operation.path
        with httpx.Client(base_url=server.url, timeout=60) as client:
            ask(operation, mode, hard if many else easy, seen, client)
    statuses = {label: {status for at, status in seen if at == label} for label, _ in seen}
    for label, found_statuses in statuses.items():
        if mode == "positive":
            predicts = label.endswith(("/predict", "/infer"))  # whose sizes must fit: the examples' test sends such
            assert predicts or 200 in found_statuses, f"{label} was never answered"
        else:
            assert 400 in found_statuses, f"{label} was never refused"
    assert httpx.get(f"{server.url}/readyz").json() == {"ready": True, "missing": []}


def ask(operation: Any, mode: str, examples: int, seen: Counter[tuple[str, int]], client: httpx.Client) -> None:
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    wanted: Any = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    ]

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=GenerationMode(mode)), st.integers(0, 9))
    def go(case: Any, choice: int) -> None:
        if choice:  # mostly a model that there is
            model = "prices" if choice % 4 == 3 else "digits"
            aim(case, model, well=choice > 4 and mode == "positive")
        patient(case)
        reply = case.call(timeout=60)
        seen[operation.label, reply.status_code] += 1
        case.validate_response(reply, checks=wanted)
        if case.path == UNLOAD and reply.status_code == 200:
            name = case.path_parameters["name"]
            assert client.post(f"/v2/repository/models/{name}/load").status_code == 200

    try:
        go()
    except Unsatisfiable:
        pytest.fail(f"{operation.label}: nothing can be made of its schema")


def patient(case: Any) -> None:
    """A millisecond is over soon, and 504 then no fault of the server."""
    for options in (case.query, case.body, case.body.get("parameters") if isinstance(case.body, dict) else None):
        for key in ("timeout_ms", "timeout"):
            if isinstance(options, dict) and isinstance(options.get(key), int):
                options[key] = 30_000 if key == "timeout_ms" else 30_000_000


def aim(case: Any, model: str, *, well: bool) -> None:
    """At a model; where it is to go well, with inputs that fit it."""
    if "name" in case.path_parameters:
        case.path_parameters["name"] = "prices" if case.path == UNLOAD else model
    if "version" in case.path_parameters:
        case.path_parameters["version"] = "1"
    if well and isinstance(case.body, dict):
        x = INPUTS[model]
        if case.path.endswith("/predict") and "images" not in case.body:
            case.body["inputs"] = x.tolist()
            case.query = {}
        if case.path.endswith("/infer"):
            case.body["inputs"] = [{"name": "input", "shape": x.shape, "datatype": "FP32", "data": x.tolist()}]
            case.headers = {}
            case.body.pop("outputs", None)
