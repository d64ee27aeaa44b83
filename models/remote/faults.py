"""Why a store did not give or take a file, in one line, whatever its library raised. Secrets are never in it."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from dubito.models.errors import DubitoError
from dubito.models.remote.address import Address

CREDENTIALS = {  # where each library looks, besides its own files and the machine's role
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "https": "NETRC, or an address with a signature that has not expired",
    "hf": "HF_TOKEN, or those of `hf auth login`",
}
ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "hf": "HF_ENDPOINT"}
AUTHORITIES = {"s3": "AWS_CA_BUNDLE", "az": "REQUESTS_CA_BUNDLE"}  # else SSL_CERT_FILE
ROOTS = {"s3": "bucket", "gs": "bucket", "az": "container", "https": "host", "hf": "repository on the hub"}
# names of the exceptions that the libraries raise
TIMES_OUT = re.compile("Timeout")
UNREACHED = re.compile("ConnectorError|ConnectError|EndpointConnection|ConnectionRefused|gaierror|ServiceRequestError")
CUT = re.compile(
    "Payload|IncompleteRead|Disconnected|ConnectionReset|RemoteProtocol|ReadError|ServiceResponse|ResponseStreaming"
    "|ConnectionClosed|BrokenPipe|ConnectionAborted|HTTPClientError"
)
NO_CREDENTIALS = re.compile("NoCredentials|PartialCredentials|CredentialRetrieval|DefaultCredentials|LocalToken|Gated")
NO_ROOT = re.compile("NoSuchBucket|RepositoryNotFound|ContainerNotFound|RevisionNotFound")
INNER = ("certificate_error", "os_error", "inner_exception", "reason")  # attributes that hold another error
LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
SECRET = re.compile(r"\?[^\s'\"<>]+|(?i:(?:sig|signature|token|key|secret|password|credential)[\w-]*\s*[=:]\s*\S+)")


class RemoteError(DubitoError):
    """A remote file that cannot be read or written."""


class MissingError(RemoteError):
    """There is no such file, or no such bucket."""


class NoRootError(MissingError):
    """There is no such bucket, container or repository."""


class DeniedError(RemoteError):
    """The credentials do not allow it, or there are none."""


class ExistsError(RemoteError):
    """There is such a file already."""


@contextmanager
def explained(address: Address, verb: str = "read") -> Iterator[None]:
    """Turn what a library raises into a RemoteError."""
    try:
        yield
    except DubitoError:
        raise
    except Exception as error:
        raise explain(address, error, verb) from None


def explain(address: Address, error: BaseException, verb: str = "read") -> RemoteError:
    raised = list(_chain(error))
    names = " ".join(type(one).__name__ for one in raised)
    status = next((code for one in raised if (code := _status(one))), None)
    said = f"{address} cannot be {'read' if verb == 'read' else 'written'}: "
    scheme = address.scheme
    if certificate := next((text for one in raised if (text := _certificate(one))), None):
        variable = AUTHORITIES.get(scheme, "SSL_CERT_FILE")
        return RemoteError(
            f"{said}the server's certificate is not trusted ({certificate}); expected one that a known authority "
            f"signed. If the authority is your own, name its file in {variable}."
        )
    for one in raised:
        if isinstance(one, OSError) and one.errno in LOCAL:
            return RemoteError(f"{said}{one.strerror} here; expected room for it in the cache folder (DUBITO_CACHE).")
    if any(isinstance(one, FileExistsError) for one in raised):
        return ExistsError(f"{said}a file is there already.")
    if NO_ROOT.search(names) or "NoSuchBucket" in str(error):
        return no_root(address, verb)
    if status in (401, 403, 407) or NO_CREDENTIALS.search(names) or _denied(raised):
        came = "no permission" + (f" (HTTP {status})" if status else " (no credentials, or not enough)")
        return DeniedError(f"{said}{came}; expected credentials that allow it: {CREDENTIALS[scheme]}.")
    if TIMES_OUT.search(names) or any(isinstance(one, TimeoutError) for one in raised):
        return RemoteError(f"{said}no answer came in time; expected the store to answer. Try again later.")
    if UNREACHED.search(names):
        variable = f" and {ENDPOINTS[scheme]}" if scheme in ENDPOINTS else ""
        return RemoteError(
            f"{said}its server cannot be reached; expected one to answer. Look at the network, HTTPS_PROXY{variable}."
        )
    if status in (404, 410) or (status is None and any(isinstance(one, FileNotFoundError) for one in raised)):
        return MissingError(f"{said}there is no such file; expected {_expected(address)}. Look at the path.")
    if CUT.search(names) or "Consistency check failed" in str(error):
        return RemoteError(f"{said}the connection was cut off half-way; nothing of it is kept. Try again.")
    if status is not None:
        return RemoteError(f"{said}the store answered HTTP {status}; expected the file. Try again later.")
    text = SECRET.sub("…", " ".join(str(error).replace(address.url, str(address)).split()))[:200]
    return RemoteError(f"{said}{type(error).__name__}: {text}")


def no_root(address: Address, verb: str = "read") -> RemoteError:
    what, said = ROOTS[address.scheme], "read" if verb == "read" else "written"
    may = f", or credentials that may see it ({CREDENTIALS['hf']})" if address.scheme == "hf" else ""
    return NoRootError(f"{address} cannot be {said}: there is no {what} {address.root}; expected one{may}.")


def _expected(address: Address) -> str:
    return f"{'a file' if address.scheme == 'https' else address.below} in {address.root}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it."""
    seen: set[int] = set()
    left: list[object] = [error]
    while left:
        one = left.pop(0)
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__, *(getattr(one, name, None) for name in INNER)]


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of any of the libraries holds."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
    for name in ("status", "status_code", "code"):
        found = found or getattr(error, name, None)
    return found if isinstance(found, int) and 400 <= found < 600 else None


def _certificate(error: BaseException) -> str | None:
    if message := getattr(error, "verify_message", None):
        return str(message)
    found = re.search(r"certificate verify failed: ([^(\]]+)", str(error), re.I)
    return found[1].strip() if found else None


def _denied(raised: list[BaseException]) -> bool:
    """By the class; adlfs and gcsfs say it in words alone."""
    said = re.compile("^Forbidden|with credentials")
    return any(isinstance(one, PermissionError) or said.search(str(one)) for one in raised)
