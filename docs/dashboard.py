"""Draws the Grafana dashboard without Grafana: runs its queries on a Prometheus, and writes one HTML page of SVG.

Try: python docs/dashboard.py --prometheus http://localhost:9090 --out dashboard.html
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import httpx

DASHBOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards" / "dubito.json"
WIDTH, CELL, GAP = 1680, 38, 8  # pixels: the page, a row of the grid, between panels
SCRAPE = 5  # seconds, as in provisioning/datasources
CLASSIC = ("#73BF69", "#F2CC0C", "#8AB8FF", "#FF780A", "#F2495C", "#5794F2", "#B877D9", "#705DA0", "#37872D", "#FADE2A")
QUIET = "#8E8E8E"
Panel = dict[str, Any]


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True)
class Line:
    """One series with its style."""

    name: str
    points: list[tuple[float, float]]  # seconds, value; without NaN
    color: str
    custom: dict[str, Any] = field(default_factory=dict)  # widths, fills and dashes

    @property
    def last(self) -> float:
        return self.points[-1][1] if self.points else math.nan


@dataclass(frozen=True)
class Span:
    start: float
    end: float

    @property
    def step(self) -> float:
        return max(1.0, round((self.end - self.start) / 240))


def panels(dashboard: Panel) -> list[Panel]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(panel: Panel, step: float = SCRAPE) -> list[Query]:
    """The panel's queries with values for Grafana's variables: all models, and a rate over at least four scrapes."""
    values = {"model": ".+", "__rate_interval": f"{int(max(step + SCRAPE, 4 * SCRAPE))}s"}
    filled = []
    for target in panel["targets"]:
        expr = re.sub(r"\$(\w+)", lambda name: values[name[1]], target["expr"])
        filled.append(Query(expr, target["legendFormat"]))
    return filled


def run_query(client: httpx.Client, query: Query, span: Span) -> list[tuple[str, list[tuple[float, float]]]]:
    """Names and points of the query's series."""
    parameters = {"query": query.expr, "start": str(span.start), "end": str(span.end), "step": str(span.step)}
    reply = client.post("/api/v1/query_range", data=parameters).json()
    if reply["status"] != "success":
        raise SystemExit(f"Prometheus refuses {query.expr!r}: {reply['error']}")
    named_series = []
    for series in reply["data"]["result"]:
        points = [(float(seconds), float(value)) for seconds, value in series["values"]]
        finite = [point for point in points if math.isfinite(point[1])]
        named_series.append((named(query.legend, series["metric"]), finite))
    return sorted(named_series)


