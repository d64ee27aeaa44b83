"""Stores for tests of remote files: emulators of S3, Google Cloud Storage and Azure, a web server with TLS, and a relay
that cuts connections off or stalls."""

import datetime
import ipaddress
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

HOST = "127.0.0.1"
OPEN = [  # for `pytestmark`: emulators and the libraries that write to them leave sockets open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
AZURITE = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # everybody's


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def await_port(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return
        assert time.monotonic() < end, f"nothing listens on port {port}"
        time.sleep(0.02)


@contextmanager
def s3() -> Iterator[int]:
    """A port of moto, in a process of its own: what it knows is one state for the whole process."""
    port = free_port()
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", HOST, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            await_port(port)
            yield port
        finally:
            process.terminate()


def s3_environment(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://{HOST}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "never-shown",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def gs() -> Iterator[int]:
    """A port of gcp-storage-emulator."""
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server(HOST, port, in_memory=True)
    server.start()
    try:
        await_port(port)
        yield port
    finally:
        server.stop()


def gs_environment(port: int) -> dict[str, str]:
    return {
        "STORAGE_EMULATOR_HOST": f"http://{HOST}:{port}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which the emulator does not have
        "NO_GCE_CHECK": "true",
    }


@contextmanager
def az() -> Iterator[int]:
    """A port of azurite's blobs."""
    program = os.environ.get("AZURITE") or shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not here: npm install -g azurite, or name its program azurite-blob in AZURITE")
    port = free_port()
    command = [program, "--blobHost", HOST, "--blobPort", str(port), "--skipApiVersionCheck", "--inMemoryPersistence"]
    with subprocess.Popen([*command, "--silent", "--disableTelemetry"], stdout=subprocess.DEVNULL) as process:
        try:
            await_port(port)
            yield port
        finally:
            process.terminate()


def az_environment(port: int, key: str = AZURITE_KEY) -> dict[str, str]:
    endpoint = f"http://{HOST}:{port}/{AZURITE}"
    account = f"DefaultEndpointsProtocol=http;AccountName={AZURITE};AccountKey={key};BlobEndpoint={endpoint};"
    return {"AZURE_STORAGE_CONNECTION_STRING": account}


def file_system(scheme: str, port: int) -> Any:
    """Of an emulator, with an empty `bucket`: the test's own eyes and hands."""
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # read as gcsfs is imported
    import fsspec

    where = f"http://{HOST}:{port}"
    options = {
        "s3": {"key": "tests", "secret": "tests", "endpoint_url": where},
        "gs": {"token": "anon", "endpoint_url": where},
        "az": {"connection_string": az_environment(port)["AZURE_STORAGE_CONNECTION_STRING"]},
    }[scheme]
    fs = fsspec.filesystem(scheme, use_listings_cache=False, **options)
    fs.mkdir("bucket")
    return fs


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """An authority of our own, and the certificate of a server that it signed, with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]

    def certificate(whose: str, key: ec.EllipticCurvePrivateKey, authority: bool) -> x509.Certificate:
        builder = x509.CertificateBuilder().subject_name(name(whose)).issuer_name(name("authority of a test"))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - day).not_valid_after(now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST)), x509.DNSName("localhost")])
        return builder.add_extension(names, critical=False).sign(keys[0], hashes.SHA256())

    pem = serialization.Encoding.PEM
    folder.joinpath("authority.pem").write_bytes(certificate("authority of a test", keys[0], True).public_bytes(pem))
    key = keys[1].private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    folder.joinpath("server.pem").write_bytes(certificate("a test", keys[1], False).public_bytes(pem) + key)
    return folder / "authority.pem", folder / "server.pem"


@dataclass
class Web:
    """Files by path over HTTP, with ETags; `status` by path answers with an error instead."""

    files: dict[str, bytes] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[str, str]] = field(default_factory=list)  # method and path with its query
    everything: int | None = None  # the status of every answer
    length: bool = True  # whether the size is stated
    port: int = 0
    open: threading.Event = field(default_factory=threading.Event)  # while it is not set, no file is sent

    def __post_init__(self) -> None:
        self.open.set()

    def downloads(self, path: str) -> int:
        return sum(method == "GET" and one.partition("?")[0] == path for method, one in self.seen)


@contextmanager
def listening(server: ThreadingHTTPServer) -> Iterator[int]:
    """The port of a server that answers from a thread."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def web(certificate: Path | None = None) -> Iterator[Web]:
    site = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer()

        def answer(self) -> None:
            site.seen.append((self.command, self.path))
            path = self.path.partition("?")[0]
            status = site.everything or site.status.get(path, 200 if path in site.files else 404)
            body = site.files[path] if status == 200 else b"no"
            self.send_response(status)
            if site.length or status != 200:
                self.send_header("Content-Length", str(len(body)))
            else:
                self.send_header("Transfer-Encoding", "chunked")
                body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            if status == 200:
                self.send_header("ETag", f'"{sha256(body).hexdigest()[:16]}"')
            self.end_headers()
            if self.command == "GET":
                site.open.wait(60)
                with suppress(ConnectionError):
                    self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:  # clients that do not trust us leave
            pass

    server = Quiet((HOST, 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with listening(server) as site.port:
        yield site


@dataclass
class Relay:
    """Passes connections on, and after this many bytes of a server's answers cuts them off or stalls."""

    after: int
    stalls: bool = False
    port: int = 0
    passed: int = 0  # most bytes of one connection
    total: int = 0  # bytes of all answers


@contextmanager
def relay(to: int, after: int, *, stalls: bool = False) -> Iterator[Relay]:
    state = Relay(after, stalls)
    listener = socket.create_server((HOST, 0))
    state.port = listener.getsockname()[1]
    ended = threading.Event()

    def pump(source: socket.socket, sink: socket.socket, limit: Callable[[], int] | None) -> None:
        count = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                room = len(data) if limit is None else max(0, limit() - count)
                sink.sendall(data[:room])
                count += min(room, len(data))
                if limit is not None:
                    state.passed = max(state.passed, count)
                    state.total += min(room, len(data))
                if room < len(data):
                    if state.stalls:
                        ended.wait()
                    break
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def connect(client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection((HOST, to)) as server:
            back = threading.Thread(target=pump, args=(server, client, lambda: state.after), daemon=True)
            back.start()
            pump(client, server, None)
            back.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=connect, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield state
    finally:
        ended.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
