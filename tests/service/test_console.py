"""The console in a real browser against a real server. Pictures for a person to look at: DUBITO_SCREENSHOTS=FOLDER."""

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import orjson
import pytest
from PIL import Image

from dubito.models import load, save
from dubito.models.embedded import NAMES
from dubito.service.web.security import hash_key
from tests.service.conftest import COLUMNS, TARGETS, WHOLE
from tests.service.test_groups import write_by_group as write_groups
from tests.service.test_laplace import write as write_laplace
from tests.service.test_whvi import write as write_mixed

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EXAMPLES = dict(  # of each embedded model, in the order of the file
    zip(NAMES, orjson.loads(files("dubito.service").joinpath("console/examples.json").read_bytes()), strict=True)
)
HOSTILE = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def tab() -> Iterator["Page"]:
    """One tab for all visits: a window for each would take most of the time, and the page keeps nothing."""
    if BROWSER is None:
        pytest.skip("NO BROWSER: the console is not tested here; install chromium (Debian: apt install chromium).")
    api = pytest.importorskip("playwright.sync_api", reason="NO PLAYWRIGHT: the console is not tested here.")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(15_000)
        yield page
        browser.close()


@dataclass
class Console:
    """A page, with what went wrong on it and where it sent requests."""

    page: "Page"
    folder: Path | None
    wrong: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def answer(self, action: Callable[[], object]) -> dict[str, Any]:
        """What the server answered to the request that an action caused, once the page shows it."""
        with self.page.expect_response(re.compile(r"/predict$")) as reply:
            action()
        told: dict[str, Any] = reply.value.json()
        self.page.wait_for_function(
            "seed => document.querySelector('#who-seed')?.textContent === seed", arg=seed_of(told)
        )
        return told

    def example(self, name: str) -> dict[str, Any]:
        return self.answer(lambda: self.page.get_by_label(f"Example: {name}", exact=True).click())

    def slide(self, k: int) -> None:
        self.page.locator("#k").fill(str(k))
        self.page.wait_for_selector("body[data-deciding=false]")

    def photograph(self, name: str) -> None:
        if self.folder is not None:
            self.page.screenshot(path=self.folder / f"{name}.png", full_page=True)


def seed_of(told: dict[str, Any]) -> str:
    return str(told["seed"])


Visit = Callable[..., Console]


@contextmanager
def visiting(tab: "Page") -> Iterator[Visit]:
    """Opens pages; at the end nothing has gone wrong on any of them, and all stayed on the server."""
    folder = None
    if wanted := os.environ.get("DUBITO_SCREENSHOTS"):
        folder = Path(wanted)
        folder.mkdir(parents=True, exist_ok=True)
    opened: list[tuple[Console, str]] = []
    listening: list[tuple[Any, Callable[[Any], None]]] = []

    def listen(event: Any, listener: Callable[[Any], None]) -> None:
        tab.on(event, listener)
        listening.append((event, listener))

    def go(url: str, *, width: int = 1280, height: int = 900, scheme: Any = "light", errors: bool = False) -> Console:
        tab.set_viewport_size({"width": width, "height": height})
        tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        console = Console(tab, folder)
        if not errors:
            listen("console", lambda m: console.wrong.append(m.text) if m.type in ("error", "warning") else None)
        listen("pageerror", lambda error: console.wrong.append(str(error)))
        listen("request", lambda request: console.hosts.add(urlsplit(request.url).netloc))
        tab.goto(url)
        opened.append((console, urlsplit(url).netloc))
        return console

    yield go
    kept = tab.evaluate("Object.keys(localStorage).length + document.cookie.length")
    tab.goto("about:blank")
    for event, listener in listening:
        tab.remove_listener(event, listener)
    assert kept == 0  # neither a key nor anything else
    for console, host in opened:
        assert console.wrong == []
        assert console.hosts - {""} == {host}  # pictures in data: have no host


@pytest.fixture
def visit(tab: "Page") -> Iterator[Visit]:
    with visiting(tab) as visit:
        yield visit