def named(legend: str, labels: dict[str, str]) -> str:
    """A legend such as `{{model}} p99` with the labels' values."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda label: labels.get(label[1], ""), legend).strip()


def lines(client: httpx.Client, panel: Panel, span: Span) -> list[Line]:
    """All series of the panel, with its colours and styles."""
    config = panel["fieldConfig"]
    series: list[Line] = []
    for query in queries(panel, span.step):
        for name, points in run_query(client, query, span):
            color, custom = CLASSIC[len(series) % len(CLASSIC)], dict(config["defaults"].get("custom", {}))
            for override in config["overrides"]:
                if re.search(override["matcher"]["options"].strip("/"), name):
                    for change in override["properties"]:
                        if change["id"] == "color":
                            color = change["value"]["fixedColor"]
                        custom[change["id"].removeprefix("custom.")] = change["value"]
            series.append(Line(name, points, color, custom))
    return series


def text_of(value: float, unit: str, decimals: int | None = None) -> str:
    """A number with its unit, in about three digits."""
    if not math.isfinite(value):
        return "–"
    match unit:
        case "percentunit":
            return f"{100 * value:.3g} %" if decimals is None else f"{100 * value:.{decimals}f} %"
        case "bytes":
            return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
        case "s" if 0 < abs(value) < 1e-3:
            return f"{1e6 * value:.3g} µs"
        case "s" if 0 < abs(value) < 1:
            return f"{1e3 * value:.3g} ms"
    suffix = {"s": "s", "reqps": "req/s"}.get(unit, unit.partition(":")[2])
    return f"{value:,.0f} {suffix}".rstrip() if abs(value) >= 100 else f"{value:.3g} {suffix}".rstrip()


def _scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{value:.3g} {names[power]}" if value < 1000 else f"{value:.0f} {names[power]}"


def ticks(low: float, high: float, base: float = 10) -> list[float]:
    """About four round numbers; for bytes, powers of 2."""
    rough = (high - low) / 4
    if base == 1024:
        unit = 2.0 ** math.floor(math.log2(rough))
        step = next(unit * m for m in (1, 2, 4) if unit * m >= rough)
    else:
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def threshold_color(panel: Panel, value: float) -> str:
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return str(passed[-1]) if math.isfinite(value) else QUIET


def stat(panel: Panel, series: list[Line], span: Span, width: float, height: float) -> str:
    """One number, and its history as an area below it."""
    defaults = panel["fieldConfig"]["defaults"]
    line = series[0] if series else Line("", [], QUIET)
    color = threshold_color(panel, line.last)
    shadow = ""
    if panel["options"]["graphMode"] == "area" and len(line.points) > 1:
        top = max(value for _, value in line.points) or 1.0
        x, y = _scales(span, 0, top, 0, width, 0.62 * height, height)
        course = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in line.points)
        left, right = x(line.points[0][0]), x(line.points[-1][0])
        shadow = (
            f'<polygon points="{left:.1f},{height} {course} {right:.1f},{height}" fill="{color}" fill-opacity=".16"/>'
            f'<polyline points="{course}" fill="none" stroke="{color}" stroke-opacity=".6" stroke-width="1.5"/>'
        )
    number = escape(text_of(line.last, defaults["unit"], defaults.get("decimals")))
    size = min(0.3 * height, 1.6 * width / len(number))
    middle = 0.3 * height
    return _svg(
        width,
        height,
        f'{shadow}<text x="{width / 2:.0f}" y="{middle:.0f}" class="big" '
        f'style="font-size:{size:.0f}px;fill:{color}">'
        f"{number}</text>",
    )


def bargauge(panel: Panel, series: list[Line], span: Span, width: float, height: float) -> str:
    """A bar for each series, as long as its last value."""
    defaults = panel["fieldConfig"]["defaults"]
    top = max((line.last for line in series if line.points), default=0.0) or 1.0
    each = min(60.0, height / max(1, len(series)))
    names = min(0.5 * width, 7 * max((len(line.name) for line in series), default=0) + 10)
    room = width - names - 76
    drawn = []
    for i, line in enumerate(series):
        by_threshold = defaults["color"]["mode"] == "thresholds"
        color = threshold_color(panel, line.last) if by_threshold else line.color
        y, long = i * each, room * line.last / top
        drawn.append(
            f'<text x="{names - 8:.0f}" y="{y + each / 2:.0f}" class="end">{escape(line.name)}</text>'
            f'<rect x="{names:.0f}" y="{y + 4:.0f}" width="{room:.0f}" height="{each - 8:.0f}" class="empty"/>'
            f'<rect x="{names:.0f}" y="{y + 4:.0f}" width="{long:.0f}" height="{each - 8:.0f}" fill="{color}"/>'
            f'<text x="{width - 68:.0f}" y="{y + each / 2:.0f}" class="value" style="fill:{color}">'
            f"{escape(text_of(line.last, defaults['unit']))}</text>"
        )
    return _svg(width, height, "".join(drawn))


def timeseries(panel: Panel, series: list[Line], span: Span, width: float, height: float) -> str:
    """Lines over time, or stacked areas; the legend shows the last values."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    legend = "".join(
        f'<span><i style="background:{line.color}"></i>{escape(line.name)} '
        f"<b>{escape(text_of(line.last, unit))}</b></span>"
        for line in series
    )
    room, rows = 0.0, 1
    for line in series:
        need = 6.4 * (len(line.name) + len(text_of(line.last, unit))) + 34
        room, rows = (need, rows + 1) if room + need > width else (room + need, rows)
    height -= 18 * rows + 4
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    bands = list(
        _stacked(series) if stacked else ((line, [(t, 0.0, value) for t, value in line.points]) for line in series)
    )
    top = max((above for _, band in bands for _, _, above in band), default=0.0)
    top = 1.05 * top or 1.0
    x, y = _scales(span, 0, top, 64, width - 8, 8, height - 20)
    drawn = [_axes(span, top, unit, x, y, width)]
    drawn += [_band(line, band, span, x, y) for line, band in bands]
    return _svg(width, height, "".join(drawn)) + f'<div class="legend">{legend}</div>'


