"""Logs: one JSON object a line, on standard error."""

import asyncio
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

SOON = 0.05  # seconds
USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def write_line(told: dict[str, Any]) -> None:
    """A line of level info, past the machinery of `logging`: one is written for each request."""
    global _flush
    line = orjson.dumps({"time": datetime.now(UTC), "level": "info", **told}, option=orjson.OPT_APPEND_NEWLINE)
    sys.stderr.buffer.write(line)
    if _flush is None:  # together with whatever else comes until then
        _flush = asyncio.get_running_loop().call_later(SOON, flush_lines)


def flush_lines() -> None:
    global _flush
    _flush = None
    sys.stderr.buffer.flush()


_flush: asyncio.TimerHandle | None = None


class AsJson(logging.Formatter):
    """What was said and everything that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **{key: value for key, value in vars(record).items() if key not in USUAL},
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(told, default=str).decode()


def start_logging(level: str) -> None:
    """Ours at this level; of the web server's own and of all other libraries', only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(AsJson())
    logging.captureWarnings(True)
    for name, at in (("dubito", level.upper()), ("uvicorn", "WARNING"), ("", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(at)