@pytest.fixture(scope="module")
def demo(serve: Any) -> Any:
    """What `dubito serve` without a path serves, its batches of one size and unmeasured so that it starts soon."""
    return serve(*WHOLE, DUBITO_BUCKETS="1")


@pytest.mark.parametrize(("name", "label"), [("clothes", "Shirt"), ("digits", "3")])
def test_the_page_answers_as_soon_as_it_is_open(demo: Any, visit: Visit, name: str, label: str) -> None:
    console = visit(demo.url)
    console.page.wait_for_selector("#who-seed")
    if name != NAMES[0]:  # which it opens with
        console.answer(lambda: console.page.select_option("#model", name))
    assert console.text("#label") == label
    assert console.text("#flag") == "In distribution"
    assert re.fullmatch(
        rf"Answered by {name}, version 1, on \w+, with 64 draws of seed \d+\. Keep this seed", console.text("#who")
    )
    assert re.fullmatch(r"[\d.]+ ms", console.text("#total"))
    console.page.wait_for_function("() => /^[0-9.]+ [MG]B$/.test(document.querySelector('#process').textContent)")
    assert console.page.locator("#bars .class-row").count() == 10
    console.photograph(f"first-{name}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_flag_changes_between_inputs_like_and_unlike_the_training_data(
    live: Any, visit: Visit, scheme: str
) -> None:
    console = visit(live.url, scheme=scheme)
    console.page.wait_for_selector("#who-seed")
    told = console.example("digit 7")
    row = told["predictions"][0]
    assert (console.text("#label"), console.text("#flag")) == ("7", "In distribution")
    assert console.page.locator("#set li").all_inner_texts() == row["prediction_set"] == ["7"]
    score = re.findall(r"−?[\d.]+", console.text("#gauge-said"))[0].replace("−", "-")
    assert float(score) == pytest.approx(row["ood"]["score"], rel=0.01)
    assert "more of it would not help" in console.text("#in-data-said")
    console.photograph(f"in-distribution-{scheme}")

    told = console.example("letter K")
    row = told["predictions"][0]
    assert row["ood"]["flag"]
    assert console.text("#flag") == "Out of distribution"
    assert "not known whether more data would help" in console.text("#in-data-said")
    assert "above the threshold" in console.text("#gauge-said")
    assert float(console.text("#chance").removesuffix(" %")) == pytest.approx(100 * row["max_probability"], abs=0.06)
    nats = [float(console.text(f"#{part}").removesuffix(" nats")) for part in ("in-data", "in-weights")]
    assert nats == pytest.approx([row["expected_entropy"], row["mutual_information"]], rel=0.01)
    console.photograph(f"out-of-distribution-{scheme}")


def test_doubt_about_clothes(demo: Any, visit: Visit) -> None:
    """A star is no garment, and the draws disagree about it; of what is flagged nobody says that more data would not
    help, and of what is not, nobody says that the model has seen the like of it."""
    console = visit(demo.url)
    console.page.wait_for_selector("#who-seed")
    boot, star = console.example("Ankle boot")["predictions"][0], console.example("star")["predictions"][0]
    assert star["mutual_information"] > 20 * boot["mutual_information"]  # measured: 0.14 and 0.0002 nats
    console.photograph("out-of-distribution-clothes")
    console.page.select_option("#draws", "16")
    for example in EXAMPLES["clothes"]["examples"][::4]:  # some of each kind
        flagged = console.example(example["name"])["predictions"][0]["ood"]["flag"]
        said = console.text("#in-data-said")
        assert ("not known whether more data would help" in said) == flagged, example["name"]
        assert ("for inputs like the training data, more of it would not help" in said) != flagged, example["name"]
        assert console.text("#why").startswith("Unlike what" if flagged else "By this score, like"), example["name"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "clothes" else name for name in NAMES]
)
def test_every_example_is_what_it_is_offered_as(demo: Any, name: str) -> None:
    """The embedded model itself calls them so, whatever the draws."""
    known = EXAMPLES[name]
    x = np.array([example["pixels"] for example in known["examples"]], dtype=np.uint16).reshape(-1, *known["shape"])
    file = io.BytesIO()
    np.save(file, np.rint(x * (255 / known["levels"])).astype(np.uint8))
    for seed in range(3):
        url = f"{demo.url}/v1/models/{name}/predict?samples=16&seed={seed}"
        reply = httpx.post(url, content=file.getvalue(), headers={"content-type": "application/x-npy"}, timeout=60)
        for example, row in zip(known["examples"], reply.json()["predictions"], strict=True):
            assert row["ood"]["flag"] == (example["group"] == "out"), example["name"]
            if example["group"] == "in":
                assert example["name"].endswith(row["label"])


