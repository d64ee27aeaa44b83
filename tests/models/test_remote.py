"""Addresses in place of paths, against an emulator of each store: downloads are verified, cached and whole or not at
all, and every way to fail has one line of its own."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from dubito.models import load
from dubito.models.embedded import embedded
from dubito.models.errors import DubitoError
from dubito.models.remote.address import Address, place_of
from dubito.models.remote.cache import fetched
from dubito.models.remote.faults import RemoteError, explain
from tests import forked, stores
from tests.hub import Hub, hub

pytestmark = stores.OPEN
DIGITS = embedded("digits").read_bytes()
SHA256 = sha256(DIGITS).hexdigest()
WHOLE = 1 << 40  # bytes that a relay lets pass: all
KEY = "models/digits/1/model.safetensors"


@dataclass(frozen=True)
class Store:
    """A store that holds `bucket`, and how a command finds it."""

    scheme: str
    port: int
    environment: Callable[[int], dict[str, str]]  # for a port, which may be a relay's
    put: Callable[[str, bytes], None]  # a path in the bucket
    base: str = "bucket"
    certificate: Path | None = None  # of a server that stands in for it

    def address(self, path: str, port: int | None = None) -> str:
        if self.scheme == "https":
            return f"https://{stores.HOST}:{port or self.port}/{path}"
        return f"{self.scheme}://{self.base}/{path}"


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    with stores.s3() as port:
        yield port


def open_store(scheme: str, stack: ExitStack, folder: Path, request: pytest.FixtureRequest) -> Store:
    if scheme in ("s3", "gs", "az"):
        emulator = getattr(stores, scheme)
        port = request.getfixturevalue("moto") if scheme == "s3" else stack.enter_context(emulator())
        fs = stores.file_system(scheme, port)
        environment = getattr(stores, f"{scheme}_environment")
        return Store(scheme, port, environment, lambda path, content: fs.pipe_file(f"bucket/{path}", content))
    if scheme == "https":
        authority, server = stores.make_certificate(folder)
        site = stack.enter_context(stores.web(server))

        def keep(path: str, content: bytes) -> None:
            site.files[f"/{path}"] = content

        trusting = {"SSL_CERT_FILE": str(authority)}
        return Store(scheme, site.port, lambda _: trusting, keep, "", server)
    state = stack.enter_context(hub())
    state.repositories["owner/digits"] = {}

    def commit(path: str, content: bytes) -> None:
        state.repositories["owner/digits"][path] = content

    return Store(
        scheme,
        state.port,
        lambda port: state.environment() | {"HF_ENDPOINT": f"http://{stores.HOST}:{port}"},
        commit,
        "owner/digits",
    )


SLOW = [pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("gs", "az")]  # their emulators and libraries are


@pytest.fixture(scope="module", params=["s3", "https", "hf", *SLOW])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with ExitStack() as stack:
        yield open_store(request.param, stack, tmp_path_factory.mktemp("store"), request)


# what happens to a download is the same for every store: one is quick, the others are slow
downloads = pytest.mark.parametrize(
    "store",
    ["https", *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("s3", "hf", "gs", "az"))],
    indirect=True,
)


def run(store: Store, cache: Path, *words: str, port: int | None = None, **environment: str) -> forked.Ended:
    known = store.environment(port or store.port) | {"DUBITO_CACHE": str(cache)}
    return forked.run(*words, environment=known | environment)


def error_of(ended: forked.Ended) -> str:
    """The one line that a command ends with."""
    assert ended.returncode == 2, (ended.stdout, ended.stderr)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    for secret in ("never-shown", stores.AZURITE_KEY, "hf_never_shown", "s3cr3t"):
        assert secret not in line
    return line


def copies(cache: Path) -> list[str]:
    """Names of what the cache takes for files, and what is left of downloads."""
    return sorted(path.name for folder in ("files", "parts") for path in (cache / folder).glob("*"))


# what works


def test_an_artifact_is_read_once_and_again_when_it_changes(store: Store, tmp_path: Path) -> None:
    """By the bytes that pass a relay: an unchanged object is not fetched again."""
    store.put(KEY, DIGITS)
    with stores.relay(store.port, WHOLE) as relay:
        address = store.address(KEY, relay.port)
        first = run(store, tmp_path, "inspect", address, "--json", port=relay.port)
        assert first.returncode == 0, first.stderr
        assert json.loads(first.stdout)["bytes"] == len(DIGITS)
        assert copies(tmp_path) == [f"{SHA256}.safetensors"]
        assert relay.total > len(DIGITS)
        before = relay.total
        second = run(store, tmp_path, "inspect", address, "--json", port=relay.port)
        assert second.stdout == first.stdout
        assert relay.total - before < len(DIGITS) // 2
        other = embedded("clothes").read_bytes()
        store.put(KEY, other)
        third = run(store, tmp_path, "inspect", address, "--json", port=relay.port)
        assert json.loads(third.stdout)["bytes"] == len(other)


@downloads
def test_the_progress_of_a_large_download_is_shown(store: Store, tmp_path: Path) -> None:
    """Lines on stderr, which is no terminal here."""
    store.put("large.bin", bytes(1 << (26 if store.scheme == "az" else 24)))  # Azure's library fetches 32 MB at once
    code = "import sys, dubito.models.terminal as t; t.BETWEEN = 0\n"
    code += "from dubito.models.remote.cache import fetched; fetched(sys.argv[1])"
    known = store.environment(store.port) | {"DUBITO_CACHE": str(tmp_path)}
    ended = forked.run(store.address("large.bin"), code=code, environment=known)
    assert ended.returncode == 0, ended.stderr
    assert re.match(r"downloading large\.bin: \d+%, .* left", ended.stderr), ended.stderr


# what fails


def test_no_such_file(store: Store, tmp_path: Path) -> None:
    line = error_of(run(store, tmp_path, "inspect", store.address("models/none.safetensors")))
    assert "there is no such file; expected" in line
    assert copies(tmp_path) == []


def test_no_such_bucket(store: Store, tmp_path: Path) -> None:
    if store.scheme == "https":
        pytest.skip("a host that is not there is another test")
    owner = "owner/" if store.scheme == "hf" else ""
    line = error_of(run(store, tmp_path, "inspect", f"{store.scheme}://{owner}nowhere/x.safetensors"))
    assert re.search(rf"there is no (bucket|container|repository on the hub) {owner}nowhere; expected one", line)


def test_a_wrong_hash(store: Store, tmp_path: Path) -> None:
    """In the address, and in the file beside it, which the hub does not have."""
    store.put(KEY, DIGITS)
    line = error_of(run(store, tmp_path, "inspect", f"{store.address(KEY)}#sha256={'0' * 64}"))
    assert f"its SHA-256 is {SHA256}; the address says {'0' * 64}" in line
    if store.scheme != "hf":
        store.put("beside/model.safetensors", DIGITS)
        store.put("beside/model.safetensors.sha256", f"{'1' * 64}  model.safetensors\n".encode())
        line = error_of(run(store, tmp_path, "inspect", store.address("beside/model.safetensors")))
        assert f"its SHA-256 is {SHA256}; the file beside it says {'1' * 64}" in line
    assert copies(tmp_path) == []


@pytest.mark.parametrize(  # the hub's library tries again for half a minute, Google's for minutes
    "store", ["s3", "https", pytest.param("hf", marks=pytest.mark.slow), *SLOW], indirect=True
)
def test_a_download_that_is_cut_off_leaves_nothing(store: Store, tmp_path: Path) -> None:
    store.put(KEY, DIGITS * 20)  # larger than what answers of a store take beside it
    with stores.relay(store.port, len(DIGITS)) as relay:
        ended = run(store, tmp_path, "inspect", store.address(KEY, relay.port), port=relay.port)
    line = error_of(ended)
    assert "was cut off" in line, line
    assert copies(tmp_path) == []


@downloads
def test_a_download_that_is_killed_leaves_nothing_that_is_taken_for_a_model(store: Store, tmp_path: Path) -> None:
    """kill -9 half-way. The next one removes what is left, and fetches the whole file."""
    store.put(KEY, DIGITS * 20)
    cache, logs = tmp_path / "cache", tmp_path / "logs"
    logs.mkdir()
    with stores.relay(store.port, 10 * len(DIGITS), stalls=True) as relay:
        known = store.environment(relay.port) | {"DUBITO_CACHE": str(cache)}
        begun = forked.begin(forked.DUBITO, ["inspect", store.address(KEY, relay.port)], tmp_path, logs, known)
        end = time.monotonic() + 60
        while relay.passed < relay.after:
            assert begun.runs, begun.end()
            assert time.monotonic() < end, relay
            time.sleep(0.01)
        begun.send(signal.SIGKILL)
        assert begun.end().returncode == -signal.SIGKILL
        left = copies(cache)
        assert [name for name in left if not name.endswith(".part")] == []
        assert not list((cache / "addresses").glob("*.json"))
    store.put(KEY, DIGITS)
    assert run(store, cache, "inspect", store.address(KEY), "--json").returncode == 0
    assert copies(cache) == [f"{SHA256}.safetensors"]


def test_no_permission(store: Store, tmp_path: Path) -> None:
    """By a server that answers so to everything, as any store may."""
    with stores.web(store.certificate) as site:
        site.everything = 403
        line = error_of(run(store, tmp_path, "inspect", store.address(KEY, site.port), port=site.port))
    assert re.search(r"no permission \((HTTP 403|no credentials, or not enough)\); expected credentials that", line)
    assert copies(tmp_path) == []


# one store at a time


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[stores.Web, dict[str, str]]]:
    """A server with TLS, and the environment that trusts it."""
    authority, server = stores.make_certificate(tmp_path_factory.mktemp("tls"))
    with stores.web(server) as one:
        one.files["/digits.safetensors"] = DIGITS
        yield one, {"SSL_CERT_FILE": str(authority)}


Site = tuple[stores.Web, dict[str, str]]


def test_a_certificate_that_is_not_trusted(site: Site, tmp_path: Path) -> None:
    address = f"https://{stores.HOST}:{site[0].port}/digits.safetensors"
    line = error_of(forked.run("inspect", address, environment={"DUBITO_CACHE": str(tmp_path)}))
    assert "the server's certificate is not trusted (unable to get local issuer certificate); expected" in line
    assert line.endswith("name its file in SSL_CERT_FILE.")


def test_no_secret_of_an_address_is_shown(site: Site, tmp_path: Path) -> None:
    """Of one with a signature: not in a result, an error, or the cache."""
    web, trusting = site
    known = trusting | {"DUBITO_CACHE": str(tmp_path)}
    address = f"https://{stores.HOST}:{web.port}/digits.safetensors?X-Amz-Signature=s3cr3t"
    ended = forked.run("inspect", address, "--json", environment=known)
    assert ended.returncode == 0, ended.stderr
    assert ("GET", "/digits.safetensors?X-Amz-Signature=s3cr3t") in web.seen
    web.status["/gone.safetensors"] = 403
    line = error_of(forked.run("inspect", address.replace("digits", "gone"), environment=known))
    assert "/gone.safetensors?… cannot be read: no permission (HTTP 403)" in line
    assert all("s3cr3t" not in path.read_text() for path in (tmp_path / "addresses").iterdir())
    assert "s3cr3t" not in repr(place_of(address))


def test_a_size_that_is_not_stated(site: Site, tmp_path: Path) -> None:
    """It is read to its end, and, with nothing to compare, again the next time."""
    web, trusting = site
    web.files["/open.safetensors"], web.length = DIGITS, False
    try:
        for count in (1, 2):
            address = f"https://{stores.HOST}:{web.port}/open.safetensors"
            ended = forked.run("inspect", address, environment=trusting | {"DUBITO_CACHE": str(tmp_path)})
            assert ended.returncode == 0, ended.stderr
            assert web.downloads("/open.safetensors") >= count
    finally:
        web.length = True
    assert copies(tmp_path) == [f"{SHA256}.safetensors"]


def test_a_file_that_is_no_artifact_is_named_by_its_address(site: Site, tmp_path: Path) -> None:
    web, trusting = site
    web.files["/page.safetensors"] = b"<html>a page that every path answers with</html>" * 10
    address = f"https://{stores.HOST}:{web.port}/page.safetensors"
    line = error_of(forked.run("inspect", address, environment=trusting | {"DUBITO_CACHE": str(tmp_path)}))
    assert line.startswith(f"error: {address}: it claims a header of")


@pytest.mark.parametrize("scheme", ["s3", "https", "hf"])
def test_no_server(scheme: str, tmp_path: Path) -> None:
    check_unreached(scheme, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_no_server_of_libraries_that_try_for_a_minute(scheme: str, tmp_path: Path) -> None:
    check_unreached(scheme, tmp_path)


def check_unreached(scheme: str, cache: Path) -> None:
    port = stores.free_port()
    known = {
        "s3": stores.s3_environment(port),
        "gs": stores.gs_environment(port),
        "az": stores.az_environment(port),
        "hf": Hub(port=port).environment(),
        "https": {},
    }[scheme]
    place = f"{stores.HOST}:{port}" if scheme == "https" else "owner"
    address = f"{scheme}://{place}/digits/model.safetensors"
    line = error_of(forked.run("inspect", address, environment=known | {"DUBITO_CACHE": str(cache)}))
    assert "its server cannot be reached; expected one to answer" in line


@pytest.mark.parametrize("scheme", ["s3", SLOW[1]])
def test_no_credentials(scheme: str, tmp_path: Path) -> None:
    known = {"DUBITO_CACHE": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(tmp_path)}
    line = error_of(forked.run("inspect", f"{scheme}://bucket/model.safetensors", environment=known))
    assert "no permission (no credentials, or not enough); expected credentials that allow it: A" in line


def test_keys_that_s3_does_not_know(moto: int, tmp_path: Path) -> None:
    """Moto checks keys once it is told to."""
    known = stores.s3_environment(moto) | {"DUBITO_CACHE": str(tmp_path)}
    httpx.post(f"http://{stores.HOST}:{moto}/moto-api/reset-auth", content=b"0").raise_for_status()
    try:
        line = error_of(forked.run("inspect", "s3://bucket/model.safetensors", environment=known))
    finally:
        httpx.post(f"http://{stores.HOST}:{moto}/moto-api/reset-auth", content=b"inf").raise_for_status()
    assert "no permission (HTTP 403); expected credentials that allow it: AWS_ACCESS_KEY_ID" in line


def test_a_repository_of_the_hub_stands_for_its_model(tmp_path: Path) -> None:
    """Which another token than its owner's does not see, and whose hash the hub states."""
    with hub() as state:
        state.repositories["owner/secret"] = {"model.safetensors": DIGITS}
        state.private.add("owner/secret")
        known = state.environment() | {"DUBITO_CACHE": str(tmp_path)}
        ended = forked.run("inspect", "hf://owner/secret", "--json", environment=known)
        assert ended.returncode == 0, ended.stderr
        line = error_of(forked.run("inspect", "hf://owner/secret", environment=known | {"HF_TOKEN": "hf_wrong"}))
        assert "there is no repository on the hub owner/secret; expected one, or credentials that may see it" in line
        state.repositories["owner/secret"]["other.safetensors"] = DIGITS
        state.wrong["other.safetensors"] = DIGITS[:-1] + b"!"
        line = error_of(forked.run("inspect", "hf://owner/secret/other.safetensors", environment=known))
        assert f"; the hub says {SHA256}" in line


