"""`dubito push`: what is written can be served, nothing else is overwritten, and the hub gets a card of the model."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from dubito.models import bayesianize, save
from dubito.models.artifact.artifact import examine
from dubito.models.embedded import embedded
from dubito.models.manifest import Card, Input, Provenance, Regression
from dubito.models.modelcard import model_card
from tests import forked, stores
from tests.hub import Hub, hub
from tests.small_models import mlp

pytestmark = stores.OPEN
DIGITS, CLOTHES = embedded("digits"), embedded("clothes")
SHA256 = sha256(DIGITS.read_bytes()).hexdigest()


def push(known: dict[str, str], *words: str | Path) -> forked.Ended:
    return forked.run("push", *words, environment=known)


def error_of(ended: forked.Ended) -> str:
    assert ended.returncode == 2, (ended.stdout, ended.stderr)
    (line,) = ended.stderr.splitlines()
    return line


SLOW = [pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("gs", "az")]  # their emulators and libraries are


@pytest.fixture(scope="module", params=["s3", *SLOW])
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str], Any]]:
    """The scheme, the environment, and a file system for the test's own eyes."""
    with getattr(stores, request.param)() as port:
        known = getattr(stores, f"{request.param}_environment")(port)
        yield request.param, known, stores.file_system(request.param, port)


def test_what_is_pushed_is_there_with_its_hash_and_nothing_else_is_replaced(store: Any, tmp_path: Path) -> None:
    scheme, known, fs = store
    address = f"{scheme}://bucket/digits/1/model.safetensors"
    known = known | {"DUBITO_CACHE": str(tmp_path)}
    ended = push(known, DIGITS, address, "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"address": address, "sha256": SHA256, "bytes": DIGITS.stat().st_size}
    assert fs.cat_file("bucket/digits/1/model.safetensors") == DIGITS.read_bytes()
    assert fs.cat_file("bucket/digits/1/model.safetensors.sha256") == f"{SHA256}  model.safetensors\n".encode()
    inspected = forked.run("inspect", address, "--json", environment=known)
    assert inspected.returncode == 0, inspected.stderr

    again = push(known, DIGITS, address)  # the same file: nothing to do
    assert again.returncode == 0, again.stderr
    assert f"{address} holds it already" in again.stdout
    line = error_of(push(known, CLOTHES, address))
    assert f"{address} holds another file; expected none there. Push to another version, or replace it" in line
    fs.invalidate_cache()
    assert fs.cat_file("bucket/digits/1/model.safetensors") == DIGITS.read_bytes()
    forced = push(known, CLOTHES, address, "--force")
    assert forced.returncode == 0, forced.stderr
    fs.invalidate_cache()
    assert fs.cat_file("bucket/digits/1/model.safetensors") == CLOTHES.read_bytes()
    assert fs.cat_file("bucket/digits/1/model.safetensors.sha256")[:64] != SHA256.encode()


def test_a_bucket_that_is_not_there(store: Any) -> None:
    scheme, known, _ = store
    line = error_of(push(known, DIGITS, f"{scheme}://nowhere/"))
    assert re.search("nowhere/digits.safetensors cannot be written: there is no (such file|bucket|container)", line)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://host/x.safetensors", "expected an address that can be written to: s3://BUCKET/PATH"),
        ("folder/x.safetensors", "expected an address that can be written to"),
        ("s3://bucket/x", "expected it to end in .safetensors, or in /"),
        ("hf://owner/name/x.safetensors", "expected hf://OWNER/NAME"),
        (f"s3://bucket/x.safetensors#sha256={SHA256}", "expected it without"),
    ],
)
def test_a_place_that_is_none(url: str, said: str) -> None:
    assert said in error_of(push({}, DIGITS, url))


