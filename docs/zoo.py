"""Writes the list of the zoo (models/zoo/index.json), its page and a card for each model from the artifacts; with
--check, says whether they are up to date. Larger artifacts, which do not ship, are read from --larger DIR; without it,
their entries and cards stay as they are."""

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dubito.models.artifact.artifact import examine
from dubito.models.manifest import Card, Manifest, Zoo
from dubito.models.modelcard import figures, limits
from dubito.models.zoo import INDEX, MOST_BYTES, Listed, folder
from dubito.models.zoo_files import entry_of
from dubito.training.zoo import kept

DOCS = Path(__file__).parent
FIGURES = {"accuracy": "{:.2%}", "rmse": "{:.3f}", "nll": "{:.4f}", "ece": "{:.2%}", "auroc": "{:.4f}"}
HEADS = {"accuracy": "accuracy", "rmse": "RMSE", "nll": "NLL", "ece": "ECE", "auroc": "AUROC"}
HEADS |= {"coverage": "coverage of the sets", "ood_rate": "false alarms"}
IN_POINTS = ("accuracy", "ece", "coverage", "ood_rate")
INK = "svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#c9d1d9}}"
BLUE, ORANGE = "#2f81c7", "#e0792b"  # legible on white and on black
SIDE, LEFT, TOP = 200, 64, 30  # of a panel, in pixels


def entries(larger: Path | None) -> list[Listed]:
    """In the order of zoo.toml."""
    index = folder() / "index.json"
    before = {one.name: one for one in (INDEX.validate_json(index.read_bytes()) if index.exists() else ())}
    found = []
    for name in kept().models:
        if (path := folder() / f"{name}.safetensors").exists():
            found.append(entry_of(path, shipped=True))
        elif larger is not None and (path := larger / f"{name}.safetensors").exists():
            found.append(entry_of(path, shipped=False))
        elif name in before and not before[name].shipped:
            found.append(before[name])
    if strange := {path.stem for path in folder().glob("*.safetensors")} - kept().models.keys():
        sys.exit(f"{', '.join(sorted(strange))}: not in training/zoo.toml")
    if (total := sum(one.bytes for one in found if one.shipped)) > MOST_BYTES:
        sys.exit(f"the shipped artifacts have {total:,} bytes; at most {MOST_BYTES:,} are allowed")
    return found


# pages


