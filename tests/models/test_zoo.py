"""The zoo: one list, whose files are what it says, under one name in every command, verified when they are fetched."""

import json
import math
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from dubito.models import load, save, zoo
from dubito.models.artifact import artifact
from dubito.models.embedded import NAMES, embedded
from dubito.models.errors import ArtifactError
from dubito.models.manifest import Card, Input, Zoo
from dubito.models.numerics.parameters import count
from dubito.models.remote.address import Address, AddressError, place_of
from dubito.models.zoo import MOST_BYTES, ZooError, listed
from dubito.models.zoo_files import entry_of, verify
from dubito.service.settings import read_settings
from dubito.training.zoo import kept
from tests import forked, stores

SHIPPED = [one for one in listed() if one.shipped]
DIGITS = embedded("digits").read_bytes()


def test_the_list_is_that_of_the_files() -> None:
    """And the steps that make each of them are known, in the same order."""
    assert {path.stem for path in zoo.folder().glob("*.safetensors")} == {one.name for one in SHIPPED}
    assert [one.name for one in listed()] == [name for name in kept().models if name in {o.name for o in listed()}]
    assert set(NAMES) <= {one.name for one in SHIPPED}
    assert sum(one.bytes for one in SHIPPED) <= MOST_BYTES


@pytest.mark.parametrize("one", SHIPPED, ids=lambda one: one.name)
def test_an_entry_says_what_its_file_is(one: zoo.Listed) -> None:
    path = zoo.shipped(one.name)
    assert (path.stat().st_size, sha256(path.read_bytes()).hexdigest()) == (one.bytes, one.sha256)
    model = load(f"zoo:{one.name}")
    assert model.card.metrics == one.metrics
    assert count(model.network) == one.parameters
    assert model.manifest.precision == one.precision
    told = model.card.zoo
    assert told is not None
    steps = kept().models[one.name]
    assert (told.title, told.limits, told.not_for) == (steps.title, steps.limits, steps.not_for)
    assert told.steps == steps.commands()
    assert told.licence
    assert told.minutes is None or told.minutes > 0
    assert len(told.risk) == 20
    errors = 1 - one.metrics["accuracy"] if one.task == "classification" else one.metrics["rmse"]
    share, risk = told.risk[-1]
    assert share == 1
    # of all examples; other kinds of devices draw others. Of some: within 4 standard errors
    some = 0.0 if told.examples is None else 4 * math.sqrt(errors * (1 - errors) / told.examples)
    assert risk == pytest.approx(errors, rel=1e-3, abs=1e-3 + some)
    if one.task == "classification":  # accuracy follows from the bins, and ECE
        assert sum(a * n for _, a, n in told.reliability) == pytest.approx(1 - risk, abs=1e-3)
        gap = sum(abs(c - a) * n for c, a, n in told.reliability)
        if told.examples is None:
            assert gap == pytest.approx(one.metrics["ece"], abs=2e-3)


def test_a_name_is_a_path_in_every_command() -> None:
    assert place_of("zoo:digits") == embedded("digits")
    assert read_settings(None, models="zoo:digits,zoo:clothes").models == (embedded("digits"), embedded("clothes"))
    ended = forked.run("inspect", "zoo:digits")
    assert ended.returncode == 0, ended.stderr
    assert "of the zoo: Handwritten digits of 8 × 8 pixels" in ended.stdout
    ended = forked.run("serve", "zoo:nobody", "--port", "0")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: zoo:nobody is not in the zoo; there are: clothes, digits, ")