def test_the_slider_shows_the_first_draws_as_the_server_would_answer_them(live: Any, visit: Visit) -> None:
    console = visit(live.url)
    console.page.wait_for_selector("#who-seed")
    told = console.example("letter K")
    body = {"images": [console.page.evaluate("document.querySelector('#pad').toDataURL()")], "seed": told["seed"]}
    seen = []
    for k in (1, 4, 23):
        console.slide(k)
        row = httpx.post(f"{live.url}/v1/models/digits/predict", json={**body, "samples": k}).json()["predictions"][0]
        shown = float(console.text("#chance").removesuffix(" %"))
        assert shown == pytest.approx(100 * row["max_probability"], abs=0.06)
        assert console.text("#label") == row["label"]
        assert f"{row['ood']['threshold']:.3g}".replace("-", "−") in console.text("#at-threshold")
        assert console.text("#k-said") == ("1 draw" if k == 1 else f"{k} draws")
        seen.append(shown)
    assert len(set(seen)) > 1  # two of them may be equal as they are shown, hardly all
    console.page.locator("#k").focus()
    console.page.keyboard.press("End")
    assert console.text("#k-said") == "64 draws"
    assert float(console.text("#chance").removesuffix(" %")) == pytest.approx(
        100 * told["predictions"][0]["max_probability"], abs=0.06
    )
    console.page.get_by_role("button", name="Replay").click()
    console.page.wait_for_function("() => document.querySelector('#k').value < 64")
    console.page.wait_for_function("() => document.querySelector('#k').value == 64")


def test_a_digit_is_drawn_by_keyboard_alone(live: Any, visit: Visit) -> None:
    console = visit(live.url)
    console.page.wait_for_selector("#who-seed")
    for _ in range(6):  # skip link, two pages, model, the plain network beside it, then the drawing
        console.page.keyboard.press("Tab")
    assert console.page.evaluate("document.activeElement.id") == "pad"
    for key in ("Delete", *["ArrowUp"] * 4, "Space", *["Shift+ArrowDown"] * 6):
        console.page.keyboard.press(key)
    console.answer(lambda: console.page.keyboard.press("Shift+ArrowDown"))
    assert console.text("#source") == "Drawn here."
    assert console.text("#label") == "1"
    pixels = console.page.evaluate("[...document.querySelector('#pad').getContext('2d').getImageData(4, 0, 1, 8).data]")
    assert min(pixels) == 255  # the whole column, top to bottom
    console.photograph("drawn-by-keyboard")


def test_a_stroke_of_the_pointer_is_answered_and_clear_forgets_it(live: Any, visit: Visit) -> None:
    console = visit(live.url)
    console.page.wait_for_selector("#who-seed")
    console.page.get_by_role("button", name="Clear").click()
    assert console.page.locator("#told").is_hidden()
    console.page.locator("#pad").scroll_into_view_if_needed()
    box = console.page.locator("#pad").bounding_box()
    assert box is not None

    def stroke() -> None:
        mouse = console.page.mouse
        mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.05 * box["height"])
        mouse.down()
        mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.95 * box["height"], steps=5)
        mouse.up()

    console.answer(stroke)
    assert console.text("#label") == "1"


