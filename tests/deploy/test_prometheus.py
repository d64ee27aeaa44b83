"""Rules, alerts and the dashboard's queries: they parse, do what they should, and name what the server exposes."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

REPO = Path(__file__).parents[2]
FOLDER = REPO / "deploy" / "prometheus"
DASHBOARD = REPO / "deploy" / "grafana" / "dashboards" / "dubito.json"
OPERATIONS = REPO / "docs" / "operations.md"
TARGET = {"job", "instance"}  # what Prometheus adds to each series that it scrapes
OWN = {"up": TARGET, "ALERTS": TARGET | {"alertname", "alertstate", "severity", "model"}}  # what it makes itself
KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
GROUPING = r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)"

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="NOT CHECKED: rules, alerts and queries, for there is no promtool here (Debian: apt install prometheus)",
)


@dataclass(frozen=True)
class Used:
    """What an expression names: labels in selectors by metric, and labels that series are grouped or matched by."""

    metrics: dict[str, set[str]]
    grouped: set[str]


def used(expr: str) -> Used:
    """Found word by word, which is enough for expressions that promtool has parsed."""
    expr = re.sub(r"#.*", "", re.sub(r'"[^"]*"', '""', expr))
    grouped = {label for labels in re.findall(GROUPING, expr) for label in re.findall(r"\w+", labels)}
    expr = re.sub(r"\[[^]]*\]", " ", re.sub(GROUPING, " ", expr))
    metrics: dict[str, set[str]] = {}
    for name, selector in re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?![\w:]|\s*\()\s*(\{[^}]*\})?", expr):
        if name not in KEYWORDS:
            metrics.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
    return Used(metrics, grouped)


def rules_of(*files: Path) -> list[dict[str, Any]]:
    return [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def exposed(url: str) -> dict[str, set[str]]:
    """Names on /metrics with their labels, once somebody has asked for a prediction."""
    answer = httpx.post(f"{url}/v1/models/digits/predict", json={"inputs": [[[[0.0] * 8] * 8]]})
    assert answer.status_code == 200
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels, TARGET)
    return found


def recorded(rules: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Names that the rules record; a name says its labels before the first colon, and a rule may add some."""
    found: dict[str, set[str]] = {}
    for rule in rules:
        if "record" in rule:
            level = set(rule["record"].partition(":")[0].split("_")) - {"dubito"}
            more = TARGET if "instance" in level else set()
            found.setdefault(rule["record"], set()).update(level, rule.get("labels", {}), more)
    return found


def complaints(expressions: list[str], known: dict[str, set[str]]) -> list[str]:
    """Names and labels that nobody gives."""
    found = []
    for expr in expressions:
        names = used(expr)
        labels = set().union(*(known.get(name, set()) for name in names.metrics))
        for name, selected in names.metrics.items():
            if name not in known:
                found.append(f"no metric {name}: {expr}")
            else:
                found += [f"no label {label} of {name}: {expr}" for label in sorted(selected - known[name])]
        found += [f"no label {label}: {expr}" for label in sorted(names.grouped - labels)]
    return found


def run(*command: str | Path, cwd: Path = FOLDER) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["promtool", *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=120)


def copied(folder: Path, file: str, old: str, new: str, of: Path = FOLDER) -> Path:
    """A copy of the folder with a change in one of its files."""
    shutil.copytree(of, folder / "copy")
    text = (folder / "copy" / file).read_text()
    assert old in text
    (folder / "copy" / file).write_text(text.replace(old, new))
    return folder / "copy"


def dashboard_queries(picture: ModuleType) -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    found = [query.expr for panel in picture.panels(dashboard) for query in picture.queries(panel)]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            values = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])
            assert values
            found.append(f"count by ({values[2]}) ({values[1]})")
    return found


def all_expressions(picture: ModuleType) -> list[str]:
    return [rule["expr"] for rule in rules_of(FOLDER / "rules.yml", FOLDER / "alerts.yml")] + dashboard_queries(picture)


def as_rules(file: Path, expressions: list[str]) -> Path:
    rules = [{"record": f"query:{i}", "expr": expr} for i, expr in enumerate(expressions)]
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    return file


def complaint_about(folder: Path) -> str:
    """What promtool has against the configuration and the rules; nothing where they are valid."""
    done = run("check", "config", "prometheus.yml", cwd=folder)
    told = done.stdout + done.stderr
    # a rule file that is not there is no error to it, so what it has read is counted
    return "" if done.returncode == 0 and "2 rule files found" in told else told


@promtool
def test_configuration_and_rules_are_valid() -> None:
    assert complaint_about(FOLDER) == ""


