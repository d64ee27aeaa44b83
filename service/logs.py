"""Logs: one JSON object a line, on standard error."""

import logging
import sys
from datetime import UTC, datetime

import orjson

USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


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
    """Ours at this level; of the web server's own, only what went wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(AsJson())
    for name, at in (("dubito", level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(at)
