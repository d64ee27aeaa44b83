"""The report: one page that needs nothing else, holds its plots, and trusts no name."""

import base64
import io
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Picture

from dubito.models import bayesianize
from dubito.models.manifest import Calibration, Image, Input, Regression
from dubito.models.predictions.model import Model
from dubito.models.predictions.uncertainty import Classified
from dubito.training.data.data import Examples
from dubito.training.data.sources import read_data
from dubito.training.evaluation.evaluate import Evaluation, evaluate
from dubito.training.evaluation.plots import COLOURS, INK, POINTS, Panel, draw
from dubito.training.evaluation.report import ReportError, page, write
from tests.small_models import bayesian_mlp, mlp, stored

pytestmark = pytest.mark.usefixtures("few_requests")
HOSTILE = ("<script>alert(1)</script>", '" onerror="alert(2)', "a & b", "\x1b[31m", "猫", "$x", "6", "7", "8", "9")
ABOUT = {"model": "some/where/model.safetensors", "data": "digits", "part": "test"}
VOID = {"meta", "img", "br"}
SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Node:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list["Node"] = field(default_factory=list)

    def all(self, tag: str) -> list["Node"]:
        found = [self] if self.tag == tag else []
        return found + [n for child in self.children for n in child.all(tag)]

    def words(self) -> str:
        return " ".join([self.text, *(child.words() for child in self.children)])