# the cache


def test_processes_that_share_a_cache_fetch_a_file_once(site: Site, tmp_path: Path) -> None:
    """The second one comes while the first one downloads, and waits for it."""
    web, trusting = site
    web.files["/shared.safetensors"] = DIGITS
    address, cache = f"https://{stores.HOST}:{web.port}/shared.safetensors", tmp_path / "cache"
    begun = []
    web.open.clear()
    try:
        for i in range(2):
            logs = tmp_path / str(i)
            logs.mkdir()
            known = trusting | {"DUBITO_CACHE": str(cache)}
            begun.append(forked.begin(forked.DUBITO, ["inspect", address, "--json"], logs, logs, known))
            end = time.monotonic() + 60
            while web.downloads("/shared.safetensors") <= i and not waits(begun[i]):
                assert time.monotonic() < end
                time.sleep(0.01)
    finally:
        web.open.set()
    ended = [one.end() for one in begun]
    assert [one.returncode for one in ended] == [0, 0], ended
    assert ended[0].stdout == ended[1].stdout
    assert web.downloads("/shared.safetensors") == 1
    assert copies(cache) == [f"{SHA256}.safetensors"]


def waits(begun: forked.Begun) -> bool:
    """Whether a process waits for a lock on a file."""
    lines = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any(line[1] == "->" and line[5] == str(begun.process.pid) for line in lines)


