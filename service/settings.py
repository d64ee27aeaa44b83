"""Settings: flags, then the environment (`DUBITO_…`), then a TOML file; each is checked before anything starts."""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer, PositiveFloat, PositiveInt, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from dubito.models import zoo
from dubito.models.errors import DubitoError
from dubito.models.remote.address import Place, place_of
from dubito.models.remote.cache import VARIABLE

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
PREFIX, NAMES_FILE = "DUBITO_", "DUBITO_SETTINGS"
CLIENTS_KEY = "DUBITO_KEY"  # read by `dubito bench http`, and no setting of the server
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]


class SettingError(DubitoError):
    """An unknown setting, or a value that is not valid."""


class Settings(BaseSettings):
    """One field per setting; `dubito serve --print-settings` shows them with their values."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, enable_decoding=False)

    models: tuple[Annotated[Place, PlainSerializer(str)], ...] = Field(
        default=(),
        description="Artifacts, or model repositories: root/name/version/model.safetensors. Paths, or addresses "
        "(s3://, gs://, az://, https://, hf://).",
    )
    networks: tuple[str, ...] = Field(
        default=(),
        description="Classes or functions (package.module:factory) that may be called to make the networks of "
        "artifacts that name them. Their code runs.",
    )
    expected: tuple[str, ...] = Field(
        default=(), description="Models that must answer before the server is ready; empty: all that it could load."
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    workers: PositiveInt = Field(
        default=1,
        le=256,
        description="Processes that serve the port, each with its own copy of every model; for CPUs. Limits on "
        "connections, requests and bytes are divided among them.",
    )
    grpc_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for gRPC, which needs the extra grpc; 0 takes a free one, null: no gRPC.",
    )
    grpc_certificate: Path | None = Field(
        default=None, description="TLS of the gRPC port: file of the certificate chain, in PEM; null: no TLS."
    )
    grpc_key: Path | None = Field(default=None, description="TLS of the gRPC port: file of the private key, in PEM.")
    grpc_compression: bool = Field(
        default=False,
        description="Take compressed gRPC messages, which are unpacked to `body_bytes` before a key is checked.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where models run.")
    devices: tuple[str, ...] = Field(
        default=(),
        description="Devices of one kind, each with a copy of every model and all fed from one queue: cuda:0, cuda:1, "
        "or all for every GPU. Empty: the one of `device`.",
    )
    placement: dict[str, tuple[str, ...]] = Field(
        default={},
        description="Models that run on some of `devices` only: their names, and those devices. Others run on all.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of activations; auto: bfloat16 on a GPU that has it natively, else float32. "
        "Where the device computes wrongly in it, float32 is taken.",
    )

    memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Limit on the memory of models, draws and passes; larger passes are split. "
        "0: 80 % of a GPU's memory, no limit on a CPU.",
    )

    samples: int = Field(default=20, ge=0, description="Default number of posterior draws K.")
    max_samples: PositiveInt = Field(default=1024, description="Most draws that a request may ask for.")
    max_requests: PositiveInt = Field(default=2048, description="Predictions under way at once; more get 429.")
    max_rows: PositiveInt = Field(default=4096, description="Most inputs of a request.")
    max_values: PositiveInt = Field(
        default=1 << 20, description="Most numbers (inputs × draws × outputs) of a reply that lists its draws."
    )
    buckets: tuple[PositiveInt, ...] = Field(
        default=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
        min_length=1,
        description="Batches are padded to these sizes; each runs once at the start.",
    )
    sample_mode: Literal["auto", "fresh", "bank"] = Field(
        default="auto",
        description="Draws for requests without a seed: fresh ones, or from a bank drawn ahead of time; auto: a bank "
        "of `samples` draws for models that take long to draw (gi), fresh ones for others.",
    )
    bank_sets: PositiveInt = Field(default=8, description="Seeds in the bank of each model.")
    bank_samples: PositiveInt = Field(
        default=128, description="Draws of each of these seeds; requests for more get fresh ones."
    )
    bank_seconds: PositiveFloat = Field(default=60.0, description="Longest time for which a seed of the bank is used.")
    plan_seconds: Seconds = Field(
        default=5.0, description="Time to measure the executions of a model's layers; plans are kept. 0: not measured."
    )
    batch_work: PositiveInt = Field(default=1 << 13, description="Rows × draws of a batch; larger requests are split.")
    queue_work: PositiveInt = Field(
        default=1 << 18, description="Rows × draws that a model may have under way; beyond it requests get 429."
    )
    request_work: PositiveInt = Field(
        default=1 << 17,
        description="Rows × draws of a request, `auto` with its `max_samples`; for more it gets 413.",
    )
    slice_ms: PositiveFloat = Field(
        default=20.0,
        description="Time for which a batch uses the device while others wait: longer requests take turns with them.",
    )
    deadline_ms: PositiveInt = Field(default=30_000, description="Default deadline of a request: queue and compute.")
    max_deadline_ms: PositiveInt = Field(default=300_000, description="Longest deadline that a request may ask for.")
    stuck_seconds: PositiveFloat = Field(default=120.0, description="A batch that takes longer makes /healthz say 503.")

    body_bytes: PositiveInt = Field(default=32 << 20, description="Largest body, before and after decompression.")
    body_seconds: PositiveFloat = Field(default=30.0, description="Longest time for a body to arrive.")
    input_bytes: PositiveInt = Field(
        default=1 << 28, description="Largest inputs of a request once decoded, as float32: fewer rows of large inputs."
    )
    held_bytes: PositiveInt = Field(
        default=1 << 29,
        description="Bodies and decoded inputs of the requests under way, in all; beyond it requests get 429.",
    )
    image_pixels: PositiveInt = Field(
        default=1 << 24, description="Most pixels of a picture, checked before it is decoded."
    )
    image_scans: PositiveInt = Field(default=32, description="Most scans of a JPEG; progressive ones have about ten.")
    decode_seconds: PositiveFloat = Field(
        default=5.0, description="Longest time to decode the pictures, form or long JSON of a request."
    )
    decode_processes: PositiveInt = Field(
        default=2, description="Processes that decode; the first one takes only what is decoded quickly."
    )
    decode_bytes: int = Field(
        default=1 << 30, ge=0, description="Address space of each of these processes; 0: no limit of its own."
    )

    max_connections: PositiveInt = Field(
        default=2048,
        description="Open connections, fewer where the process may open fewer files. For one more, the connection is "
        "closed that has waited longest for its client.",
    )
    connections_per_address: PositiveInt = Field(
        default=768, description="Of these, from one address (IPv6: from one /64), unless it is a trusted proxy."
    )
    header_bytes: PositiveInt = Field(default=32 << 10, description="Largest head of a request: its lines in all.")
    header_lines: PositiveInt = Field(default=100, description="Most header fields of a request.")
    header_seconds: PositiveFloat = Field(
        default=10.0, description="Longest time for the head of a request to arrive, and to begin on a new connection."
    )
    idle_seconds: PositiveFloat = Field(
        default=65.0, description="Longest time that a connection stays open between requests."
    )
    write_seconds: PositiveFloat = Field(
        default=30.0, description="Longest time for a client to take the next 64 KiB of a reply."
    )
    unsent_bytes: PositiveInt = Field(
        default=256 << 20,
        description="Replies that wait for clients to take them, in all; beyond it the slowest connection is closed.",
    )
    pipelined: PositiveInt = Field(
        default=64, description="Requests of a connection that may wait behind the one being answered."
    )
    trusted_proxies: tuple[str, ...] = Field(
        default=(),
        description="Addresses or networks of proxies whose X-Forwarded-For names the client; others' is ignored.",
    )

    api_keys: dict[str, Hash] = Field(
        default={}, description="Name and SHA-256 of each key (`dubito key` makes one); empty: no key is needed."
    )
    rate_per_second: PositiveFloat | None = Field(
        default=None, description="Limit for each key, or for each address where there are no keys; null: none."
    )
    burst: PositiveInt = Field(default=100, description="Requests that may come at once before the rate limit applies.")
    cors_origins: tuple[str, ...] = Field(
        default=(), description="Origins whose pages may call the server; empty: none."
    )
    repository_api: bool | None = Field(
        default=None,
        description="Whether models can be loaded and unloaded over HTTP; null: only where there are API keys.",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="Names in the Host header under which models can be loaded and unloaded without a key, besides "
        "localhost and IP addresses.",
    )

    linger_seconds: Seconds = Field(
        default=0.5, description="After SIGTERM: time for which /readyz says 503 before the port closes."
    )
    drain_seconds: PositiveFloat = Field(
        default=30.0, description="After that: longest time to answer accepted requests."
    )
    traces: bool = Field(
        default=False,
        description="Record traces of predictions, which needs the extra otel; OTEL_... variables say where they go.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged; requests are logged at info."
    )
    log_bytes: PositiveInt = Field(
        default=1 << 20, description="Log lines that wait to be written; beyond it lines are dropped and counted."
    )

    @field_validator("models", mode="before")
    @classmethod
    def _placed(cls, value: object) -> object:
        """Addresses and models of the zoo among the texts. The last validator runs first, so they are listed."""
        if not isinstance(value, list | tuple):
            return value
        return [place_of(one) if isinstance(one, str) else one for one in value]

    @field_validator(
        "models",
        "networks",
        "expected",
        "cors_origins",
        "buckets",
        "trusted_proxies",
        "allowed_hosts",
        mode="before",
    )
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

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            ip_network(name)  # raises ValueError, which says what is wrong
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _lower(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in value)

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


def settings_of_command(file: Path | None, flags: Mapping[str, object], changes: Sequence[str]) -> Settings:
    """The settings of a command with these flags, None where one was not given, and words of `--set`; without any
    models, those that dubito ships."""
    from dubito.models.embedded import NAMES, embedded

    known = {key: value for key, value in flags.items() if value is not None}
    for word in changes:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise SettingError(f"--set {word!r}; expected KEY=VALUE, such as samples=64.")
        known[key] = value
    settings = read_settings(file, **known)
    if settings.models:
        return settings
    return settings.model_copy(update={"models": tuple(embedded(name) for name in NAMES)})


def read_settings(file: Path | None = None, **flags: object) -> Settings:
    """Flags over environment over file over defaults; `DUBITO_SETTINGS` names the file where no flag does."""
    of_others = {NAMES_FILE, CLIENTS_KEY, VARIABLE, zoo.VARIABLE}
    known = {PREFIX + name.upper() for name in Settings.model_fields} | of_others
    for name in os.environ:
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            raise SettingError(
                f"the environment has {name}, which is no setting; `dubito serve --print-settings` lists them."
            )
    file = Path(os.environ[NAMES_FILE]) if file is None and NAMES_FILE in os.environ else file
    if file is not None and not file.is_file():
        raise SettingError(f"there is no file {file}; expected settings in TOML.")

    kind = Settings
    if file is not None:

        class WithFile(Settings):
            model_config = SettingsConfigDict(toml_file=file)

        kind = WithFile
    try:
        settings = kind(**flags)  # type: ignore[arg-type]
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
