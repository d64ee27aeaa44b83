"""The load generator: nobody who was due is forgotten, and a server that stalls is charged for it."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from dubito.models.errors import DubitoError, InputError
from dubito.service import load
from dubito.service.cli import app
from dubito.service.client import ServiceError
from dubito.service.load import BROKEN, Load, LoadError, Target, poisson, post, predictions, put, spread
from tests.service.conftest import Live

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
Answer = Callable[[socket.socket], None]


@contextmanager
def stub(answer: Answer, headers: dict[str, str] | None = None) -> Iterator[Target]:
    """A server of a few lines; `answer` gets each request's connection."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=200)
    threads: list[threading.Thread] = []

    def talk(connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the generator hangs up when it has what it wants
            got = b""
            while more := connection.recv(65536):
                got += more
                while (end := got.find(b"\r\n\r\nbody")) >= 0:
                    got = got[end + 8 :]
                    answer(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=talk, args=(connection,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield post(f"http://127.0.0.1:{listener.getsockname()[1]}", "/ask", b"body", headers or {})
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for thread in threads:
            thread.join()


def test_a_queue_at_the_server_shows_in_the_latencies() -> None:
    """One at a time, 20 ms each, at 200 a second: whoever waits for a reply before asking again would see 20 ms."""
    turn, each = threading.Lock(), 0.02

    def slow(connection: socket.socket) -> None:
        with turn:
            time.sleep(each)
        connection.sendall(OK)

    due = poisson(200, 0.5)
    with stub(slow) as target:
        found = put(target, due, rate=200)
    assert (found.status == 200).all()
    first_possible = due[0] + each * np.arange(1, len(due) + 1)
    assert (np.sort(found.ended) >= first_possible - 1e-3).all()
    assert found.latency.sum() >= (first_possible - due).sum() - 1e-3 * len(due)
    assert found.latency.max() > 10 * each
    assert (found.left >= due).all()
    assert (found.sent >= found.left).all()
    assert len(due) / found.achieved() >= each * len(due) - 1e-3


def test_a_stall_is_charged_to_everybody_who_came_meanwhile() -> None:
    began: list[float] = []
    over = threading.Event()

    def stall(connection: socket.socket) -> None:
        began.append(time.monotonic())
        if len(began) == 1:
            time.sleep(0.4)
            over.set()
        over.wait()
        connection.sendall(OK)

    due = np.linspace(0, 0.3, 31)
    with stub(stall) as target:
        found = put(target, due, rate=100)
    assert (found.latency >= 0.4 - due - 1e-3).all()
    assert spread(found.latency)["p50"] > 200


def test_more_requests_than_connections_wait_their_turn() -> None:
    """All due at once on two connections is a closed loop; what they wait is in the latency from the due time."""

    def short(connection: socket.socket) -> None:
        time.sleep(0.01)
        connection.sendall(OK)

    with stub(short) as target:
        found = put(target, np.zeros(20), connections=2)
    assert (found.status == 200).all()
    assert (np.diff(found.sent[2:]) >= 0).all()
    assert (found.ended - found.sent >= 0.01 - 1e-3).all()
    assert found.latency.max() >= 10 * 0.01 - 1e-3


def test_replies_in_pieces_and_connections_that_close() -> None:
    """A head in two parts, a refusal that closes, a page without a length, silence, and a good one, in turn."""
    turn = iter(range(1000))

    def various(connection: socket.socket) -> None:
        match next(turn) % 5:
            case 0:
                connection.sendall(OK[:30])
                time.sleep(0.01)
                connection.sendall(OK[30:])
            case 1:
                connection.sendall(b"HTTP/1.1 429 Too Many\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
                connection.shutdown(socket.SHUT_RDWR)
            case 2:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            case 3:
                connection.shutdown(socket.SHUT_RDWR)
            case 4:
                connection.sendall(OK)

    with stub(various) as target:
        found = put(target, np.zeros(50), connections=1)
    told = found.summary()
    assert told["statuses"] == {"200": 20, "429": 10, "no connection": 20}
    assert set(told["latency_ms"]) == {"200", "429"}
    assert np.isnan(found.ended).sum() == 20
    assert any("20 requests got no reply" in doubt for doubt in load.doubts([found]))


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PATIENCE", 0.2)
    with stub(lambda connection: None) as target:
        found = put(target, np.zeros(5))
    assert found.summary()["statuses"] == {"no reply": 5}


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = put(post(f"http://127.0.0.1:{port}", "/", b"", {}), np.linspace(0, 0.1, 10), rate=100)
    assert (found.status == BROKEN).all()
    assert (found.summary()["due"], found.achieved()) == (10, 0.0)


def test_percentiles_are_values_that_were_seen() -> None:
    seconds = np.random.default_rng(0).exponential(0.01, 2001)
    ordered = 1000 * np.sort(seconds)
    told = spread(seconds)
    at = {"p50": 1000, "p90": 1800, "p99": 1980, "p99.9": 1998, "max": 2000}
    assert told == {name: pytest.approx(ordered[i], abs=1e-3) for name, i in at.items()}
    for name, q in (("p50", 50), ("p90", 90), ("p99", 99), ("p99.9", 99.9)):
        assert told[name] == pytest.approx(1000 * np.percentile(seconds, q), rel=0.02)
    assert spread(np.array([])) == {}


def test_arrivals_are_poisson() -> None:
    """As many as asked for, and gaps whose standard deviation is their mean, within 5 standard errors."""
    due = poisson(1000, 20, seed=1)
    assert abs(len(due) - 20_000) < 5 * 20_000**0.5
    gaps = np.diff(due, prepend=0.0)
    assert (gaps >= 0).all()
    assert due[-1] < 20
    assert abs(gaps.std() / gaps.mean() - 1) < 5 / len(due) ** 0.5  # the ratio's own is 1/√n for exponential gaps
    assert (poisson(1000, 20, seed=1) == due).all()


def test_everybody_due_is_answered_by_the_real_server(live: Live) -> None:
    name, target = predictions(live.url, None, 2, "3", None)
    due = poisson(40, 1.5)
    found = put(target, due, rate=40)
    assert (name, len(found.status)) == ("digits", len(due))
    assert (found.status == 200).all()
    assert (found.ended >= found.sent).all()
    assert (found.due == due).all()


def test_the_command_prints_a_table_and_json_and_plots(live: Live, tmp_path: Path) -> None:
    ask = ["bench", "http", live.url, "--seconds", "0.5", "--samples", "1"]
    shown = CliRunner().invoke(app, [*ask, "--rate", "40", "--plot", str(tmp_path / "one.png")])
    assert shown.exit_code == 0, shown.output
    assert "p99.9" in shown.stdout
    both = CliRunner().invoke(app, [*ask, "--rates", "20,40", "--json", "--plot", str(tmp_path / "two.svg")])
    told = json.loads(both.stdout)
    assert [run["rate"] for run in told["runs"]] == [20, 40]
    for run in told["runs"]:
        assert run["statuses"] == {"200": run["due"]}
        assert list(run["latency_ms"]["200"]) == ["p50", "p90", "p99", "p99.9", "max"]
    assert (tmp_path / "one.png").stat().st_size > 1000
    assert "<svg" in (tmp_path / "two.svg").read_text()


def test_ctrl_c_shows_what_there_is(live: Live) -> None:
    def asked() -> float:
        lines = httpx.get(f"{live.url}/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith("dubito_inputs_total{"))

    before = asked()
    command = [sys.executable, "-m", "dubito", "bench", "http", live.url, "--rate", "20", "--seconds", "60", "--json"]

    def heed() -> None:  # a shell that runs the tests in the background has its children ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed) as process:
        while asked() < before + 5 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    (run,) = json.loads(out)["runs"]
    assert run["stopped"]
    assert 5 <= run["due"] < 1200
    assert sum(run["statuses"].values()) == run["due"]
    assert "stopped: at 20/s" in error


@pytest.mark.parametrize(
    "words", ["URL --rates 10,20,40", "URL --rates 10 20 40", "--rates 10 20 40 URL", "--rates 10 URL 20 40"]
)
def test_rates_with_commas_or_without(live: Live, words: str) -> None:
    asked = ["bench", "http", *words.replace("URL", live.url).split(), "--seconds", "0.2", "--json"]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0, answer.output
    assert [run["rate"] for run in json.loads(answer.stdout)["runs"]] == [10, 20, 40]


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["--rate", "0"], LoadError, "rate is 0; expected a number above 0"),
        (["--rate", "nan"], LoadError, "rate is nan"),
        (["--rates", "5,x"], LoadError, "rates are '5,x'; expected numbers"),
        (["--rates", "5", "--rate", "5"], LoadError, "expected one of them"),
        (["20", "40"], LoadError, "expected one address, such as http://localhost:8000, and rates after --rates"),
        (["http://localhost:1", "--rates", "5"], LoadError, "expected one address"),
        (["--seconds", "-1"], LoadError, "seconds is -1"),
        (["--rate", "1e6", "--seconds", "1e6"], LoadError, "more than 5,000,000"),
        (["--rate", "0.001", "--seconds", "0.001"], LoadError, "none came due"),
        (["--rows", "0"], LoadError, "rows is 0"),
        (["--samples", "many"], LoadError, "samples is 'many'"),
        (["--plot", "x.doc"], LoadError, "expected one that ends in"),
        (["--plot", "nowhere/x.png"], LoadError, "there is no folder nowhere"),
        (["--model", "nobody"], ServiceError, "no such model"),
        (["--key", "a\nb"], InputError, "key"),
    ],
)
def test_bad_input_is_one_clear_error(live: Live, words: list[str], kind: type[DubitoError], said: str) -> None:
    found = CliRunner().invoke(app, ["bench", "http", live.url, *words])
    assert isinstance(found.exception, kind), found.exception
    assert said in str(found.exception)


def test_a_late_generator_says_so() -> None:
    due = np.linspace(0, 1, 100)
    late = Load(100, due, due + 0.02, due + 0.02, due + 0.03, np.full(100, 200))
    assert any("the generator itself was late" in doubt for doubt in load.doubts([late]))
    assert load.doubts([Load(100, due, due, due, due + 0.01, np.full(100, 200))]) == []
