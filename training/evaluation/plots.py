"""Plots of a report: SVG in the text colour of the page, readable on light and dark."""

import base64
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter, ScalarFormatter

from dubito.training.metrics import Bin

INK = "#010203"  # placeholder of the text colour, replaced when the SVG is written
INKS = ":root{color:#24292f}@media(prefers-color-scheme:dark){:root{color:#c9d1d9}}"
COLOURS = ("#2f81c7", "#e0792b", "#2a9d76", "#a874c9", "#d1495b", "#8d939b")  # legible on white and on black
POINTS = 300  # of one line

Line = tuple[Sequence[float], Sequence[float]]  # x and y


@dataclass(frozen=True)
class Panel:
    """Lines over one pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Line]  # by the name in the legend
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)  # half-widths of a band around a line
    faint: Sequence[Line] = ()
    promised: float | None = None  # level of a horizontal line
    percent: str = ""  # the axes that show shares: "x", "y" or "xy"
    unit: bool = False  # both axes from 0 to 1, with the diagonal between them
    doubling: bool = False  # x = 1, 2, 4, 8, …


def draw(panel: Panel) -> str:
    return _svg(lambda axes: _lines(axes, panel), panel.title)


def _lines(axes: Axes, panel: Panel) -> None:
    if panel.promised is not None:
        axes.axhline(panel.promised, color=INK, alpha=0.7, linewidth=1, linestyle="--", label="promised")
    for x, y in panel.faint:
        axes.plot(*_thin(x, y), color=COLOURS[-1], alpha=0.45, linewidth=0.8)
    for (name, (x, y)), colour in zip(panel.lines.items(), COLOURS, strict=False):
        marker = "o" if len(x) <= 15 else ""
        axes.plot(*_thin(x, y), color=colour, linewidth=1.8, marker=marker, markersize=4, label=name)
        if name in panel.errors:
            low, high = ([v + sign * e for v, e in zip(y, panel.errors[name], strict=True)] for sign in (-1, 1))
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    if panel.doubling:
        axes.set_xscale("log", base=2)
        ticks = [x for x in next(iter(panel.lines.values()))[0] if math.log2(x).is_integer()]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
    if panel.unit:
        _unit_square(axes)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in panel.percent:
            axis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    if len(panel.lines) > 1 or panel.promised is not None:
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)


def _unit_square(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=INK, alpha=0.6, linewidth=1, linestyle=":")
    axes.set(xlim=(0, 1), ylim=(0, 1.01))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1))


def reliability(bins: Sequence[Bin]) -> str:
    """Accuracy over confidence; bars with more examples are stronger."""

    def plot(axes: Axes) -> None:
        filled = [b for b in bins if b.share]
        most = max(b.share for b in filled)
        for b in filled:
            strength = 0.25 + 0.75 * math.sqrt(b.share / most)
            axes.bar(b.low, b.accuracy, b.high - b.low, align="edge", color=COLOURS[0], alpha=strength)
        points = [b.confidence for b in filled], [b.accuracy for b in filled]
        axes.plot(*points, color=COLOURS[1], marker="o", markersize=4, linewidth=1)
        _unit_square(axes)
        axes.set(xlabel="confidence", ylabel="accuracy")

    return _svg(plot, "Reliability")


def against_truth(title: str, truth: Sequence[float], mean: Sequence[float], half: Sequence[float]) -> str:
    """Predictions with their intervals over the true values."""

    def plot(axes: Axes) -> None:
        axes.errorbar(truth, mean, half, fmt="o", color=COLOURS[0], markersize=2.5, elinewidth=0.7, alpha=0.55)
        ends = [min(*truth, *mean), max(*truth, *mean)]
        axes.plot(ends, ends, color=INK, alpha=0.6, linewidth=1, linestyle=":")
        axes.set(xlabel="true", ylabel="predicted")

    return _svg(plot, title)


def error_by_spread(title: str, spread: Sequence[float], error: Sequence[float], groups: Line) -> str:
    """Errors over predicted standard deviations; groups of examples should lie on the diagonal."""

    def plot(axes: Axes) -> None:
        axes.scatter(spread, error, s=6, color=COLOURS[5], alpha=0.4, linewidth=0)
        axes.plot(*groups, color=COLOURS[0], marker="o", markersize=4, linewidth=1.5, label="RMSE of a group")
        ends = [min(groups[0]), max(groups[0])]
        axes.plot(ends, ends, color=INK, alpha=0.6, linewidth=1, linestyle=":", label="as predicted")
        axes.set(xlabel="predicted standard deviation", ylabel="error")
        axes.legend(frameon=False, labelcolor=INK, fontsize=8)

    return _svg(plot, title)


def _thin(x: Sequence[float], y: Sequence[float]) -> Line:
    """At most `POINTS` points of a curve, with both ends."""
    if len(x) <= POINTS:
        return x, y
    places = [round(i * (len(x) - 1) / (POINTS - 1)) for i in range(POINTS)]
    return [x[i] for i in places], [y[i] for i in places]


def _svg(plot: Callable[[Axes], None], title: str) -> str:
    """One plot as a data: URL."""
    settings = matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "dubito",  # the same evaluation gives the same bytes
            "text.parse_math": False,  # names may hold a $
            "font.family": ["sans-serif"],
            "font.size": 9,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    with settings, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # missing glyphs: the browser uses its own fonts
        figure = Figure(figsize=(4, 3.1), facecolor="none")
        axes = figure.add_axes((0.19, 0.16, 0.74, 0.74), facecolor="none")  # the same in all plots, so that rows align
        plot(axes)
        axes.set_title(title, fontsize=10, y=1.0)  # the place that matplotlib would find in a fifth of the time
        axes.grid(color=INK, alpha=0.12, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue().replace(INK, "currentColor")
    text = text[text.index("<svg") :].replace("<defs>", f"<style>{INKS}</style><defs>", 1)
    return "data:image/svg+xml;base64," + base64.b64encode(text.encode()).decode()
