"""The dashboard: Grafana's schema, its grid, its data source; and every query asked of a real Prometheus."""

import copy
import enum
import io
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins, runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as schema

from tests.stores import free_port

REPO = Path(__file__).parents[2]
GRAFANA = REPO / "deploy" / "grafana"
PROMETHEUS = REPO / "deploy" / "prometheus"
Json = Any

plugins.register_default_plugins()


@pytest.fixture
def dashboard() -> Json:
    return json.loads((GRAFANA / "dashboards" / "dubito.json").read_text())


# Grafana publishes its schema as types: https://github.com/grafana/grafana-foundation-sdk. They read what they know and
# check nothing, so the JSON is held against their annotations here: unknown fields, missing fields and wrong types.


def complaints(value: Json, type_: Any, at: str = "dashboard") -> list[str]:
    """What in `value` is not as `type_` says."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if type_ in (object, Any):
        return []
    if origin is typing.Union:
        return _any_of(value, arguments, at)
    if origin is typing.Literal:
        return [] if value in arguments else [f"{at}: {value!r} is none of {arguments}"]
    if origin is list and isinstance(value, list):
        return [told for i, item in enumerate(value) for told in complaints(item, arguments[0], f"{at}[{i}]")]
    if origin is dict and isinstance(value, dict):
        return [told for key, item in value.items() for told in complaints(item, arguments[1], f"{at}.{key}")]
    if origin is None and issubclass(type_, enum.Enum):
        return [] if value in [one.value for one in type_] else [f"{at}: {value!r} is no {type_.__name__}"]
    if type_ is float and isinstance(value, int) and not isinstance(value, bool):
        return []
    if type_ in (str, int, float, bool, NoneType):
        return [] if type(value) is type_ else [f"{at}: {value!r} is no {type_.__name__}"]
    if origin is None and isinstance(value, dict):
        return _fields(value, type_, at)
    return [f"{at}: {value!r} is no {type_}"]


def _any_of(value: Json, types: tuple[Any, ...], at: str) -> list[str]:
    if schema.RowPanel in types:
        return complaints(value, schema.RowPanel if value["type"] == "row" else schema.Panel, at)
    each = [complaints(value, type_, at) for type_ in types if value is None or type_ is not NoneType]
    return min(each, key=len)


def hints(type_: Any) -> dict[str, Any]:
    """Fields by their names in JSON: `grid_pos` is gridPos, and `type_val` is type."""
    return {
        re.sub(r"_(\w)", lambda letter: letter[1].upper(), name.removesuffix("_val")): hint
        for name, hint in typing.get_type_hints(type_).items()
    }


def _fields(value: dict[str, Json], type_: Any, at: str) -> list[str]:
    known = hints(type_)
    if type_ is schema.Panel:
        known |= _of_plugin(value)
    found = [f"{at}: no field {name} in {type_.__name__}" for name in value if name not in known]
    found += [
        f"{at}: no {name}, which {type_.__name__} needs"
        for name, hint in known.items()
        if name not in value and NoneType not in typing.get_args(hint) and hint is not object
    ]
    for name in value.keys() & known.keys():
        found += complaints(value[name], known[name], f"{at}.{name}")
    if type_ is schema.Panel:
        found += _field_config(value, at)
    return found


def _of_plugin(panel: dict[str, Json]) -> dict[str, Any]:
    """Options and queries have the types of the panel's plugin and of its data source."""
    config = runtime.panelcfg_config(panel["type"])
    source = runtime.Runtime().dataquery_variants.get(panel["datasource"]["type"])
    assert config is not None, f"Grafana has no panel {panel['type']}"
    assert source is not None, f"Grafana has no data source {panel['datasource']['type']}"
    options: Any = config.options_from_json_hook
    query: Any = source.from_json_hook
    return {"options": options.__self__, "targets": list.__class_getitem__(query.__self__)}


def _field_config(panel: dict[str, Json], at: str) -> list[str]:
    """What the plugin adds to each field, and what the overrides change; neither is typed where it stands."""
    config: Any = runtime.panelcfg_config(panel["type"])
    custom = hints(config.field_config_from_json_hook.__self__) if config.field_config_from_json_hook else {}
    known = hints(schema.FieldConfig) | {f"custom.{name}": hint for name, hint in custom.items()}
    defaults = panel["fieldConfig"]["defaults"].get("custom", {})
    changes = [(f"custom.{name}", value) for name, value in defaults.items()]
    for override in panel["fieldConfig"]["overrides"]:
        changes += [(change["id"], change["value"]) for change in override["properties"]]
    found = []
    for name, value in changes:
        told = complaints(value, known[name], f"{at} {name}") if name in known else [f"{at}: no field {name}"]
        found += told
    return found


def test_the_dashboard_is_as_grafana_says(dashboard: Json) -> None:
    assert complaints(dashboard, schema.Dashboard) == []