def test_the_commands() -> None:
    ended = forked.run("zoo", "--json")
    models = json.loads(ended.stdout)["models"]
    assert [one["name"] for one in models] == [one.name for one in listed()]
    assert {"name", "method", "data", "bytes", "parameters", "metrics"} <= models[0].keys()
    ended = forked.run("zoo")
    assert all(one.name in ended.stdout for one in listed())
    assert ended.stdout.endswith(f"Next: dubito serve zoo:{SHIPPED[0].name}\n")
    ended = forked.run("zoo", "verify", "digits", "--json")
    assert json.loads(ended.stdout) == {"verified": {"digits": str(embedded("digits"))}}


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package whose zoo has the digits alone, and they do not ship."""
    entry = entry_of(embedded("digits"), shipped=False)
    (tmp_path / "index.json").write_bytes(zoo.INDEX.dump_json((entry,)))
    monkeypatch.setattr(zoo, "folder", lambda: tmp_path)
    listed.cache_clear()
    yield tmp_path
    listed.cache_clear()


def test_a_larger_model_needs_an_address(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUBITO_ZOO", raising=False)
    with pytest.raises(ZooError, match=r"zoo:digits does not come with the package .*DUBITO_ZOO.*dubito zoo train"):
        place_of("zoo:digits")
    monkeypatch.setenv("DUBITO_ZOO", "s3://bucket/zoo/")
    hashed = sha256(DIGITS).hexdigest()
    assert place_of("zoo:digits") == Address("s3://bucket/zoo/digits.safetensors", hashed)
    monkeypatch.setenv("DUBITO_ZOO", "somewhere")
    with pytest.raises(AddressError, match="the release is at somewhere; expected an address: s3://"):
        place_of("zoo:digits")


def test_a_file_that_is_not_the_listed_one(elsewhere: Path) -> None:
    """As after a half-done update: the list is another's."""
    entry = zoo.named("digits").model_copy(update={"shipped": True, "sha256": "0" * 64})
    (elsewhere / "index.json").write_bytes(zoo.INDEX.dump_json((entry,)))
    shutil.copy(DIGITS_FILE, elsewhere / "digits.safetensors")
    listed.cache_clear()
    with pytest.raises(ZooError, match=r"the list of the zoo says 0000.*install dubito again"):
        verify("digits")


DIGITS_FILE = embedded("digits")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_release_is_fetched_verified_and_kept(tmp_path: Path) -> None:
    """From a server with TLS; what is not the listed content is refused, and nothing of it is kept."""
    authority, certificate = stores.make_certificate(tmp_path)
    cache, known = tmp_path / "cache", {"SSL_CERT_FILE": str(authority)}
    known["DUBITO_CACHE"] = str(cache)
    with stores.web(certificate) as site:
        site.files["/v1/digits.safetensors"] = DIGITS
        site.files["/v1/clothes.safetensors"] = DIGITS
        address = f"https://{stores.HOST}:{site.port}/v1"
        words = ("zoo", "get", "digits", "--from", address, "--out", str(tmp_path), "--json")
        ended = forked.run(*words, environment=known)
        assert ended.returncode == 0, ended.stderr
        assert Path(json.loads(ended.stdout)["files"]["digits"]).read_bytes() == DIGITS
        ended = forked.run("zoo", "get", "clothes", "--from", address, environment=known)
        assert ended.returncode == 2
        assert "clothes.safetensors cannot be trusted: its SHA-256 is" in ended.stderr
    assert len([*(cache / "files").iterdir()]) == 1
    ended = forked.run("zoo", "get", "digits", "--from", address, environment=known)  # the server is gone
    assert ended.returncode == 0, ended.stderr


def test_older_servers_refuse_a_card_of_the_zoo_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(embedded("digits"))
    card, path = model.card, tmp_path / "m.safetensors"
    assert save(model.network, path, card=card.model_copy(update={"zoo": None})).format < 6
    assert save(model.network, path, card=card).format == 6
    assert load(path).card.zoo == card.zoo
    monkeypatch.setattr(artifact, "FORMATS", (1, 2, 3, 4, 5))  # as it was before
    with pytest.raises(ArtifactError, match="its format is 6; this version of dubito reads format 1, 2, 3, 4 and 5"):
        load(path)


def test_older_servers_refuse_a_plain_network_by_another_measure(tmp_path: Path) -> None:
    """They would take its AUROC for one by entropy; of one that is, they read the card as before."""
    model, path = load(embedded("digits")), tmp_path / "m.safetensors"
    plain = model.card.plain
    assert plain is not None
    assert "measure" not in plain.model_dump(mode="json")
    by_knn = model.card.model_copy(update={"plain": plain.model_copy(update={"measure": "knn"})})
    assert save(model.network, path, card=by_knn).format == 7
    assert load(path).card.plain == by_knn.plain


def test_a_card_without_the_zoo_is_written_as_before() -> None:
    assert "zoo" not in Card(input=Input(shape=(6,))).model_dump(mode="json")
    assert set(Zoo.model_fields) >= {"licence", "minutes", "limits", "not_for"}