def test_two_strokes_on_the_larger_pad_are_a_pair_of_trousers(demo: Any, visit: Visit) -> None:
    console = visit(demo.url)
    console.page.wait_for_selector("#who-seed")
    console.page.get_by_role("button", name="Clear").click()
    console.page.locator("#pad").scroll_into_view_if_needed()
    box = console.page.locator("#pad").bounding_box()
    assert box is not None

    def stroke(points: list[tuple[int, int]]) -> None:
        mouse = console.page.mouse
        places = [
            (box["x"] + (x + 0.5) / 28 * box["width"], box["y"] + (y + 0.5) / 28 * box["height"]) for x, y in points
        ]
        mouse.move(*places[0])
        mouse.down()
        for place in places[1:]:
            mouse.move(*place)
        mouse.up()

    for left, right in ((9, 12), (16, 19)):  # each leg is filled from side to side
        leg = [point for y in range(2, 27, 2) for point in [(left, y), (right, y)][:: 1 if y % 4 else -1]]
        console.answer(partial(stroke, leg))
    assert console.text("#label") == "Trouser"
    console.photograph("drawn-clothes")


def test_a_picture_file_is_sent_as_it_is(live: Any, visit: Visit, tmp_path: Path) -> None:
    five = next(example["pixels"] for example in EXAMPLES["digits"]["examples"] if example["name"] == "digit 5")
    picture = Image.fromarray(np.rint(np.array(five).reshape(8, 8) * 255 / 16).astype(np.uint8))
    picture.resize((80, 80), Image.Resampling.NEAREST).save(tmp_path / "five.png")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    console = visit(live.url, errors=True)
    console.page.wait_for_selector("#who-seed")
    console.answer(lambda: console.page.set_input_files("#file", tmp_path / "five.png"))
    assert console.text("#label") == "5"
    assert console.text("#source").startswith("five.png")
    console.page.set_input_files("#file", tmp_path / "broken.png")
    console.page.wait_for_selector("#problem:visible")
    assert console.text("#problem").startswith("400: the picture cannot be read")
    assert console.page.locator("#told").is_hidden()  # no answer stands beside an input that it is not about


def test_a_seed_is_kept_to_its_last_digit(live: Any, visit: Visit) -> None:
    console = visit(live.url)
    console.page.wait_for_selector("#who-seed")
    seed = str(2**63 - 1)
    console.page.get_by_label("Seed").fill(seed)
    first = console.example("noise")
    assert str(first["seed"]) == console.text("#who-seed") == seed
    chance = console.text("#chance")
    console.example("digit 0")
    console.example("noise")
    assert console.text("#chance") == chance


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_phone_scrolls_only_down(live: Any, visit: Visit, path: str) -> None:
    console = visit(live.url + path, width=360, height=740)
    console.page.wait_for_selector("#who-seed" if path == "/" else ".operation")
    assert console.page.evaluate("document.documentElement.scrollWidth") == 360
    console.photograph("phone" if path == "/" else "phone-docs")


def test_the_api_page_lists_every_operation(live: Any, visit: Visit) -> None:
    console = visit(f"{live.url}/docs")
    console.page.wait_for_selector(".operation")
    document = httpx.get(f"{live.url}/openapi.json").json()
    methods, paths = (
        console.page.locator(f".operation:has(.method) .{part}").all_inner_texts() for part in ("method", "path")
    )
    known = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert set(zip(methods, paths, strict=True)) == known
    schemas = console.page.locator(".schema").all_inner_texts()
    assert schemas == list(document["components"]["schemas"])
    console.photograph("docs")


