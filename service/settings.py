"""Settings: flags, then the environment (`DUBITO_…`), then a TOML file; each is checked before anything starts."""

import json
import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from dubito.models.errors import DubitoError

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PREFIX, NAMES_FILE = "DUBITO_", "DUBITO_SETTINGS"
CLIENTS_KEY = "DUBITO_KEY"  # read by `dubito bench http`, and no setting of the server
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


class SettingError(DubitoError):
    """An unknown setting, or a value that is not valid."""


class Settings(BaseSettings):
    """One field per setting; `dubito serve --print-settings` shows them with their values."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, enable_decoding=False)

    models: Annotated[
        tuple[Path, ...], Field(description="Artifacts, or model repositories: root/name/version/model.safetensors.")
    ] = ()
    expected: Annotated[
        tuple[str, ...],
        Field(description="Models that must answer before the server is ready; empty: all that it could load."),
    ] = ()
    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="Where models run.")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(
            description="Type of activations; auto: bfloat16 on a GPU that has it natively, else float32. "
            "Where the device computes wrongly in it, float32 is taken."
        ),
    ] = "auto"

    memory_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="Limit on the memory of models, draws and passes; larger passes are split. "
            "0: 80 % of a GPU's memory, no limit on a CPU.",
        ),
    ] = 0

    samples: Annotated[int, Field(ge=0, description="Default number of posterior draws K.")] = 20
    max_samples: Annotated[PositiveInt, Field(description="Most draws that a request may ask for.")] = 1024
    max_requests: Annotated[PositiveInt, Field(description="Predictions under way at once; more get 429.")] = 2048
    max_rows: Annotated[PositiveInt, Field(description="Most inputs of a request.")] = 4096
    max_values: Annotated[
        PositiveInt, Field(description="Most numbers (inputs × draws × outputs) of a reply that lists its draws.")
    ] = 1 << 20
    buckets: Annotated[
        tuple[PositiveInt, ...],
        Field(min_length=1, description="Batches are padded to these sizes; each runs once at the start."),
    ] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    sample_mode: Annotated[
        Literal["fresh", "bank"],
        Field(description="Draws for requests without a seed: fresh ones, or from a bank drawn ahead of time."),
    ] = "fresh"
    bank_sets: Annotated[PositiveInt, Field(description="Seeds in the bank of each model.")] = 8
    bank_samples: Annotated[
        PositiveInt, Field(description="Draws of each of these seeds; requests for more get fresh ones.")
    ] = 128
    bank_seconds: Annotated[PositiveFloat, Field(description="Longest time for which a seed of the bank is used.")] = (
        60.0
    )
    plan_seconds: Annotated[
        Seconds,
        Field(description="Time to measure the executions of a model's layers; plans are kept. 0: not measured."),
    ] = 5.0
    batch_work: Annotated[PositiveInt, Field(description="Rows × draws of a batch; larger requests are split.")] = (
        1 << 13
    )
    queue_work: Annotated[
        PositiveInt, Field(description="Rows × draws that a model may have under way; beyond it requests get 429.")
    ] = 1 << 17
    deadline_ms: Annotated[PositiveInt, Field(description="Default deadline of a request: queue and compute.")] = 30_000
    max_deadline_ms: Annotated[PositiveInt, Field(description="Longest deadline that a request may ask for.")] = 300_000
    stuck_seconds: Annotated[PositiveFloat, Field(description="A batch that takes longer makes /healthz say 503.")] = (
        120.0
    )

    body_bytes: Annotated[PositiveInt, Field(description="Largest body, before and after decompression.")] = 32 << 20
    body_seconds: Annotated[PositiveFloat, Field(description="Longest time for a body to arrive.")] = 30.0
    image_pixels: Annotated[
        PositiveInt, Field(description="Most pixels of a picture, checked before it is decoded.")
    ] = 1 << 24
    api_keys: Annotated[
        dict[str, Hash],
        Field(description="Name and SHA-256 of each key (`dubito key` makes one); empty: no key is needed."),
    ] = {}
    rate_per_second: Annotated[
        PositiveFloat | None,
        Field(description="Limit for each key, or for each address where there are no keys; null: none."),
    ] = None
    burst: Annotated[
        PositiveInt, Field(description="Requests that may come at once before the rate limit applies.")
    ] = 100
    cors_origins: Annotated[
        tuple[str, ...], Field(description="Origins whose pages may call the server; empty: none.")
    ] = ()
    repository_api: Annotated[bool, Field(description="Whether models can be loaded and unloaded over HTTP.")] = True

    linger_seconds: Annotated[
        Seconds, Field(description="After SIGTERM: time for which /readyz says 503 before the port closes.")
    ] = 0.5
    drain_seconds: Annotated[
        PositiveFloat, Field(description="After that: longest time to answer accepted requests.")
    ] = 30.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Field(description="Lowest level that is logged; requests are logged at info."),
    ] = "info"

    @field_validator("models", "expected", "cors_origins", "buckets", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """A list from the text of an environment variable: separated by commas, or JSON."""
        if not isinstance(value, str):
            return (value,) if isinstance(value, Path) else value
        return json.loads(value) if value.startswith("[") else [part.strip() for part in value.split(",") if part]

    @field_validator("api_keys", mode="before")
    @classmethod
    def _paired(cls, value: object) -> object:
        """Keys from the text of an environment variable: NAME=HASH separated by commas, or JSON."""
        if not isinstance(value, str):
            return value
        if value.startswith("{"):
            return json.loads(value)
        pairs = [part.strip().partition("=") for part in value.split(",") if part]
        return {name: hash_ for name, _, hash_ in pairs}

    @field_validator("buckets")
    @classmethod
    def _sorted(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))


def read_settings(file: Path | None = None, **flags: object) -> Settings:
    """Flags over environment over file over defaults; `DUBITO_SETTINGS` names the file where no flag does."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {NAMES_FILE, CLIENTS_KEY}
    for name in os.environ:
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            raise SettingError(
                f"the environment has {name}, which is no setting; `dubito serve --print-settings` lists them."
            )
    file = Path(os.environ[NAMES_FILE]) if file is None and NAMES_FILE in os.environ else file
    if file is not None and not file.is_file():
        raise SettingError(f"there is no file {file}; expected settings in TOML.")

    class WithFile(Settings):
        model_config = SettingsConfigDict(toml_file=file)

    try:
        settings = WithFile(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known_names = ", ".join(Settings.model_fields)
            raise SettingError(f"there is no setting {place!r}; there are: {known_names}.") from None
        said = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        raise SettingError(f"the setting {place} is {str(first['input'])[:100]!r}; {said}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{file} is no TOML: {error}.") from None
    return Settings.model_construct(**dict(settings))


def as_toml(settings: Settings) -> str:
    """The settings as a TOML file, with their descriptions as comments."""
    lines = []
    for name, field in Settings.model_fields.items():
        value = json.loads(settings.model_dump_json(include={name}))[name]
        lines += [f"# {field.description}"]
        if value is None:
            lines += [f"# {name} ="]
        elif isinstance(value, dict):
            pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items())
            lines += [f"{name} = {{ {pairs} }}" if pairs else f"{name} = {{}}"]
        else:
            lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}"]
    return "\n".join(lines)
