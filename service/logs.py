"""Logs: one JSON object a line, on standard error."""

import asyncio
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

SOON = 0.05  # seconds after which written lines are flushed
USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def write_line(fields: dict[str, Any]) -> None:
    """Write a line of level info without `logging`, which would be too slow for each request."""
    global _flush
    line = orjson.dumps({"time": datetime.now(UTC), "level": "info", **fields}, option=orjson.OPT_APPEND_NEWLINE)
    sys.stderr.buffer.write(line)
    if _flush is None:  # lines written until then are flushed together
        _flush = asyncio.get_running_loop().call_later(SOON, flush_lines)


def flush_lines() -> None:
    global _flush
    _flush = None
    sys.stderr.buffer.flush()


_flush: asyncio.TimerHandle | None = None


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


def start_logging(level: str) -> None:
    """Log our own records from `level` on, those of uvicorn and other libraries from warning on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.captureWarnings(True)
    for name, lowest in (("dubito", level.upper()), ("uvicorn", "WARNING"), ("", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(lowest)
