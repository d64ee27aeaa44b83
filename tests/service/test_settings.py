"""Flags over environment over file over defaults; mistakes are one sentence."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dubito.models.embedded import embedded
from dubito.models.remote.address import Address
from dubito.service.settings import SettingError, Settings, as_toml, read_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("DUBITO_"):
            monkeypatch.delenv(name)


def test_flags_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dubito.toml"
    file.write_text('port = 1001\nsamples = 5\nhost = "0.0.0.0"\napi_keys = { a = "' + 64 * "0" + '" }\n')
    assert read_settings(file).port == 1001
    monkeypatch.setenv("DUBITO_PORT", "1002")
    monkeypatch.setenv("DUBITO_EXPECTED", "one, two")
    monkeypatch.setenv("DUBITO_BUCKETS", "[8, 1]")
    monkeypatch.setenv("DUBITO_API_KEYS", f"bob={64 * '1'},eve={64 * '2'}")
    found = read_settings(file, port=1003)
    assert (found.port, found.samples, found.host) == (1003, 5, "0.0.0.0")
    assert (found.expected, found.buckets) == (("one", "two"), (1, 8))
    assert found.api_keys == {"bob": 64 * "1", "eve": 64 * "2"}
    monkeypatch.setenv("DUBITO_SETTINGS", str(file))
    assert read_settings().samples == 5
    assert read_settings().port == 1002


def test_what_is_printed_gives_the_same_settings_again(tmp_path: Path) -> None:
    found = read_settings(port=99, models="a,b", api_keys=f"x={64 * 'a'}", cors_origins="https://a.example")
    file = tmp_path / "again.toml"
    file.write_text(as_toml(found))
    assert read_settings(file) == found
    assert tomllib.loads(as_toml(Settings()))["port"] == 8000
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": "many"}, "the setting port is 'many'"),
        ({"port": 70000}, "less than or equal to 65535"),
        ({"prot": 1}, "there is no setting 'prot'"),
        ({"api_keys": "bob=plain"}, "api_keys"),
        ({"device": "tpu"}, "expected 'auto', 'cpu' or 'cuda'"),
        ({"samples": -1}, "samples"),
        ({"buckets": []}, "buckets"),
    ],
)
def test_mistakes_are_one_sentence(flags: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        read_settings(None, **flags)
    assert "\n" not in str(caught.value)


def test_the_key_of_a_client_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dubito bench http` reads it there, perhaps in the shell that starts the server."""
    monkeypatch.setenv("DUBITO_KEY", "secret")
    assert read_settings() == Settings()


def test_a_misspelt_variable_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUBITO_PROT", "1")
    with pytest.raises(SettingError, match="DUBITO_PROT"):
        read_settings()


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="there is no file"):
        read_settings(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("port = = 3")
    with pytest.raises(SettingError, match="is no TOML"):
        read_settings(tmp_path / "bad.toml")


def test_print_settings_is_a_command() -> None:
    command = [sys.executable, "-m", "dubito", "serve", "--print-settings", "--port", "81", "--set", "samples=3"]
    found = tomllib.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (found["port"], found["samples"]) == (81, 3)
    wrong = subprocess.run([*command, "--set", "samples"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def test_addresses_in_the_environment_are_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not paths: a text is divided into models before each is looked at."""
    monkeypatch.setenv("DUBITO_MODELS", "s3://bucket/model.safetensors, zoo:digits,models")
    assert read_settings().models == (Address("s3://bucket/model.safetensors"), embedded("digits"), Path("models"))