def test_grafanas_own_reader_loses_nothing(dashboard: Json) -> None:
    """Their types write again what they read, with defaults added."""

    def kept(before: Json, after: Json, at: str) -> Iterator[str]:
        if isinstance(before, dict):
            for name, value in before.items():
                yield from kept(value, after[name], f"{at}.{name}") if name in after else [f"{at}.{name}"]
        elif isinstance(before, list):
            for i, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from kept(one, other, f"{at}[{i}]")
        elif before != after:
            yield at

    again = json.loads(json.dumps(schema.Dashboard.from_json(copy.deepcopy(dashboard)), cls=JSONEncoder))
    assert list(kept(dashboard, again, "dashboard")) == []


Break = Callable[[Json], object]
BREAKS: list[tuple[str, Break, str]] = [
    ("an unknown field", lambda d: d.update(titel="x"), "no field titel in Dashboard"),
    ("a missing field", lambda d: d.pop("schemaVersion"), "no schemaVersion"),
    ("a wrong type", lambda d: d.update(editable="yes"), "dashboard.editable: 'yes' is no bool"),
    ("text for a number", lambda d: d["panels"][0]["gridPos"].update(w="3"), "gridPos.w: '3' is no int"),
    ("an unknown field of a query", lambda d: d["panels"][0]["targets"][0].update(query="up"), "no field query"),
    ("an unknown word", lambda d: d["panels"][0]["options"].update(graphMode="pie"), "'pie' is no BigValueGraphMode"),
    ("an unknown option", lambda d: d["panels"][0]["options"].update(size=3), "no field size in Options"),
    ("an unknown unit of lines", lambda d: custom(d).update(lineWidth="thick"), "custom.lineWidth: 'thick'"),
    ("an unknown style", lambda d: custom(d).update(lineThickness=2), "no field custom.lineThickness"),
    ("an unknown override", lambda d: override(d).update(id="colour"), "no field colour"),
    (
        "a variable of no kind",
        lambda d: d["templating"]["list"][1].update(type="querry"),
        "'querry' is no VariableType",
    ),
]


def custom(dashboard: Json) -> Json:
    return next(p for p in dashboard["panels"] if p["type"] == "timeseries")["fieldConfig"]["defaults"]["custom"]


def override(dashboard: Json) -> Json:
    panel = next(p for p in dashboard["panels"] if p["type"] == "timeseries")
    return panel["fieldConfig"]["overrides"][0]["properties"][0]


@pytest.mark.parametrize(("what", "spoil", "told"), BREAKS, ids=[what for what, _, _ in BREAKS])
def test_a_broken_dashboard_is_reported(dashboard: Json, what: str, spoil: Break, told: str) -> None:
    spoil(dashboard)
    found = complaints(dashboard, schema.Dashboard)
    assert len(found) == 1
    assert told in found[0]


def misplaced(panels: list[Json]) -> list[str]:
    """Panels outside the 24 columns, on top of each other, or with a hole above them."""
    taken: dict[tuple[int, int], str] = {}
    found = []
    for panel in panels:
        at = panel["gridPos"]
        if at["x"] + at["w"] > 24:
            found.append(f"{panel['title']} is too wide")
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            if cell in taken:
                found.append(f"{panel['title']} lies on {taken[cell]}")
                break
            taken[cell] = panel["title"]
    bottom = 1 + max(y for _, y in taken)
    return found + (["there are holes"] if len(taken) < 24 * bottom else [])


def test_the_grid_is_full_and_every_panel_explains_itself(dashboard: Json) -> None:
    panels = dashboard["panels"]
    assert misplaced(panels) == []
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    panels[1]["gridPos"]["x"] -= 1
    assert misplaced(panels) == ["Models served lies on Servers up", "there are holes"]


def test_the_data_source_is_the_provisioned_one(dashboard: Json, picture: ModuleType) -> None:
    told = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    [source] = told["datasources"]
    variable = next(v for v in dashboard["templating"]["list"] if v["type"] == "datasource")
    assert (variable["current"]["value"], variable["query"]) == (source["uid"], source["type"])
    for panel in picture.panels(dashboard):
        assert {json.dumps(one["datasource"]) for one in [panel, *panel["targets"]]} == {
            json.dumps({"type": source["type"], "uid": f"${{{variable['name']}}}"})
        }
    every = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == every == f"{picture.SCRAPE}s"


def test_addresses_and_folders_are_those_of_the_compose_file() -> None:
    services = yaml.safe_load((REPO / "docker-compose.yml").read_text())["services"]
    mounted = [tuple(volume.split(":")[:2]) for volume in services["grafana"]["volumes"]]
    [provider] = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "dubito.yml").read_text())["providers"]
    assert ("./deploy/grafana/dashboards", provider["options"]["path"]) in mounted
    assert ("./deploy/grafana/provisioning", "/etc/grafana/provisioning") in mounted
    [source] = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    [job] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["dubito:8000"]}]
    for name in ("dubito", "dubito-cpu"):  # whichever profile runs answers to this name
        assert services[name]["networks"]["default"]["aliases"] == ["dubito"]


