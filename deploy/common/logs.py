"""How processes of a deployment log: on stderr, which Ray keeps in a file, a line for each event.

text    2026-11-30T12:00:00 INFO sluice.router.accounting event=finished request_id=... tokens=16
json    {"time": "2026-11-30T12:00:00.123+00:00", "level": "INFO", "event": "finished", ...}
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

PAIR = re.compile(r"(\w+)=(.*?)(?=\s\w+=|$)", re.DOTALL)


def log_to_stderr(log_format: str, level: int = logging.INFO) -> None:
    """Send this project's log lines of `level` and above to stderr, once per process."""
    logger = logging.getLogger("sluice")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines()
        if log_format == "json"
        else TextLines("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False


class TextLines(logging.Formatter):
    """Lines of which no part, whoever wrote it, ends the line or speaks to a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(_printable(line) for line in super().formatException(ei).split("\n"))


def _printable(text: str) -> str:
    """The text with everything that is no print written as JSON writes it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


class JsonLines(logging.Formatter):
    """One JSON object a line: when, how grave, from where, and the event's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _printable(json.dumps(line, ensure_ascii=False, default=str))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The event's pairs, with their types where the caller gave them as such."""
    fields: dict[str, object] | None = getattr(record, "fields", None)
    if fields is not None:
        return fields
    text = record.getMessage()
    return dict(PAIR.findall(text)) if text.startswith("event=") else {"message": text}
