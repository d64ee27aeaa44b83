"""The console's page /edge: an exported model in a real browser with the network cut off, against the server."""

import io
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import onnxruntime
import orjson
import pytest
import torch
from PIL import Image

from dubito.deploy.edge.export import export, save
from dubito.models import load
from dubito.models.embedded import embedded
from dubito.models.images import prepare, read_pixels
from tests.service.test_pictures import FITTINGS
from tests.service.test_pictures import exported as exported  # fixtures
from tests.service.test_pictures import pictures as pictures

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.usefixtures("quick_exports")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CONSOLE = files("dubito.service").joinpath("console")
SEED = 11


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("edge") / "digits.onnx"
    save(export(load(embedded("digits")), samples=64, take="image"), path)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    if BROWSER is None:
        pytest.skip("NO BROWSER: the page /edge is not tested here; install chromium (Debian: apt install chromium).")
    if not CONSOLE.joinpath("wasm").is_dir():
        pytest.skip("NO WASM: the page /edge is not tested here; `make wasm` fetches it (needs npm).")
    api = pytest.importorskip("playwright.sync_api", reason="NO PLAYWRIGHT: the page /edge is not tested here.")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def opened(live: Any, browser: "Browser") -> Iterator["Page"]:
    """The page once its runtime is there, for all tests: to compile it takes seconds. At the end nothing has gone wrong
    on it."""
    opened = browser.new_page()
    opened.set_default_timeout(60_000)
    wrong: list[str] = []
    opened.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.goto(f"{live.url}/edge")
    opened.wait_for_function("() => document.querySelector('#state').textContent.startsWith('Ready')")
    yield opened
    opened.close()
    assert wrong == []


@pytest.fixture
def page(opened: "Page") -> Iterator["Page"]:
    yield opened
    opened.context.set_offline(False)


def example(name: str) -> bytes:
    """One of the console's examples for the digits as a picture."""
    models = orjson.loads(CONSOLE.joinpath("examples.json").read_bytes())
    (shipped,) = (model for model in models if model["first"] == "digit 3")
    (pixels,) = (one["pixels"] for one in shipped["examples"] if one["name"] == name)
    grey = np.array(pixels, np.float64).reshape(shipped["shape"][1:]) * (255 / shipped["levels"])
    content = io.BytesIO()
    Image.fromarray(np.rint(grey).astype(np.uint8)).save(content, "png")
    return content.getvalue()


def test_the_same_file_predicts_offline_as_native_code_and_server_do(page: "Page", digits: Path, live: Any) -> None:
    """A digit and a letter: to rounding as onnxruntime outside the browser, within the draws' spread as the server."""
    page.context.set_offline(True)
    page.locator("#model").set_input_files(digits)
    session = onnxruntime.InferenceSession(digits, providers=["CPUExecutionProvider"])
    for name in ("digit 3", "letter K"):
        picture = example(name)
        page.locator("#picture").set_input_files({"name": "x.png", "mimeType": "image/png", "buffer": picture})
        page.locator("#seed").fill(str(SEED))
        page.locator("#predict:enabled").wait_for()
        page.evaluate("document.querySelector('#how').textContent = ''")
        page.locator("#predict").click()
        page.wait_for_function(f"() => document.querySelector('#how').textContent.endsWith('seed {SEED}')")
        label, flag = page.locator("#label").inner_text(), page.locator("#flag").inner_text()
        shown = np.array([float(page.locator(f"[data-of='{i}']").inner_text()) for i in range(10)])
        pixels = np.array(Image.open(io.BytesIO(picture)))[None, ..., None]
        names = [output.name for output in session.get_outputs()]
        ours = dict(zip(names, session.run(None, {"image": pixels, "seed": np.array(SEED)}), strict=True))
        np.testing.assert_allclose(shown, ours["probabilities"][0], atol=1e-4)
        reply = httpx.post(
            f"{live.url}/v1/models/digits/predict?samples=64", content=picture, headers={"content-type": "image/png"}
        )
        (row,) = reply.json()["predictions"]
        assert label == row["label"]
        assert flag == ("Out of distribution" if row["ood"]["flag"] else "In distribution")
        assert np.abs(shown - np.array(row["probabilities"])).max() < 0.1


def test_files_that_are_not_ours_are_refused_on_the_page(page: "Page", exported: dict[str, tuple[Path, Path]]) -> None:
    _, graph = exported["crop"]  # small: to open that of the digits takes the browser a second
    content = graph.read_bytes()
    cases = {"cut": content[: len(content) // 2], "text": b"no model at all", "empty": b""}
    for name, before, after in (
        ("other", b'"format": 2', b'"format": 3'),
        ("unreadable", b'"format": 2', b'"format": ?'),
        ("senseless", b'"methods"', b'"method_"'),
        ("mismatched", b'"takes": "image"', b'"takes": "pixel"'),
    ):
        assert content.count(before) == 1
        cases[name] = content.replace(before, after)
    picture = {"name": "x.png", "mimeType": "image/png", "buffer": example("digit 3")}
    page.locator("#picture").set_input_files(picture)  # type: ignore[arg-type]
    page.locator("#model").set_input_files(graph)
    page.locator("#predict:enabled").wait_for()
    for name, body in cases.items():
        page.evaluate("document.querySelector('#problem').hidden = true")
        page.locator("#model").set_input_files({"name": f"{name}.onnx", "mimeType": "", "buffer": body})
        page.locator("#problem:visible").wait_for()
        assert "file" in page.locator("#problem").inner_text().lower()
        assert page.locator("#predict").is_disabled()
    page.locator("#model").set_input_files(graph)
    page.locator("#predict:enabled").wait_for()
    assert page.locator("#problem").is_hidden()


def test_the_browser_turns_and_cuts_as_the_server_does(
    page: "Page", pictures: Path, exported: dict[str, tuple[Path, Path]]
) -> None:
    for name, fitting in FITTINGS.items():
        path, graph = exported[name]
        model = load(path)
        assert model.card.input is not None
        picture = pictures / "class" / "x.png"
        x = prepare(torch.from_numpy(read_pixels(picture, fitting)), model.card.input).numpy().ravel()
        page.locator("#picture").set_input_files(picture)
        page.locator("#model").set_input_files(graph)
        page.wait_for_function(f"() => document.querySelector('#state').textContent.startsWith('{name}')")
        page.locator("#seed").fill("1")
        page.evaluate("document.querySelector('#how').textContent = ''")
        page.locator("#predict:enabled").click()
        page.wait_for_function("() => document.querySelector('#how').textContent.endsWith('seed 1')")
        shown = [float(value) for value in page.locator("#label").inner_text().split(", ")]
        assert np.abs(np.array(shown) - x).max() < 2e-3, name  # four digits are shown


def test_only_this_page_may_run_webassembly(live: Any) -> None:
    policies = {path: httpx.get(live.url + path).headers["content-security-policy"] for path in ("/", "/docs", "/edge")}
    assert "'wasm-unsafe-eval'" in policies["/edge"]
    assert "unsafe" not in policies["/"] + policies["/docs"]
    assert httpx.get(f"{live.url}/console/wasm/none.wasm").status_code == 404
    assert httpx.get(f"{live.url}/console/wasm/..%2Findex.html").status_code == 404