def test_what_is_no_artifact_is_not_pushed(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(DIGITS.read_bytes()[:-1])
    assert "cut or damaged" in error_of(push({}, tmp_path / "x.safetensors", "s3://bucket/"))


# the hub


@pytest.fixture
def web() -> Iterator[Hub]:
    with hub() as state:
        yield state


def test_the_hub_gets_a_model_and_its_card(web: Hub, tmp_path: Path) -> None:
    known = web.environment() | {"DUBITO_CACHE": str(tmp_path)}
    ended = push(known, CLOTHES, "hf://owner/clothes", "--license", "mit")
    assert ended.returncode == 0, ended.stderr
    assert "made the private repository owner/clothes" in ended.stdout
    assert ended.stdout.endswith("Next: dubito serve hf://owner/clothes\n")
    files = web.repositories["owner/clothes"]
    assert files.keys() == {"model.safetensors", "README.md"}
    assert files["model.safetensors"] == CLOTHES.read_bytes()
    assert files["README.md"].decode() == model_card(examine(CLOTHES)[0], "owner/clothes", license="mit")
    inspected = forked.run("inspect", "hf://owner/clothes", "--json", environment=known)
    assert json.loads(inspected.stdout)["bytes"] == CLOTHES.stat().st_size

    files["README.md"] = b"words of somebody"
    again = push(known, CLOTHES, "hf://owner/clothes")
    assert "README.md is there already and stays as it is" in again.stdout
    assert files["README.md"] == b"words of somebody"
    line = error_of(push(known, DIGITS, "hf://owner/clothes"))
    assert "holds another file" in line
    forced = push(known, DIGITS, "hf://owner/clothes", "--force")
    assert forced.returncode == 0, forced.stderr
    assert files["model.safetensors"] == DIGITS.read_bytes()
    assert b"dubito serve hf://owner/clothes" in files["README.md"]


def test_the_hub_denies(web: Hub, tmp_path: Path) -> None:
    web.repositories["owner/clothes"] = {}
    web.private.add("owner/clothes")
    known = web.environment(token="hf_wrong") | {"DUBITO_CACHE": str(tmp_path)}
    line = error_of(push(known, CLOTHES, "hf://owner/clothes"))
    assert "credentials" in line
    assert "hf_wrong" not in line


# the card, read by the hub's own library


def parsed(text: str) -> Any:
    from huggingface_hub import ModelCard

    return ModelCard(text, ignore_metadata_errors=False).data


def test_the_card_has_the_metadata_of_the_hub() -> None:
    manifest, _ = examine(CLOTHES)
    data = parsed(model_card(manifest, "owner/clothes", license="mit"))
    assert (data.license, data.library_name, data.pipeline_tag) == ("mit", "dubito", "image-classification")
    assert data.datasets == ["zalando-datasets/fashion_mnist"]
    assert {"bayesian", *manifest.methods} <= set(data.tags)
    figures = {result.metric_type: result.metric_value for result in data.eval_results}
    assert figures == pytest.approx(manifest.card.metrics)
    assert {result.dataset_name for result in data.eval_results} == {"Fashion-MNIST"}


def test_the_card_has_the_bayesian_and_the_plain_column_limits_and_use() -> None:
    manifest, _ = examine(CLOTHES)
    text = model_card(manifest, "owner/clothes")
    plain = manifest.card.plain
    assert plain is not None
    assert "| figure | Bayesian | plain network | plain, with its temperature |" in text
    row = f"| `NLL` | {manifest.card.metrics['nll']:.4g} | {plain.metrics['nll']:.4g} | {plain.tempered['nll']:.4g} |"
    assert row in text
    assert "Against the plain network with its temperature, this model is" in text
    calibration = manifest.card.calibration
    assert calibration is not None
    assert f"hold the true answer {calibration.coverage:.0%} of the time" in text
    assert "$ dubito serve hf://owner/clothes" in text


def test_names_in_a_file_are_no_markup_and_paths_are_not_told(tmp_path: Path) -> None:
    """Labels and the recipe come from a file that anybody may have written."""
    card = Card(
        input=Input(shape=(4,)),
        labels=("a|b`c\n# head", '"quoted": [x]', "c"),
        metrics={"accuracy": 0.5},
        provenance=Provenance(recipe={"data": {"name": "folder:/home/somebody/patients"}}),
    )
    save(bayesianize(mlp(4, 8, 3), "ffg-u", inducing=2), tmp_path / "x.safetensors", card=card)
    manifest, _ = examine(tmp_path / "x.safetensors")
    text = model_card(manifest, 'owner/odd"name')
    data = parsed(text)
    assert (data.pipeline_tag, data.license, data.datasets) == ("tabular-classification", "unknown", None)
    assert "somebody" not in text
    assert "\n# head" not in text
    assert "It is not calibrated" in text


def test_a_card_of_a_regression_without_figures(tmp_path: Path) -> None:
    network = bayesianize(mlp(4, 8, 2), "ffg-u", inducing=2, task=Regression(outputs=1, noise="input"))
    save(network, tmp_path / "x.safetensors", card=Card(input=Input(shape=(4,)), targets=("price",)))
    text = model_card(examine(tmp_path / "x.safetensors")[0], "owner/price")
    assert parsed(text).pipeline_tag == "tabular-regression"
    assert "None were measured" in text
    assert "It predicts `price`." in text
