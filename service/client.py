"""A client that takes and returns numpy arrays, sent as binary tensors of the Open Inference Protocol."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import prod
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx
import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from dubito.models.errors import DubitoError, InputError
from dubito.service.web.oip import DRAWS, DTYPES, INPUT, KINDS, LENGTH, PARAMETERS

TIMEOUT = 60.0  # seconds for a reply; the server's default deadline is shorter
STATUSES = {status.value for status in HTTPStatus}
Samples = int | Literal["auto"]


class ServiceError(DubitoError):
    """The server answered with an error, whose text this is; with status None, it could not be reached."""

    def __init__(self, detail: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.retry_after = status, retry_after  # seconds, from the Retry-After of a 429 or 503


@dataclass(frozen=True, eq=False)
class PredictReply(Mapping[str, NDArray[Any]]):
    """Arrays by name, one row per input: `reply["probabilities"]`, `reply["class"]`, `reply["ood"]` ..."""

    model: str
    version: str
    seed: int  # a request with this seed gets the same draws
    outputs: Mapping[str, NDArray[Any]]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)


class Client:
    """`with Client("http://localhost:8000") as client: client.predict("digits", x)["probabilities"]`"""

    def __init__(self, url: str, key: str | None = None, timeout: float = TIMEOUT) -> None:
        self._http = httpx.Client(base_url=checked(url), headers=_headers(key), timeout=timeout)

    def predict(
        self,
        model: str,
        x: ArrayLike,
        *,
        samples: Samples | None = None,
        seed: int | None = None,
        max_samples: int | None = None,
        tolerance: float | None = None,
        timeout_ms: int | None = None,
        method: Literal["probit", "sampling"] | None = None,
        group: str | None = None,
        draws: bool = False,
    ) -> PredictReply:
        """Predictions for inputs (B, ...), or for one input without the batch axis; uint8 is pixels if the model takes
        pictures. Options that are None get the server's defaults. `draws` adds `sample_outputs` (B, K, ...), each
        draw's outputs. With `method="probit"`, mutual information and expected entropy are NaN."""
        options = _options(samples, seed, max_samples, tolerance, timeout_ms, method, group)
        outputs = _all_outputs(self._send("GET", f"/v2/models/{_part(model)}")) if draws else None
        body, headers = infer_body(x, options, outputs)
        return _prediction(self._send("POST", f"/v2/models/{_part(model)}/infer", content=body, headers=headers))

    def models(self) -> list[dict[str, Any]]:
        """Descriptions of the served models."""
        return _field(self._send("GET", "/v1/models"), "models")

    def model(self, name: str) -> dict[str, Any]:
        """Description of one model: input, labels, calibration, bytes ..."""
        return _object(self._send("GET", f"/v1/models/{_part(name)}"))

    def ready(self) -> bool:
        """Whether every expected model answers; False if the server cannot be reached."""
        try:
            return self._send("GET", "/readyz").is_success
        except ServiceError:
            return False

    def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            return _good(self._http.request(method, path, **what))
        except httpx.HTTPError as error:
            raise _unreached(self._http.base_url, error) from error

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient:
    """`Client` for coroutines: `async with AsyncClient(url) as client: await client.predict("digits", x)`"""

    def __init__(self, url: str, key: str | None = None, timeout: float = TIMEOUT) -> None:
        self._http = httpx.AsyncClient(base_url=checked(url), headers=_headers(key), timeout=timeout)

    async def predict(
        self,
        model: str,
        x: ArrayLike,
        *,
        samples: Samples | None = None,
        seed: int | None = None,
        max_samples: int | None = None,
        tolerance: float | None = None,
        timeout_ms: int | None = None,
        method: Literal["probit", "sampling"] | None = None,
        group: str | None = None,
        draws: bool = False,
    ) -> PredictReply:
        """As `Client.predict`."""
        options = _options(samples, seed, max_samples, tolerance, timeout_ms, method, group)
        outputs = _all_outputs(await self._send("GET", f"/v2/models/{_part(model)}")) if draws else None
        body, headers = infer_body(x, options, outputs)
        return _prediction(await self._send("POST", f"/v2/models/{_part(model)}/infer", content=body, headers=headers))

    async def models(self) -> list[dict[str, Any]]:
        return _field(await self._send("GET", "/v1/models"), "models")

    async def model(self, name: str) -> dict[str, Any]:
        return _object(await self._send("GET", f"/v1/models/{_part(name)}"))

    async def ready(self) -> bool:
        try:
            return (await self._send("GET", "/readyz")).is_success
        except ServiceError:
            return False

    async def _send(self, method: str, path: str, **what: Any) -> httpx.Response:
        try:
            return _good(await self._http.request(method, path, **what))
        except httpx.HTTPError as error:
            raise _unreached(self._http.base_url, error) from error

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def infer_body(
    x: ArrayLike, options: Mapping[str, Any], outputs: list[str] | None = None
) -> tuple[bytes, dict[str, str]]:
    """Body and headers of a request with one binary tensor; outputs None: all but the draws."""
    array = _tensor(x)
    raw = array.tobytes()
    entry = {
        "name": INPUT,
        "shape": array.shape,
        "datatype": KINDS[array.dtype],
        "parameters": {"binary_data_size": len(raw)},
    }
    fields: dict[str, Any] = {"inputs": [entry], "parameters": {**options, "binary_data_output": True}}
    if outputs is not None:
        fields["outputs"] = [{"name": name} for name in outputs]
    head = orjson.dumps(fields)
    return head + raw, {LENGTH: str(len(head)), "content-type": "application/octet-stream"}


