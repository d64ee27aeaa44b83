"""Logs: one JSON object a line, on standard error.

A thread writes them. Whoever logs never waits: where the reader of the pipe is stuck, lines are dropped and counted.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import orjson

SOON = 0.02  # seconds for which lines are collected, to be written together
AT_END = 1.0  # seconds that the end of the server waits for its last lines to be written
USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class LogWriter:
    """Lines that wait to be written, and the thread that writes them."""

    def __init__(self) -> None:
        self.most = 1 << 20  # bytes
        self.dropped = 0  # lines
        self.told = 0  # of these, in a line of the log
        self.waiting: deque[bytes] = deque()
        self.bytes = 0  # of these lines
        self.lock = threading.Lock()
        self.some, self.urgent, self.idle = threading.Event(), threading.Event(), threading.Event()
        self.file = 2
        self.thread: threading.Thread | None = None

    def start(self, most: int) -> None:
        self.most = most
        if self.thread is None or not self.thread.is_alive():
            self.idle.set()
            self.thread = threading.Thread(target=self._run, name="log", daemon=True)
            self.thread.start()

    def put(self, line: bytes) -> None:
        with self.lock:
            if self.bytes + len(line) > self.most:
                self.dropped += 1
                return
            self.waiting.append(line)
            self.bytes += len(line)
            if len(self.waiting) == 1:
                self.idle.clear()
                self.some.set()

    def flush(self, seconds: float = AT_END) -> None:
        """Wait until all lines are written, but no longer than that."""
        self.urgent.set()
        if self.thread is not None and self.thread.is_alive():
            self.idle.wait(seconds)

    def _run(self) -> None:
        while True:
            self.some.wait()
            self.urgent.wait(SOON)
            with self.lock:
                self.some.clear()
                self.urgent.clear()
                lines = list(self.waiting)
                self.waiting.clear()
                dropped = self.dropped - self.told
                self.told = self.dropped
            if dropped:
                lines.append(line_of("warning", {"message": "log lines were dropped", "lines": dropped}))
            for begin in range(0, len(lines), 64):
                self._write(b"".join(lines[begin : begin + 64]))
            with self.lock:
                self.bytes = sum(map(len, self.waiting))
                if not self.waiting:
                    self.idle.set()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.file, view) :]
            except BlockingIOError:  # somebody has made the pipe non-blocking
                time.sleep(SOON)
            except OSError:  # nobody reads any more
                self.dropped += data.count(b"\n")
                return


writer = LogWriter()


def line_of(level: str, fields: dict[str, Any]) -> bytes:
    return orjson.dumps({"time": datetime.now(UTC), "level": level, **fields}, option=orjson.OPT_APPEND_NEWLINE)


def write_line(fields: dict[str, Any]) -> None:
    """Write a line of level info without `logging`, which would be too slow for each request."""
    writer.put(line_of("info", fields))


class JsonFormatter(logging.Formatter):
    """A record's message and its extra fields as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in USUAL},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields, default=str).decode()


class Handler(logging.Handler):
    """Hands records to the thread that writes."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            writer.put(self.format(record).encode() + b"\n")
            writer.urgent.set()
        except Exception:
            self.handleError(record)


def start_logging(level: str, most_bytes: int) -> None:
    """Log our own records from `level` on, those of uvicorn and other libraries from warning on."""
    sys.stderr.flush()
    writer.start(most_bytes)
    handler = Handler()
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    for name, lowest in (("dubito", level.upper()), ("uvicorn", "WARNING"), ("", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(lowest)
