"""A client with numpy in and out: arrays travel as binary tensors of the Open Inference Protocol, never as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import prod
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import httpx
import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from dubito.models.errors import DubitoError, InputError
from dubito.service.web.oip import DRAWS, DTYPES, INPUT, KINDS, LENGTH

TIMEOUT = 60.0  # seconds for a reply; the server's own deadline is shorter unless it is told otherwise
STATUSES = {status.value for status in HTTPStatus}
Samples = int | Literal["auto"]


class ServiceError(DubitoError):
    """The server refused or failed, in its own words; or, with status None, it could not be reached."""

    def __init__(self, detail: str, status: int | None = None, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.retry_after = status, retry_after  # seconds to stay away, where a 429 or 503 says so


@dataclass(frozen=True, eq=False)
class Prediction(Mapping[str, NDArray[Any]]):
    """Arrays by name, one row for each input: `found["probabilities"]`, `found["class"]`, `found["ood"]` ..."""

    model: str
    version: str
    seed: int  # gives the same draws again
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
    ) -> Prediction:
        """Inputs (B, ...) or one of them; uint8 is pixels where the model takes pictures. What is None, the server
        decides. `draws` adds `sample_outputs` (B, K, ...): each draw's own answer. What a closed form does not know
        (`method="probit"`: mutual information, expected entropy) is NaN."""
        options = _options(samples, seed, max_samples, tolerance, timeout_ms, method, group)
        outputs = _all_outputs(self._send("GET", f"/v2/models/{_part(model)}")) if draws else None
        body, headers = infer_body(x, options, outputs)
        return _prediction(self._send("POST", f"/v2/models/{_part(model)}/infer", content=body, headers=headers))

    def models(self) -> list[dict[str, Any]]:
        """What the server says about each model that answers."""
        return _field(self._send("GET", "/v1/models"), "models")

    def model(self, name: str) -> dict[str, Any]:
        """What the server says about one: input, labels, calibration, bytes ..."""
        return _object(self._send("GET", f"/v1/models/{_part(name)}"))

    def ready(self) -> bool:
        """Whether every expected model answers; False too where nobody is there."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """The same for coroutines: `async with AsyncClient(url) as client: await client.predict("digits", x)`"""

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
    ) -> Prediction:
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def infer_body(
    x: ArrayLike, options: Mapping[str, Any], outputs: list[str] | None = None
) -> tuple[bytes, dict[str, str]]:
    """A request of one binary tensor, and its headers; outputs None: all but the draws."""
    array = _tensor(x)
    raw = array.tobytes()
    entry = {
        "name": INPUT,
        "shape": array.shape,
        "datatype": KINDS[array.dtype],
        "parameters": {"binary_data_size": len(raw)},
    }
    told: dict[str, Any] = {"inputs": [entry], "parameters": {**options, "binary_data_output": True}}
    if outputs is not None:
        told["outputs"] = [{"name": name} for name in outputs]
    head = orjson.dumps(told)
    return head + raw, {LENGTH: str(len(head)), "content-type": "application/octet-stream"}


def _tensor(x: ArrayLike) -> NDArray[Any]:
    """Little-endian numbers; float64 goes as float32, which is what the server would make of it."""
    array = np.asarray(x)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        with np.errstate(over="ignore"):  # the server refuses infinity with a sentence that names the row
            array = array.astype(np.float32)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype not in KINDS:
        raise InputError(f"inputs hold {array.dtype}; expected numbers, such as float32, or uint8 for pixels.")
    return array


def checked(url: str) -> str:
    """The address, where it can be one."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"{url!r} is no address: {error}; expected one such as http://localhost:8000.") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise InputError(f"{url!r} is no address; expected one such as http://localhost:8000.")
    return url


def _headers(key: str | None) -> dict[str, str]:
    """Numbers hardly shrink, so packed replies are not asked for."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("the key holds characters that no key has; expected one as `dubito key` makes it.")
    return {"accept-encoding": "identity", **({} if key is None else {"x-api-key": key})}


def _options(
    samples: Samples | None,
    seed: int | None,
    max_samples: int | None,
    tolerance: float | None,
    timeout_ms: int | None,
    method: str | None,
    group: str | None,
) -> dict[str, Any]:
    given = {
        "samples": samples,
        "seed": seed,
        "max_samples": max_samples,
        "tolerance": tolerance,
        "timeout_ms": timeout_ms,
        "method": method,
        "group": group,
    }
    return {name: value for name, value in given.items() if value is not None}


def _part(name: str) -> str:
    return quote(name, safe="")


def _all_outputs(metadata: httpx.Response) -> list[str]:
    """Whoever names one output must name all of them."""
    return [*(output["name"] for output in _field(metadata, "outputs")), DRAWS]


def _prediction(response: httpx.Response) -> Prediction:
    raw = response.content
    try:
        n = int(response.headers.get(LENGTH, len(raw)))
        told, rest = orjson.loads(raw[:n]), memoryview(raw)[n:]
        outputs = {}
        for entry in told["outputs"]:
            outputs[entry["name"]], rest = _array(entry, rest)
        seed = int(told["parameters"]["seed"])
        return Prediction(told["model_name"], told["model_version"], seed, outputs)
    except (KeyError, ValueError, TypeError, AttributeError):
        raise _foreign(response) from None


def _array(entry: dict[str, Any], rest: memoryview) -> tuple[NDArray[Any], memoryview]:
    """A copy, which its owner may change."""
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
        told = orjson.loads(response.content)
        detail = told["error"] if "error" in told else told["detail"]
    except (KeyError, ValueError, TypeError):
        pass  # a proxy's page, perhaps
    wait = response.headers.get("retry-after", "")
    raise ServiceError(str(detail), status, float(wait) if wait.isdecimal() else None)


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        told = orjson.loads(response.content)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise _foreign(response)
    return told


def _field(response: httpx.Response, name: str) -> list[dict[str, Any]]:
    found = _object(response).get(name)
    if not isinstance(found, list):
        raise _foreign(response)
    return found


def _foreign(response: httpx.Response) -> ServiceError:
    return ServiceError(f"the reply of {response.url} cannot be read; is a dubito server there?", response.status_code)


def _unreached(url: httpx.URL, error: httpx.HTTPError) -> ServiceError:
    if isinstance(error, httpx.TimeoutException):
        return ServiceError(f"{url} did not answer in time ({type(error).__name__}); is the server overloaded?")
    return ServiceError(f"cannot ask {url}: {str(error) or type(error).__name__}; is the server running there?")