class Reader(HTMLParser):
    """Every tag is closed where it should be, or the page is wrong."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open = [Node("page", {})]
        self.feed(html)
        self.close()
        assert [n.tag for n in self.open] == ["page"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {k: v or "" for k, v in attrs})
        self.open[-1].children.append(node)
        if tag == "br":
            self.open[-1].text += " "
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def read(html: str) -> Node:
    return Reader(html).open[0]


def sections(root: Node) -> dict[str, Node]:
    return {section.all("h2")[0].text: section for section in root.all("section")}


def svgs(node: Node) -> list[ET.Element]:
    sources = [image.attributes["src"] for image in node.all("img")]
    head = "data:image/svg+xml;base64,"
    return [ET.fromstring(base64.b64decode(s.removeprefix(head))) for s in sources if s.startswith(head)]


def words(svg: ET.Element) -> set[str]:
    return {text.text or "" for text in svg.iter(f"{SVG}text")}


def made(tmp_path: Path, network: Any, **card: Any) -> Model:
    return stored(network, tmp_path / "m.safetensors", **card)


@pytest.fixture(scope="module")
def classified(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """Untrained, calibrated, with names that would do harm, evaluated with everything there is."""
    torch.manual_seed(0)
    net = mlp(64, 16, 10)
    for p in net.parameters():
        p.data *= 3
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="mutual_information",
        thresholds={"mutual_information": {2: 0.12}, "entropy": {1: 2.0}},
        quantiles={1: 0.95},
    )
    declared = Input(shape=(1, 8, 8), image=Image(mean=(0.3,), std=(0.4,)))
    network = bayesianize(net, "mc-dropout", rate=0.2)
    model = made(tmp_path_factory.mktemp("m"), network, input=declared, labels=HOSTILE, calibration=calibration)
    examples = read_data("digits").train[:120]
    noise = torch.randint(256, (50, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    outside = {
        "npz:<b>$noise$</b>.npz": Examples(noise, torch.zeros(50)),
        "a" * 60 + "猫": Examples(examples.x.flip(3), torch.zeros(120)),
    }
    return evaluate(model, examples, outside, shift=True, samples=6)


@pytest.fixture(scope="module")
def html(classified: Evaluation) -> str:
    return page(classified, ABOUT)


@pytest.fixture(scope="module")
def root(html: str) -> Node:
    return read(html)


def test_the_page_needs_nothing_else(html: str, root: Node) -> None:
    outside_of_data = re.sub(r'data:[^"]*', "", html)
    assert re.findall(r"https?:|//[a-z]|@import|url\(", outside_of_data) == []
    for tag in ("script", "link", "iframe", "object", "embed", "base", "form"):
        assert root.all(tag) == []
    for image in root.all("img"):
        assert re.match(r"data:image/(png|svg\+xml);base64,", image.attributes["src"])
        assert image.attributes["alt"]
    for svg in svgs(root):
        links = [v for node in svg.iter() for k, v in node.attrib.items() if k.endswith("href")]
        assert all(link.startswith("#") for link in links)
        assert not [node for node in svg.iter() if node.tag in (f"{SVG}script", f"{SVG}image")]


def test_it_reads_on_a_phone_light_and_dark(html: str, root: Node) -> None:
    viewport = next(m for m in root.all("meta") if m.attributes.get("name") == "viewport")
    assert "width=device-width" in viewport.attributes["content"]
    assert root.all("html")[0].attributes["lang"] == "en"
    assert "prefers-color-scheme: dark" in html
    for svg in svgs(root):
        text = ET.tostring(svg, encoding="unicode")
        assert "currentColor" in text  # the ink of the page
        assert INK not in text
        assert "prefers-color-scheme:dark" in text


def test_names_are_text_and_nothing_else(root: Node) -> None:
    assert root.all("b")  # our own
    assert all("onerror" not in image.attributes for image in root.all("img"))
    captions = " ".join(c.words() for c in root.all("figcaption"))
    shown = [label for label in HOSTILE if label.isprintable() and label in captions]  # which, the draws decide
    assert len(shown) >= 3
    assert any("<" in label for label in shown)
    assert "\x1b" not in root.words()
    assert "npz:<b>$noise$</b>.npz" in root.words()
    titles = set[str]().union(*map(words, svgs(root)))
    assert "ROC: npz:<b>$noise$</b>.npz" in titles
    assert "ROC: …" + "a" * 34 + "猫" in titles


def test_every_section_is_there_with_its_plots(root: Node) -> None:
    found = sections(root)
    plots = {
        "Confidence": ["Reliability", "Rejection"],
        "Outside": ["ROC: npz:<b>$noise$</b>.npz", "ROC: …" + "a" * 34 + "猫"],
        "Promises of the calibration": ["Coverage", "Ordinary inputs flagged", "Mean set size"],
        "More draws": ["Accuracy", "NLL", "ECE"],
        "Shift": ["Accuracy", "NLL", "ECE", "Entropy", "Mutual information", "OOD flags"],
        "Examples": [],
    }
    assert list(found) == list(plots)
    for name, titles in plots.items():
        drawn = svgs(found[name])
        assert len(drawn) == len(titles)
        for svg, title in zip(drawn, titles, strict=True):
            assert title in words(svg)
            strokes = ET.tostring(svg, encoding="unicode")
            assert COLOURS[0] in strokes


def test_the_numbers_are_the_evaluations(classified: Evaluation, root: Node) -> None:
    f = classified.figures
    assert json.loads(root.all("pre")[0].text) == json.loads(json.dumps({**ABOUT, **f}))
    assert root.all("h1")[0].text == "model.safetensors"
    cards = {div.all("dt")[0].text: div.all("dd")[0].text for div in root.all("dl")[0].all("div")}
    assert cards["accuracy"] == f"{f['accuracy']:.2%}"
    assert cards["coverage"] == f"{f['coverage']:.2%}"
    assert cards["NLL"] == f"{f['nll']:.4g}"
    assert cards["AUROC, npz:<b>$noise$</b>.npz"] == f"{f['auroc']:.3f}"
    rows = [[td.text for td in tr.all("td")] for tr in sections(root)["More draws"].all("tr")[1:]]
    assert [row[0] for row in rows] == [
        *(str(r["samples"]) for r in f["curve"]),
        f"auto, ø {f['auto']['mean_samples']:.1f}",
    ]
    assert [row[1] for row in rows] == [f"{row['accuracy']:.2%}" for row in (*f["curve"], f["auto"])]
    shifted = [[td.text for td in tr.all("td")] for tr in sections(root)["Shift"].all("tr")[1:]]
    expected = [f["shift"]["clean"], *f["shift"]["families"]["rotation"]]
    assert shifted == [["rotation", *(f"{row['accuracy']:.2%}" for row in expected)]]


def test_examples_run_from_certain_to_doubtful(classified: Evaluation, root: Node) -> None:
    assert isinstance(classified.inside, Classified)
    section = sections(root)["Examples"]
    titles = [h.text for h in section.all("h3")]
    assert titles[:3] == ["Most certain", "In between", "Least certain"]
    assert titles[3:5] == ["npz:<b>$noise$</b>.npz: rightly flagged", "npz:<b>$noise$</b>.npz: not flagged"]
    groups = [group.all("figure") for group in section.all("div") if group.attributes.get("class") == "examples"]
    assert len(groups) == len(titles)
    doubts = [[float(re.findall(r"MI: (\S+)", figure.words())[0]) for figure in group] for group in groups]
    shown = [*doubts[0], *doubts[1], *doubts[2]]
    assert len(shown) == 24
    assert shown == sorted(shown)
    assert min(doubts[3]) >= 0.12 >= max(doubts[4])
    # the most doubtful of all is the last: its picture, its labels, right or wrong
    last, figure = int(classified.inside.mutual_information.argmax()), groups[2][-1]
    png = base64.b64decode(figure.all("img")[0].attributes["src"].split(",")[1])
    assert np.array_equal(np.array(Picture.open(io.BytesIO(png))), classified.examples.x[last, 0].numpy())
    p, leading = classified.inside.probabilities[last].max(-1)
    printable = ["\N{REPLACEMENT CHARACTER}[31m" if label == "\x1b[31m" else label for label in HOSTILE]
    assert figure.all("b")[0].text == f"{printable[int(leading)]}, {float(p):.0%}"
    truth = int(classified.examples.y[last])
    mark = figure.all("span")[0]
    assert mark.text == f"true: {printable[truth]}"
    assert mark.attributes["class"] == ("good" if truth == int(leading) else "bad")
    assert all(not f.all("span") for group in groups[3:] for f in group)  # labels from outside mean nothing


def test_regression_and_vectors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Regression(outputs=2, shift=(0.0,), scale=(10.0,))
    network = bayesian_mlp((12, 8, 2), "mc-dropout", task=task)
    calibration = Calibration(
        false_positive_rate=0.05,
        coverage=0.9,
        measure="epistemic_variance",
        thresholds={"epistemic_variance": {1: 0.5}},
        quantiles={1: 1.7},
    )
    model = made(tmp_path, network, input=Input(shape=(12,)), calibration=calibration)
    examples = Examples(torch.randn(450, 12), 10 * torch.randn(450, 2))
    far = Examples(torch.randn(30, 12) * 5, torch.zeros(30, 2))
    found = sections(read(page(evaluate(model, examples, {"far": far}), ABOUT)))
    drawn = svgs(found["Predictions"])
    titles = [f"{what}, output {d}" for d in (1, 2) for what in ("Predicted and true", "Error and doubt")] + [
        "Coverage of Gaussian intervals"
    ]
    assert len(drawn) == len(titles)
    assert all(title in words(svg) for svg, title in zip(drawn, titles, strict=True))
    assert [len(svgs(found[name])) for name in ("Promises of the calibration", "More draws", "Outside")] == [3, 2, 1]
    tables = found["Examples"].all("table")
    heads = [[th.text for th in table.all("th")] for table in tables]
    assert heads[0] == ["input", "predicted", "true", "std from weights"]
    assert heads[-1] == ["input", "predicted", "std from weights"]
    first = [td.text for td in tables[0].all("td")][:4]
    assert first[0].count(",") == 8  # eight values, and that there are more
    assert first[0].endswith("…")
    assert "±" in first[1]


def test_what_does_not_apply_is_left_out(tmp_path: Path) -> None:
    network = bayesian_mlp((3, 4, 2), "deterministic")
    model = made(tmp_path, network, input=Input(shape=(3,)))
    examples = Examples(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    html = page(evaluate(model, examples), {**ABOUT, "part": "all"})
    root = read(html)
    assert list(sections(root)) == ["Confidence", "Examples"]
    assert [h.text for h in root.all("h3")] == ["From most to least certain"]
    assert "Not calibrated" in html
    assert "digits, all of it" in html
    assert "deterministic" in html


def test_colour_shifts_are_drawn_with_their_mean(tmp_path: Path) -> None:
    declared = Input(shape=(3, 16, 16), image=Image(mean=(0.5,) * 3, std=(0.2,) * 3))
    model = made(tmp_path, bayesian_mlp((768, 4, 2), "ffg-w"), input=declared)
    x = torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8)
    root = read(page(evaluate(model, Examples(x, torch.arange(6) % 2), shift=True, samples=1), ABOUT))
    section = sections(root)["Shift"]
    assert len(section.all("tr")) == 16
    assert "6 of the pictures under 15 corruptions" in section.words()
    for svg in svgs(section):
        text = ET.tostring(svg, encoding="unicode")
        assert text.count(f"stroke: {COLOURS[-1]}") == 15
    png = base64.b64decode(sections(root)["Examples"].all("img")[0].attributes["src"].split(",")[1])
    assert Picture.open(io.BytesIO(png)).mode == "RGB"


def test_writing(classified: Evaluation, html: str, tmp_path: Path) -> None:
    path = write(classified, ABOUT, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "index.html"
    assert path.read_text(encoding="utf-8") == html  # the same evaluation, the same page
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"cannot write a report to .*file.*Name a folder"):
        write(classified, ABOUT, tmp_path / "file")


def test_a_long_curve_is_thinned_but_keeps_its_ends() -> None:
    x = [i / 9999 for i in range(10_000)]
    source = draw(Panel("t", "x", "y", {"curve": (x, [v**2 for v in x]), "straight": ([0, 1], [0, 1])}))
    (svg,) = svgs(Node("page", {}, children=[Node("img", {"src": source})]))
    curve, straight = (
        re.findall(r"[ML] (\S+) (\S+)", next(p for p in svg.iter(f"{SVG}path") if c in p.attrib["style"]).attrib["d"])
        for c in COLOURS[:2]
    )
    assert len(straight) == 2
    assert 10 < len(curve) <= POINTS
    assert [curve[0], curve[-1]] == straight