@pytest.fixture(scope="module")
def others(serve: Any, make_artifact: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server of models of every other kind, one with labels that nobody should believe, behind a key."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("image", "regression"):
        make_artifact(root / kind / "1" / "model.safetensors", kind=kind)
    write_mixed(root / "mixed" / "1" / "model.safetensors")
    laplace = root / "laplace" / "1" / "model.safetensors"
    laplace.parent.mkdir(parents=True)
    write_laplace(laplace)
    write_groups(root / "groups" / "1" / "model.safetensors")
    hostile = make_artifact(root / "hostile" / "1" / "model.safetensors")
    model = load(hostile)
    labels = tuple(f"{HOSTILE}{i}" for i in range(3))
    save(model.network, hostile, card=model.card.model_copy(update={"labels": labels, "calibration": None}))
    return serve(root, DUBITO_API_KEYS=f"tester={hash_key('open sesame')}", DUBITO_BUCKETS="1")


@pytest.fixture(scope="module")
def inside(others: Any, tab: "Page") -> Iterator[Console]:
    """Past the key, for all tests below; the first request is refused, which a browser reports as an error."""
    with visiting(tab) as visit:
        console = visit(others.url, errors=True)
        console.page.wait_for_selector("#key:visible")
        console.page.keyboard.type("a wrong one")
        console.page.keyboard.press("Enter")
        console.page.wait_for_selector("#problem:visible")
        assert console.text("#problem") == "This key is not known here."
        console.page.keyboard.type("open sesame")
        console.page.keyboard.press("Enter")
        console.page.wait_for_selector("#key", state="hidden")
        yield console


def test_labels_are_text_whatever_they_look_like(inside: Console) -> None:
    inside.page.select_option("#model", "hostile")
    told = inside.answer(lambda: inside.page.get_by_role("button", name="random").click())
    assert inside.text("#label") == told["predictions"][0]["label"]
    assert inside.page.locator(".class-name").all_inner_texts() == [f"{HOSTILE}{i}" for i in range(3)]
    assert inside.page.locator("img").count() == 0
    assert inside.page.title() == "dubito console"
    assert inside.text("#flag") == "Not calibrated"


def test_numbers_are_typed_and_regression_answers_with_its_own_fields(inside: Console) -> None:
    inside.page.select_option("#model", "regression")
    for name, value in zip(COLUMNS, (0.5, -1, 2, 0), strict=True):
        inside.page.get_by_label(name, exact=True).fill(str(value))
    told = inside.answer(lambda: inside.page.keyboard.press("Enter"))
    row = told["predictions"][0]
    shown = [float(word.replace("−", "-")) for word in inside.text("#label").split(", ")]
    assert shown == pytest.approx(row["mean"], rel=0.01)
    assert inside.page.locator(".class-row").count() == 2
    assert tuple(inside.page.locator(".class-name").all_text_contents()) == TARGETS
    assert inside.text("#settle-said").startswith("Mean of price after")
    assert float(inside.text("#in-data")) == pytest.approx(sum(row["aleatoric_variance"]), rel=0.01)
    assert float(inside.text("#in-weights")) == pytest.approx(sum(row["epistemic_variance"]), rel=0.01)
    inside.photograph("regression")
    inside.slide(7)
    inside.page.get_by_label("area", exact=True).fill("")
    inside.page.get_by_role("button", name="Predict").click()
    assert inside.text("#problem") == "area is no number."


def test_pictures_in_colour_have_examples_made_for_them(inside: Console) -> None:
    inside.page.select_option("#model", "image")
    told = inside.example("stripes")
    assert told["model"] == "image"
    assert inside.text("#label") == told["predictions"][0]["label"]
    assert inside.page.locator("#ink").is_visible()


@pytest.mark.parametrize(("name", "methods"), [("mixed", "ffg-u, whvi"), ("laplace", "subnetwork-laplace")])
def test_models_of_every_kind_are_shown_like_any_other(inside: Console, name: str, methods: str) -> None:
    inside.page.select_option("#model", name)
    inside.page.wait_for_function("text => document.querySelector('#about').textContent.includes(text)", arg=methods)
    told = inside.answer(lambda: inside.page.get_by_role("button", name="random").click())
    row = told["predictions"][0]
    assert (told["model"], told["samples"]) == (name, 64)
    assert inside.text("#label") == row["label"]
    assert inside.page.locator(".class-row").count() == 3
    assert row["mutual_information"] > 0
    assert float(inside.text("#in-weights").split()[0]) == pytest.approx(row["mutual_information"], abs=6e-4)
    inside.photograph(name)


def test_models_are_compared_side_by_side_on_one_input(others: Any, inside: Console) -> None:
    """Each row says what the server answers for that model to the same input with the same draws and seed."""
    page = inside.page
    page.select_option("#model", "regression")  # the only model of its kind
    inside.answer(lambda: page.get_by_role("button", name="random").click())
    assert page.locator("#side").is_hidden()
    page.select_option("#model", "mixed")
    told = inside.answer(lambda: page.get_by_role("button", name="random").click())
    assert page.locator("#side-table tr").count() == 0  # nobody has asked for it
    page.locator("#side-ask").click()
    headers = {"X-API-Key": "open sesame"}
    models = httpx.get(f"{others.url}/v1/models", headers=headers).json()["models"]
    shapes = {one["name"]: (one["task"], one["input"]["shape"], one["input"]["image"]) for one in models}
    rivals = [name for name, shape in shapes.items() if shape == shapes["mixed"] and name != "mixed"]
    assert {"hostile", "laplace"} <= set(rivals)
    assert inside.text("#side-who") == f"With {', '.join(rivals)}: the same input, draws and seed."
    page.wait_for_function("() => document.querySelector('#side-said').textContent !== ''")
    rows = page.locator("#side-table tbody tr")
    assert rows.locator("th").all_inner_texts() == ["mixed", *rivals]

    values = [float(field.input_value()) for field in page.locator("#fields input").all()]
    by_name = {one["name"]: one for one in models}
    labels = []
    for row, name in zip(rows.all(), ["mixed", *rivals], strict=True):
        body = {"inputs": [values], "samples": told["samples"], "seed": told["seed"]}
        reply = httpx.post(f"{others.url}/v1/models/{name}/predict", json=body, headers=headers).json()
        expected, cells = reply["predictions"][0], row.locator("td").all_inner_texts()
        labels.append(expected["label"])
        assert cells[0].startswith(f"{expected['label']}, ")
        for shown, key in ((cells[1], "entropy"), (cells[2], "mutual_information")):
            assert float(shown.replace("−", "-")) == pytest.approx(expected[key], rel=0.01, abs=1e-4), (name, key)
        members = expected["prediction_set"]
        assert cells[3] == ("not calibrated" if members is None else ", ".join(members) or "empty")
        flag = expected["ood"] and ("out of distribution" if expected["ood"]["flag"] else "in distribution")
        assert cells[4] == (flag or "not calibrated")
        assert re.fullmatch(r"[\d.]+ ms", cells[5])
        size = by_name[name]["bytes"]["artifact"]
        assert float(cells[6].split()[0]) == pytest.approx(size / 1000, rel=0.05)
    said = f"{labels.count(labels[0])} of {len(labels)} models that answered say {labels[0]}. "
    assert inside.text("#side-said") == f"{said}Times are the server's, files as stored."
    assert page.locator("img").count() == 0  # labels are text here too
    inside.photograph("side-by-side")

    told = inside.answer(lambda: page.get_by_role("button", name="far away").click())  # stays on for the next input
    page.wait_for_function("() => document.querySelector('#side-said').textContent !== ''")
    assert rows.count() == 1 + len(rivals)
    page.locator("#side-ask").click()
    assert page.locator("#side-box").is_hidden()


def test_a_model_calibrated_by_group_is_asked_by_group(inside: Console) -> None:
    page = inside.page
    page.select_option("#model", "image")
    page.wait_for_selector("#groups", state="hidden")
    page.select_option("#model", "groups")
    page.wait_for_selector("#groups:visible")
    inside.answer(lambda: page.get_by_role("button", name="random").click())
    assert inside.text("#set-said") == "Made to hold the true class for 90 % of inputs like the training data."
    for group, size, held in (("north", 1, "90"), ("south", 3, "80")):
        told = inside.answer(lambda chosen=group: page.select_option("#group", chosen))  # type: ignore[misc]
        assert page.locator("#set li").all_inner_texts() == told["predictions"][0]["prediction_set"]
        assert page.locator("#set li").count() == size
        assert inside.text("#set-said") == f"Made to hold the true class for {held} % of inputs of group {group}."
    inside.slide(7)  # the set for fewer draws is of the same group
    assert page.locator("#set li").count() == 3