def test_an_address_with_its_hash_needs_no_network_once_it_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUBITO_CACHE", str(tmp_path))
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / f"{SHA256}.safetensors").write_bytes(DIGITS)
    address = f"https://nowhere.invalid/digits.safetensors#sha256={SHA256}"
    assert load(address).manifest == load(embedded("digits")).manifest
    (tmp_path / "files" / f"{SHA256}.safetensors").write_bytes(DIGITS[1:])
    with pytest.raises(RemoteError, match="its server cannot be reached"):
        load(address)


def test_a_copy_that_was_damaged_is_fetched_again(site: Site, tmp_path: Path) -> None:
    web, trusting = site
    address = f"https://{stores.HOST}:{web.port}/digits.safetensors"
    copy = tmp_path / "files" / f"{SHA256}.safetensors"
    for _ in range(2):
        ended = forked.run("inspect", address, environment=trusting | {"DUBITO_CACHE": str(tmp_path)})
        assert ended.returncode == 0, ended.stderr
        assert copy.read_bytes() == DIGITS
        copy.write_bytes(DIGITS[:-1] + b"!")


def test_parts_of_processes_that_ended_are_swept_and_others_stay(site: Site, tmp_path: Path) -> None:
    """A part belongs to the process that holds the lock of its address."""
    import fcntl

    web, trusting = site
    parts, addresses = tmp_path / "parts", tmp_path / "addresses"
    for folder in (parts, addresses):
        folder.mkdir()
    for name in ("dead", "alive"):
        (parts / f"{name}.0.part").write_bytes(b"half")
    with (addresses / "alive.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        address = f"https://{stores.HOST}:{web.port}/digits.safetensors"
        ended = forked.run("inspect", address, environment=trusting | {"DUBITO_CACHE": str(tmp_path)})
    assert ended.returncode == 0, ended.stderr
    assert [part.name for part in parts.iterdir()] == ["alive.0.part"]


def test_a_cache_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    known = site[1] | {"DUBITO_CACHE": str(tmp_path / "file" / "cache")}
    line = error_of(
        forked.run("inspect", f"https://{stores.HOST}:{site[0].port}/digits.safetensors", environment=known)
    )
    assert line.endswith("expected a folder that may be written to: name one in DUBITO_CACHE.")


# addresses


def test_a_path_is_a_path_and_imports_nothing() -> None:
    assert place_of("a/b.safetensors") == Path("a/b.safetensors")
    assert place_of("package.module:factory") == Path("package.module:factory")
    code = (
        "import sys, dubito.models as m; from tests.preloaded import OURS\n"
        "for name in [name for name in sys.modules if name.startswith('fsspec')]: del sys.modules[name]\n"
        "m.load(sys.argv[1]); sys.exit('fsspec' in OURS or 'fsspec' in sys.modules)"
    )
    assert forked.run(embedded("digits"), code=code).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://host/x.safetensors", "http:// came; expected a path, or an address that begins with s3://"),
        ("ftp://host/x.safetensors", "ftp:// came"),
        ("s3://", "expected s3://BUCKET/PATH"),
        ("https://host", "expected https://HOST/PATH"),
        ("hf://owner", "expected hf://OWNER/NAME"),
        ("hf://datasets/owner", "expected hf://OWNER/NAME"),
        ("https://me:s3cr3t@host/x", "https://…@host holds credentials"),
        ("s3://bucket/x#sha256=12", "expected 64 digits"),
    ],
)
def test_an_address_that_is_none(text: str, said: str) -> None:
    with pytest.raises(DubitoError, match=re.escape(said)) as caught:
        place_of(text)
    assert "s3cr3t" not in str(caught.value)