def _tensor(x: ArrayLike) -> NDArray[Any]:
    """The input as little-endian numbers; float64 as float32, to which the server would convert it."""
    array = np.asarray(x)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):  # the server refuses infinity, and names the row
            array = array.astype(np.float32)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in KINDS:
        raise InputError(f"inputs hold {array.dtype}; expected numbers, such as float32, or uint8 for pixels.")
    return array


def checked(url: str) -> str:
    """The URL, if it is valid; raises InputError otherwise."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"{url!r} is no address: {error}; expected one such as http://localhost:8000.") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise InputError(f"{url!r} is no address; expected one such as http://localhost:8000.")
    return url


def _headers(key: str | None) -> dict[str, str]:
    """Headers of every request; compression is refused, since floats hardly compress."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("the key holds characters that no key has; expected one as `dubito key` makes it.")
    return {"accept-encoding": "identity", **({} if key is None else {"x-api-key": key})}


def _options(*values: object) -> dict[str, Any]:
    """The options that are not None, by name; `values` in the order of `PARAMETERS`."""
    return {name: value for name, value in zip(PARAMETERS, values, strict=True) if value is not None}


def _part(name: str) -> str:
    return quote(name, safe="")


def _all_outputs(metadata: httpx.Response) -> list[str]:
    """Names of all outputs and of the draws: a request that names one output gets only those named."""
    return [*(output["name"] for output in _field(metadata, "outputs")), DRAWS]


def _prediction(response: httpx.Response) -> PredictReply:
    raw = response.content
    try:
        n = int(response.headers.get(LENGTH, len(raw)))
        fields, rest = orjson.loads(raw[:n]), memoryview(raw)[n:]
        outputs = {}
        for entry in fields["outputs"]:
            outputs[entry["name"]], rest = _array(entry, rest)
        seed = int(fields["parameters"]["seed"])
        return PredictReply(fields["model_name"], fields["model_version"], seed, outputs)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise _unreadable(response) from None


def _array(entry: dict[str, Any], rest: memoryview) -> tuple[NDArray[Any], memoryview]:
    """One output as a writable array, and the rest of the buffer."""
    dtype, shape = DTYPES[entry["datatype"]], entry["shape"]
    if "data" in entry:
        return np.array(entry["data"], dtype).reshape(shape), rest
    size = prod(shape) * dtype.itemsize
    return np.frombuffer(rest[:size], dtype).reshape(shape).copy(), rest[size:]


def _good(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    status = response.status_code
    phrase = HTTPStatus(status).phrase if status in STATUSES else "no known status"
    detail = f"the server answered {status} ({phrase})."
    try:
        fields = orjson.loads(response.content)
        detail = fields["error"] if "error" in fields else fields["detail"]
    except (KeyError, ValueError, TypeError):
        pass  # not our JSON: an error page of a proxy, for example
    wait = response.headers.get("retry-after", "")
    raise ServiceError(str(detail), status, float(wait) if wait.isdecimal() else None)


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        value = orjson.loads(response.content)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise _unreadable(response)
    return value


def _field(response: httpx.Response, name: str) -> list[dict[str, Any]]:
    values = _object(response).get(name)
    if not isinstance(values, list):
        raise _unreadable(response)
    return values


def _unreadable(response: httpx.Response) -> ServiceError:
    return ServiceError(f"the reply of {response.url} cannot be read; is a dubito server there?", response.status_code)


def _unreached(url: httpx.URL, error: httpx.HTTPError) -> ServiceError:
    if isinstance(error, httpx.TimeoutException):
        return ServiceError(f"{url} did not answer in time ({type(error).__name__}); is the server overloaded?")
    return ServiceError(f"cannot ask {url}: {str(error) or type(error).__name__}; is the server running there?")