def _stacked(series: list[Line]) -> Iterator[tuple[Line, list[tuple[float, float, float]]]]:
    below: dict[float, float] = {}
    for line in series:
        band = []
        for t, value in line.points:
            band.append((t, below.get(t, 0.0), below.get(t, 0.0) + value))
            below[t] = band[-1][2]
        yield line, band


def _scales(
    span: Span, low: float, high: float, left: float, right: float, top: float, bottom: float
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    return (
        lambda seconds: left + (right - left) * (seconds - span.start) / (span.end - span.start),
        lambda value: bottom - (bottom - top) * (value - low) / (high - low),
    )


def _axes(
    span: Span, top: float, unit: str, x: Callable[[float], float], y: Callable[[float], float], width: float
) -> str:
    drawn = []
    for value in ticks(0, top, 1024 if unit == "bytes" else 10):
        drawn.append(
            f'<line x1="64" x2="{width - 8:.0f}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="grid"/>'
            f'<text x="58" y="{y(value):.1f}" class="end small">{escape(text_of(value, unit))}</text>'
        )
    length = span.end - span.start
    step = next((s for s in (10, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 86400) if length / s <= 6), 86400 * 7)
    shape = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%d %b"
    tick = math.ceil(span.start / step) * step
    while tick <= span.end:
        if 70 < x(tick) < width - 20:
            label = time.strftime(shape, time.localtime(tick))
            drawn.append(
                f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{y(top):.1f}" y2="{y(0):.1f}" class="grid"/>'
                f'<text x="{x(tick):.1f}" y="{y(0) + 13:.0f}" class="middle small">{label}</text>'
            )
        tick += step
    return "".join(drawn)


def _band(
    line: Line,
    band: list[tuple[float, float, float]],
    span: Span,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    """A line and the area below it, interrupted where points are missing."""
    runs: list[list[tuple[float, float, float]]] = []
    for point in band:
        if not runs or point[0] - runs[-1][-1][0] > 1.5 * span.step:
            runs.append([])
        runs[-1].append(point)
    custom, drawn = line.custom, []
    dash = " ".join(str(length) for length in custom.get("lineStyle", {}).get("dash", []))
    for run in runs:
        above = " ".join(f"{x(t):.1f},{y(high):.1f}" for t, _, high in run)
        below = " ".join(f"{x(t):.1f},{y(low):.1f}" for t, low, _ in reversed(run))
        if opacity := custom.get("fillOpacity", 0):
            drawn.append(f'<polygon points="{above} {below}" fill="{line.color}" fill-opacity="{opacity / 100}"/>')
        drawn.append(
            f'<polyline points="{above}" fill="none" stroke="{line.color}" stroke-width="{custom.get("lineWidth", 1)}" '
            f'stroke-dasharray="{dash}" stroke-linejoin="round" stroke-linecap="round"/>'
        )
    return "".join(drawn)


def _svg(width: float, height: float, inside: str) -> str:
    return f'<svg width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">{inside}</svg>'


DRAW: dict[str, Callable[[Panel, list[Line], Span, float, float], str]] = {
    "stat": stat,
    "bargauge": bargauge,
    "timeseries": timeseries,
}

STYLE = f"""
body {{ margin: 0; background: #111217; color: #ccccdc;
  font: 12px/1.3 Inter, Roboto, "Helvetica Neue", Arial, sans-serif; }}
main {{ width: {WIDTH}px; margin: 0 auto; padding: 12px 0; }}
header {{ display: flex; justify-content: space-between; align-items: baseline; padding: 0 0 10px; color: #9fa7b3; }}
h1 {{ margin: 0; font-size: 20px; font-weight: 500; color: #fff; }}
.grid24 {{ position: relative; }}
section {{ position: absolute; box-sizing: border-box; background: #181b1f;
  border: 1px solid #25282e; border-radius: 3px; }}
section h2 {{ margin: 0; padding: 7px 10px 0; font-size: 13px; font-weight: 500; color: #d8d9da; height: 19px;
  white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }}
section .body {{ padding: 2px 8px 0; }}
.row {{ position: absolute; font-size: 15px; font-weight: 500; color: #fff; padding: 12px 2px 0; }}
svg {{ display: block; overflow: visible; }}
text {{ fill: currentColor; dominant-baseline: middle; }}
.big {{ text-anchor: middle; font-weight: 600; }}
.end {{ text-anchor: end; }} .middle {{ text-anchor: middle; }} .small {{ font-size: 10.5px; color: #9fa7b3; }}
.value {{ font-weight: 600; }}
.grid {{ stroke: #2a2d34; stroke-width: 1; }} .empty {{ fill: #22252b; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 14px; line-height: 18px; color: #b4b7c0; }}
.legend i {{ display: inline-block; width: 12px; height: 3px; margin-right: 5px;
  vertical-align: middle; border-radius: 1px; }}
.legend b {{ font-weight: 600; color: #e8e8ea; }}
.none {{ color: {QUIET}; padding: 20px; text-align: center; }}
"""


def page(dashboard: Panel, prometheus: str, span: Span) -> str:
    """The dashboard as one self-contained HTML page."""
    column = (WIDTH + GAP) / 24
    drawn, bottom = [], 0
    with httpx.Client(base_url=prometheus, timeout=30) as client:
        for panel in dashboard["panels"]:
            grid = panel["gridPos"]
            left, top = grid["x"] * column, grid["y"] * CELL
            width, height = grid["w"] * column - GAP, grid["h"] * CELL - GAP
            bottom = max(bottom, (grid["y"] + grid["h"]) * CELL)
            place = f"left:{left:.0f}px;top:{top}px;width:{width:.0f}px;height:{height}px"
            title = escape(panel["title"])
            if panel["type"] == "row":
                drawn.append(f'<div class="row" style="{place}">{title}</div>')
                continue
            series = lines(client, panel, span)
            body = DRAW[panel["type"]](panel, series, span, width - 18, height - 36)
            drawn.append(
                f'<section style="{place}" title="{escape(panel["description"])}"><h2>{title}</h2>'
                f'<div class="body">{body if series else "<div class=none>no data</div>"}</div></section>'
            )
    first, last = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) for t in (span.start, span.end))
    name = escape(dashboard["title"])
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style><main>'
        f"<header><h1>{name}</h1><span>{escape(dashboard['description'])}</span><span>{first} to {last}</span></header>"
        f'<div class="grid24" style="height:{bottom}px">{"".join(drawn)}</div></main></html>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the Grafana dashboard from a Prometheus, as one HTML page.")
    parser.add_argument("--prometheus", default="http://localhost:9090", help="its address")
    parser.add_argument("--out", type=Path, default=Path("dashboard.html"), help="the page to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    arguments = parser.parse_args()
    now = time.time()
    span = Span(now - 60 * arguments.minutes, now)
    arguments.out.write_text(page(json.loads(DASHBOARD.read_text()), arguments.prometheus, span))
    print(f"wrote {arguments.out}: open it in a browser.")


if __name__ == "__main__":
    main()