def overview(found: Sequence[Listed]) -> str:
    shipped = [one for one in found if one.shipped]
    lines = [
        "# The zoo",
        "",
        "Trained models, each served by its name: `dubito serve zoo:clothes`. `zoo:NAME` stands for the file in every",
        "command that takes a model; `dubito zoo` lists them, `dubito zoo verify` checks their hashes, and",
        "`dubito zoo train NAME` makes one again by its recipe and seed. "
        f"{len(shipped)} come with dubito, in {sum(one.bytes for one in shipped):,} bytes.",
        "Larger ones are fetched by `dubito zoo get NAME --from URL`, or from the address in the variable",
        "`DUBITO_ZOO`, and verified by their SHA-256.",
        "",
        "Figures are of the test part, with 20 draws; in brackets those of the plain network, with its temperature",
        "where it has one. AUROC: test inputs against spoiled copies of them. Cards name the command for the figures.",
        "",
        "| name | data | network, method | bytes | parameters | accuracy or RMSE | NLL | ECE | AUROC |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(one) for one in found]
    lines += [
        "",
        "Figures against size, of the models of one data set beside their plain networks (with a temperature, as files",
        "of float16). Numbers name them; accuracy and AUROC are better above, ECE below.",
    ]
    for data, title in CHARTED.items():
        lines += ["", f"![Accuracy and ECE against bytes, AUROC against parameters: {title}](zoo/{data}-sizes.svg)"]
    return "\n".join([*lines, "", "This page and the cards are written by `make zoo` from the artifacts.", ""])


def row(one: Listed) -> str:
    def both(key: str) -> str:
        if key not in one.metrics:
            return ""
        shown = FIGURES[key].format(one.metrics[key])
        return (
            shown if one.plain is None or key not in one.plain else f"{shown} ({FIGURES[key].format(one.plain[key])})"
        )

    first = "accuracy" if "accuracy" in one.metrics else "rmse"
    share = one.parameters / one.deterministic
    size = f"{one.bytes:,}" + ("" if one.shipped else ", to be fetched")
    cells = [f"[{one.name}](zoo/{one.name}.md)", one.data, f"{one.architecture}, {one.method}", size]
    cells += [f"{one.parameters:,} ({share:.0%})", *(both(key) for key in (first, "nll", "ece", "auroc"))]
    return f"| {' | '.join(cells)} |"


def page(one: Listed, manifest: Manifest) -> str:
    card = manifest.card
    zoo = card.zoo
    assert zoo is not None
    return "\n".join(
        [*_facts(one, card, zoo), *figures(card, one.data), *_same(one, card, zoo), *_rest(one, card, zoo), ""]
    )


def _facts(one: Listed, card: Card, zoo: Zoo) -> Iterator[str]:
    yield from (f"# {one.name}", "", f"{zoo.title}.", "", "| | |", "|---|---|")
    yield f"| data | {zoo.data} |"
    yield f"| licence of the data | {zoo.licence} |"
    yield f"| network, method | `{one.architecture}`, {one.method} |"
    share = one.parameters / one.deterministic
    yield f"| parameters | {one.parameters:,}, {share:.1%} of the plain network's {one.deterministic:,} |"
    yield f"| file | {one.bytes:,} bytes in {one.precision}; SHA-256 `{one.sha256}` |"
    yield f"| seed | {card.provenance.seed} |"
    took = "not timed" if zoo.minutes is None else f"{zoo.minutes:.2g} minutes"
    yield f"| training | {took}, on {zoo.made_on} |"


def _same(one: Listed, card: Card, zoo: Zoo) -> Iterator[str]:
    root = "" if one.data == "digits" else " --data-root DIR"
    seed = f" --seed {card.provenance.seed}" if card.provenance.seed else ""
    as_trained = ", of the model before it was rounded" if zoo.rounding and zoo.examples is not None else ""
    yield ""
    yield f"Measured on {zoo.measured_on}{as_trained}. The command for the same figures is"
    yield f"`dubito evaluate zoo:{one.name} --data {one.data}{seed}{root}`; another kind of device draws other normals."
    if any("AUROC" in HEADS.get(key, "") for key in card.metrics):
        yield "AUROC is against spoiled copies of the test inputs: shuffled pixels and the like."
    if zoo.rounding:
        said = ", ".join(f"{HEADS[key]} {_signed(key, value)}" for key, value in zoo.rounding.items())
        some = "" if zoo.examples is None else f" on {zoo.examples:,} test inputs, with the same draws,"
        yield f"Stored in {one.precision}, the figures differ{some} from those in float32 by: {said}."
    if card.plain is not None and not card.plain.differences:
        yield "The plain column is that of the model it was made from; the differences have no standard errors."
    if kept().models[one.name].plain is not None:
        yield "The posterior starts from no plain network: this one was trained by itself, by the last command below."


def _signed(key: str, value: float) -> str:
    return f"{100 * value:+.2f} points" if key in IN_POINTS else f"{value:+.4f}"


def _rest(one: Listed, card: Card, zoo: Zoo) -> Iterator[str]:
    kinds = "confidence and accuracy" if one.task == "classification" else "levels and coverage of intervals"
    if zoo.examples is not None:
        kinds += f"; {zoo.examples:,} test inputs"
    yield from ("", "## Curves", "", f"![Reliability ({kinds}) and risk against coverage]({one.name}.svg)")
    yield from limits(card)
    root = "" if one.data == "digits" else " --data-root DIR"
    yield from ("", "## Make it again", "")
    yield f"`dubito zoo train {one.name}{root}` stands for these commands, then stores the model in {one.precision},"
    yield from ("calibrated and measured as stored:", "", "```console")
    yield from (f"$ {step}" for step in zoo.steps)
    yield from ("```", "", "## Use", "", "```console", f"$ dubito serve zoo:{one.name}", "```")


# curves: written by hand, so that the bytes do not depend on a library's version


def curves(zoo: Zoo, task: str) -> str:
    """Two panels: reliability, and risk against coverage."""
    classes = task == "classification"
    panels = [
        "".join(_reliability(zoo, classes)),
        f'<g transform="translate({SIDE + LEFT + 40},0)">{"".join(_risk(zoo, classes))}</g>',
    ]
    width, height = 2 * (SIDE + LEFT) + 60, SIDE + TOP + 48
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor"><style>{INK}</style>{"".join(panels)}</svg>\n'
    )