@pytest.mark.slow
@promtool
def test_rules_record_and_alerts_fire_as_they_should() -> None:
    done = run("test", "rules", "tests.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_queries_of_the_dashboard_parse(picture: ModuleType, tmp_path: Path) -> None:
    done = run("check", "rules", as_rules(tmp_path / "queries.yml", dashboard_queries(picture)))
    assert done.returncode == 0, done.stderr


def test_every_rule_and_alert_has_a_test() -> None:
    tests = yaml.safe_load((FOLDER / "tests.yml").read_text())["tests"]
    asked = " ".join(test["expr"] for one in tests for test in one.get("promql_expr_test", []))
    alerts = [test for one in tests for test in one.get("alert_rule_test", [])]
    fire = {test["alertname"] for test in alerts if test.get("exp_alerts")}
    quiet = {test["alertname"] for test in alerts if not test.get("exp_alerts")}
    for rule in rules_of(FOLDER / "rules.yml"):
        assert rule["record"] in asked
    names = {rule["alert"] for rule in rules_of(FOLDER / "alerts.yml")}
    assert names == fire == quiet


def test_names_and_labels_are_those_of_the_server(url: str, picture: ModuleType) -> None:
    rules = rules_of(FOLDER / "rules.yml", FOLDER / "alerts.yml")
    assert complaints(all_expressions(picture), exposed(url) | recorded(rules) | OWN) == []


def test_every_series_of_the_server_is_looked_at(url: str, picture: ModuleType) -> None:
    """What nobody looks at need not be counted."""
    seen = {name for expr in all_expressions(picture) for name in used(expr).metrics}
    stems = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in exposed(url) if name.startswith("dubito_")}
    stems = {name for name in stems if not name.endswith("_created")}
    assert len(stems) == 23
    assert stems - {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in seen} == set()


def test_alerts_say_what_to_do() -> None:
    for rule in rules_of(FOLDER / "alerts.yml"):
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.skipif(not OPERATIONS.exists(), reason="there is no docs/operations.md yet")
def test_every_runbook_is_there() -> None:
    missing = {rule["alert"].lower() for rule in rules_of(FOLDER / "alerts.yml")} - anchors(OPERATIONS.read_text())
    assert missing == set(), "alerts without a section of their own in docs/operations.md"


@promtool
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("rules.yml", "sum by (model) (rate(dubito_ood_total[15m]))", "sum by (model) (rate(dubito_ood_total[15m])"),
        ("alerts.yml", "for: 10m", "for: ten minutes"),
        ("alerts.yml", "{{ $labels.model }}", "{{ $labels.model }"),
        ("prometheus.yml", "scrape_interval", "scrape_intervall"),
        ("prometheus.yml", "alerts.yml", "alert.yml"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, file: str, old: str, new: str) -> None:
    assert complaint_about(copied(tmp_path, file, old, new)) != ""


WRONG = [  # file, change, and the rule or alert whose test must fail
    ("rules.yml", 'outcome!="gone"', 'outcome=~".*"', 'expr: "model:dubito_errors:ratio5m"'),
    ("alerts.yml", "> 0.92", "> 0.97", "alertname: DubitoDeviceMemory"),
    ("alerts.yml", " and model:dubito_requests:rate5m > 0.1", "", "alertname: DubitoErrors"),
]


@pytest.mark.slow
@promtool
def test_a_wrong_rule_fails_its_test(tmp_path: Path) -> None:
    """Three at once, for one run of the rules' tests takes seconds; of the others none fails."""
    folder = FOLDER
    for i, (file, old, new, _) in enumerate(WRONG):
        (tmp_path / str(i)).mkdir()
        folder = copied(tmp_path / str(i), file, old, new, of=folder)
    done = run("test", "rules", "tests.yml", cwd=folder)
    assert done.returncode != 0
    told = done.stdout + done.stderr
    assert "FAILED" in told
    failed = {line.strip().partition(",")[0] for line in told.splitlines() if re.match(r" +(expr|alertname): ", line)}
    assert failed == {rule for *_, rule in WRONG}


@promtool
def test_a_broken_query_is_refused(picture: ModuleType, tmp_path: Path) -> None:
    broken = [query.replace("sum(", "summ(") for query in dashboard_queries(picture)]
    assert run("check", "rules", as_rules(tmp_path / "queries.yml", broken)).returncode != 0


def test_a_misspelt_name_is_reported(url: str) -> None:
    known = exposed(url) | recorded(rules_of(FOLDER / "rules.yml")) | OWN

    def told(expr: str) -> list[str]:
        return [complaint.partition(": ")[0] for complaint in complaints([expr], known)]

    assert told("sum by (model, le) (rate(dubito_request_seconds_bucket[5m])) / 2") == []
    assert told("rate(dubito_requests_seconds_count[5m])") == ["no metric dubito_requests_seconds_count"]
    assert told('rate(dubito_rejected_total{cause="key"}[5m])') == ["no label cause of dubito_rejected_total"]
    assert told("sum by (modell) (dubito_queue_depth)") == ["no label modell"]
    assert told('up{job="dubito"} == 1 unless on (pod) dubito_queue_depth') == ["no label pod"]
    assert told("model:dubito_ood:ratio15m > model:dubito_ood:ratio1w") == ["no metric model:dubito_ood:ratio1w"]


def test_a_missing_runbook_would_be_seen() -> None:
    assert anchors("# Operations\n\n### DubitoDown\n\n## `DubitoSlow`\n## What to do\n") == {
        "operations",
        "dubitodown",
        "dubitoslow",
        "what-to-do",
    }