@pytest.fixture(scope="module")
def prometheus(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real one with our configuration; only the target's address is another, and it asks more often."""
    if shutil.which("prometheus") is None:
        pytest.skip(
            "NOT CHECKED: the dashboard's queries, for there is no prometheus here (Debian: apt install prometheus)"
        )
    folder = tmp_path_factory.mktemp("prometheus")
    shutil.copytree(PROMETHEUS, folder / "configuration")
    file = folder / "configuration" / "prometheus.yml"
    changed = file.read_text()
    for old, new in {
        "dubito:8000": url.removeprefix("http://"),
        "scrape_interval: 5s": "scrape_interval: 2s",
        "scrape_timeout: 4s": "scrape_timeout: 2s",
        "evaluation_interval: 15s": "evaluation_interval: 5s",
    }.items():
        assert old in changed
        changed = changed.replace(old, new)
    file.write_text(changed)
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stderr=log,
        )
    try:
        deadline = time.monotonic() + 30
        while not _ready(f"http://{address}"):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)


def _ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def ask_for(url: str, seconds: float) -> None:
    """Digits, and after half of the time noise among them; now and then what is refused or comes too late."""
    with np.load(REPO / "training" / "digits.npz") as arrays:
        pixels = arrays["x"].astype(np.float32)[:, None]
    digits = (pixels - pixels.mean()) / pixels.std()
    rng, noise = random.Random(0), np.random.default_rng(0)
    began = time.monotonic()
    with httpx.Client(base_url=url, timeout=60) as client:
        while (spent := time.monotonic() - began) < seconds:
            x = digits[noise.integers(len(digits), size=rng.choice((1, 1, 2, 8)))]
            if spent > seconds / 2 and rng.random() < 0.3:
                x = noise.uniform(-2, 2, size=x.shape).astype(np.float32)
            body = io.BytesIO()
            np.save(body, x)
            asked: dict[str, str | int] = {"samples": rng.choice((8, 20, 20, 64, "auto"))}
            kind = rng.random()
            if kind < 0.04:
                asked["samples"] = -1
            elif kind < 0.08:
                asked |= {"samples": 1024, "timeout_ms": 1}
            elif kind < 0.12:
                with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as bad:
                    bad.sendall(b"no HTTP\r\n\r\n")  # a connection that is closed
                    bad.recv(100)
            headers = {"content-type": "application/x-npy"}
            client.post("/v1/models/digits/predict", content=body.getvalue(), params=asked, headers=headers)
            time.sleep(0.08)


@pytest.mark.slow
def test_every_query_returns_data_under_load(
    url: str, prometheus: str, picture: ModuleType, dashboard: Json, tmp_path: Path
) -> None:
    ask_for(url, 75)
    span = picture.Span(time.time() - 90, time.time())
    with httpx.Client(base_url=prometheus, timeout=30) as client:
        empty = [
            query.expr
            for panel in picture.panels(dashboard)
            for query in picture.queries(panel)
            if not any(points for _, points in picture.run_query(client, query, span))
        ]
        assert empty == []
        nothing = picture.Query("rate(dubito_nothing_total[1m])", "")
        assert picture.run_query(client, nothing, span) == []  # the check would see it
        names = client.get("/api/v1/label/model/values").json()["data"]  # what the variable offers
        assert names == ["digits"]
        alerts = client.get("/api/v1/rules", params={"type": "alert"}).json()["data"]["groups"]
        broken = [rule["name"] for group in alerts for rule in group["rules"] if rule["health"] != "ok"]
        assert broken == []
    page = tmp_path / "dashboard.html"
    command: list[str | Path] = [
        sys.executable,
        REPO / "docs" / "dashboard.py",
        "--prometheus",
        prometheus,
        "--out",
        page,
        "--minutes",
        "1.5",
    ]
    subprocess.run(command, check=True, timeout=60)
    text = page.read_text()
    assert "no data" not in text
    assert all(panel["title"] in text for panel in dashboard["panels"])
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)  # nothing from outside
    photograph(page, tmp_path / "dashboard.png")


def photograph(page: Path, picture: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("the page is right, but NOT PHOTOGRAPHED: there is no chromium here (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        window = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = window.new_page(viewport={"width": 1720, "height": 1000})
        tab.goto(page.as_uri())
        tab.screenshot(path=picture, full_page=True)
        window.close()
    assert picture.stat().st_size > 50_000
    if folder := os.environ.get("DUBITO_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, Path(folder) / picture.name)