def test_names_in_addresses() -> None:
    address = place_of(f"hf://owner/name@v2/nets/a.safetensors#sha256={SHA256}")
    assert isinstance(address, Address)
    assert (address.root, address.below, address.stem, address.sha256) == (
        "owner/name@v2",
        "nets/a.safetensors",
        "a",
        SHA256,
    )
    whole = place_of("hf://owner/name@v2")
    assert isinstance(whole, Address)
    assert (whole.name, whole.below) == ("name", "")
    encoded = place_of("https://host/a%20b.safetensors?x=1")
    assert isinstance(encoded, Address)
    assert (encoded.stem, encoded.signed, str(encoded)) == ("a b", True, "https://host/a%20b.safetensors?…")


def test_errors_that_nobody_foresaw_show_no_secret() -> None:
    address = Address("https://host/x?sig=s3cr3t")
    error = explain(address, ValueError("bad https://host/x?sig=s3cr3t, token=s3cr3t AccountKey=s3cr3t;"))
    assert str(error).startswith("https://host/x?… cannot be read: ValueError: bad https://host/x…")
    assert "s3cr3t" not in str(error)


def test_a_package_that_is_missing(tmp_path: Path) -> None:
    hide = (
        "import dubito.models.extras as e; find = e.find_spec; e.find_spec = lambda n: n != 's3fs' and find(n) or None"
    )
    code = f"{hide}; {forked.DUBITO}"
    ended = forked.run("inspect", "s3://bucket/x.safetensors", code=code, environment={"DUBITO_CACHE": str(tmp_path)})
    assert error_of(ended) == ("error: s3fs is not installed; install the extra remote: pip install 'dubito[remote]'")


def test_a_local_path_is_returned_as_it_is(tmp_path: Path) -> None:
    assert fetched(str(tmp_path / "x")) == tmp_path / "x"