def _frame(title: str, x: str, y: str, top: float, percent: bool) -> Iterator[str]:
    middle = LEFT + SIDE / 2
    yield f'<text x="{middle:g}" y="16" text-anchor="middle" font-size="12">{escape(title)}</text>'
    yield f'<text x="{middle:g}" y="{TOP + SIDE + 38}" text-anchor="middle">{escape(x)}</text>'
    yield (
        f'<text x="12" y="{TOP + SIDE / 2:g}" text-anchor="middle" '
        f'transform="rotate(-90 12 {TOP + SIDE / 2:g})">{escape(y)}</text>'
    )
    for i in range(5):
        share = i / 4
        at_x, at_y = LEFT + SIDE * share, TOP + SIDE * (1 - share)
        label = f"{100 * top * share:.3g} %" if percent else f"{top * share:.3g}"
        yield f'<path d="M{LEFT} {at_y:g}h{SIDE}M{at_x:g} {TOP}v{SIDE}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{at_x:g}" y="{TOP + SIDE + 18}" text-anchor="middle">{100 * share:g} %</text>'
        yield f'<text x="{LEFT - 5}" y="{at_y + 4:g}" text-anchor="end">{label}</text>'


def _line(points: Sequence[tuple[float, float]], top: float, colour: str) -> str:
    places = " ".join(f"{LEFT + SIDE * x:.1f},{TOP + SIDE * (1 - y / top):.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _reliability(zoo: Zoo, classes: bool) -> Iterator[str]:
    words = ("confidence", "accuracy") if classes else ("level of the interval", "coverage")
    yield from _frame("Reliability", *words, 1.0, True)
    yield f'<path d="M{LEFT} {TOP + SIDE}l{SIDE} -{SIDE}" stroke="currentColor" stroke-dasharray="3 3" opacity="0.6"/>'
    yield _line([(x, y) for x, y, _ in zoo.reliability], 1.0, BLUE)
    for x, y, share in zoo.reliability:
        size = 2 + 5 * math.sqrt(share) if classes else 2.5
        yield f'<circle cx="{LEFT + SIDE * x:.1f}" cy="{TOP + SIDE * (1 - y):.1f}" r="{size:.1f}" fill="{BLUE}"/>'


def _risk(zoo: Zoo, classes: bool) -> Iterator[str]:
    most = max(value for _, value in zoo.risk) or 1.0
    top = float(f"{1.05 * most:.1g}")
    top = top if top >= most else float(f"{1.5 * most:.1g}")
    title, y = ("Risk against coverage", "error rate") if classes else ("Risk against coverage", "RMSE")
    yield from _frame(title, "share answered, the least doubtful first", y, top, classes)
    yield _line(zoo.risk, top, ORANGE)


# charts of the models of one data set, beside their plain networks

CHARTED = {"fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
PANELS = (("accuracy", "bytes"), ("ece", "bytes"), ("auroc", "parameters"))  # figure against size
GAP = 44  # between panels
LINE = 16  # pixels of a line of the legend


@dataclass(frozen=True)
class Point:
    name: str
    plain: bool
    sizes: dict[str, float]
    figures: Mapping[str, float]


def points(found: Sequence[Listed], data: str) -> list[Point]:
    """The models of a data set, and each of their plain networks once, as a file of float16."""
    models = [one for one in found if one.data == data and one.shipped]
    own = [Point(one.name, False, {"bytes": one.bytes, "parameters": one.parameters}, one.metrics) for one in models]
    plain: dict[tuple[int, float], Point] = {}
    for one in models:
        if one.plain is not None and "accuracy" in one.plain:
            sizes: dict[str, float] = {"bytes": 2 * one.deterministic, "parameters": one.deterministic}
            name = f"plain network of {one.name}"
            plain.setdefault((one.deterministic, one.plain["accuracy"]), Point(name, True, sizes, one.plain))
    return [*own, *plain.values()]


def chart(found: Sequence[Listed], data: str) -> str:
    """Accuracy and ECE against bytes, AUROC against parameters; numbers name the models, squares are plain networks."""
    every = points(found, data)
    panels = [
        f'<g transform="translate({i * (SIDE + LEFT + GAP)},0)">{"".join(_scatter(every, figure, size))}</g>'
        for i, (figure, size) in enumerate(PANELS)
    ]
    below = TOP + SIDE + 60
    legend = [
        f'<text x="{LEFT}" y="{below + LINE * i}">{i + 1}&#160; {escape(point.name)}'
        f"{', with its temperature, in float16' if point.plain else ''}</text>"
        for i, point in enumerate(every)
    ]
    width, height = len(PANELS) * (SIDE + LEFT + GAP), below + LINE * len(every)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="currentColor"><style>{INK}</style>'
        f"{''.join(panels)}{''.join(legend)}</svg>\n"
    )


def _scatter(every: Sequence[Point], figure: str, size: str) -> Iterator[str]:
    known = [(i, point) for i, point in enumerate(every) if figure in point.figures]
    values = [point.figures[figure] for _, point in known]
    in_logs = figure == "ece" and max(values) > 3 * min(values)
    xs = [math.log10(point.sizes[size]) for _, point in known]
    ys = [math.log10(y) if in_logs else y for y in values]
    (left, right), (low, high) = _range(xs), _range(ys)

    def at_x(x: float) -> float:
        return LEFT + SIDE * (x - left) / (right - left)

    def at_y(y: float) -> float:
        return TOP + SIDE * (1 - (y - low) / (high - low))

    yield f'<text x="{at_x((left + right) / 2):g}" y="16" text-anchor="middle" font-size="12">'
    yield f"{HEADS[figure]} against {size}</text>"
    for y in _powers(low, high) if in_logs else _steps(low, high):
        value = 10**y if in_logs else y
        label = f"{value:.2f}" if figure == "auroc" else f"{100 * value:.3g} %"
        yield f'<path d="M{LEFT} {at_y(y):.1f}h{SIDE}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{LEFT - 5}" y="{at_y(y) + 4:.1f}" text-anchor="end">{label}</text>'
    for x in _powers(left, right):
        value = round(10**x)
        text = f"{value / 1e6:g} M" if value >= 10**6 else f"{value / 1e3:g} k"
        yield f'<path d="M{at_x(x):.1f} {TOP}v{SIDE}" stroke="currentColor" opacity="0.15"/>'
        yield f'<text x="{at_x(x):.1f}" y="{TOP + SIDE + 18}" text-anchor="middle">{text}</text>'
    for (i, point), x, y in zip(known, xs, ys, strict=True):
        if point.plain:
            yield f'<rect x="{at_x(x) - 4:.1f}" y="{at_y(y) - 4:.1f}" width="8" height="8" fill="{ORANGE}"/>'
        else:
            yield f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="4" fill="{BLUE}"/>'
        yield f'<text x="{at_x(x) + 6:.1f}" y="{at_y(y) - 5:.1f}" font-size="10">{i + 1}</text>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    margin = 0.15 * (max(values) - min(values)) or 0.01
    return min(values) - margin, max(values) + margin


def _steps(low: float, high: float) -> list[float]:
    """Some four round numbers between the two."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Logarithms of 1, 2 and 5 times powers of ten between the two; of powers alone where there are many."""
    digits = (1, 2, 5) if high - low < 2 else (1,)
    every = [power + math.log10(digit) for power in range(math.floor(low), math.ceil(high)) for digit in digits]
    return [x for x in every if low <= x <= high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a file is behind")
    parser.add_argument("--larger", type=Path, metavar="DIR", help="folder with the artifacts that do not ship")
    args = parser.parse_args()
    found = entries(args.larger)
    written = {folder() / "index.json": INDEX.dump_json(tuple(found), indent=1).decode() + "\n"}
    written[DOCS / "zoo.md"] = overview(found)
    written |= {DOCS / "zoo" / f"{data}-sizes.svg": chart(found, data) for data in CHARTED}
    for one in found:
        path = (folder() if one.shipped else args.larger or Path("none")) / f"{one.name}.safetensors"
        if path.exists():
            manifest, _ = examine(path)
            assert manifest.card.zoo is not None
            written[DOCS / "zoo" / f"{one.name}.md"] = page(one, manifest)
            written[DOCS / "zoo" / f"{one.name}.svg"] = curves(manifest.card.zoo, one.task)
    behind = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    if args.check:
        sys.exit(f"{', '.join(path.name for path in behind)}: behind the artifacts: make zoo" if behind else 0)
    (DOCS / "zoo").mkdir(exist_ok=True)
    for path in behind:
        path.write_text(written[path])
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
