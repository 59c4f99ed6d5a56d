"""One log line for each event of a request's or a node's life, as key=value pairs.

Prompts and answers never appear in a log: the lines carry ids, counts and times only.
"""

from __future__ import annotations

import logging

MAX_SHOWN_CHARACTERS = 1000


def log_event(
    logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: object
) -> None:
    """Log `event=... key=value ...`; values with spaces, or with what is no print, are quoted.

    Other formats find the pairs as they are in the record's `fields`.
    """
    if logger.isEnabledFor(level):
        pairs = " ".join(f"{key}={_shown(value)}" for key, value in fields.items())
        extra = {"fields": {"event": event, **fields}}
        # Logger.log would look up this call's file and line, a third of its time, to no use.
        record = logger.makeRecord(
            logger.name, level, "", 0, "event=%s %s", (event, pairs), None, extra=extra
        )
        logger.handle(record)


def _shown(value: object) -> str:
    """Clients have a say in some values: none may end the line, or write to a terminal."""
    text = f"{value:.4f}" if isinstance(value, float) else str(value)
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = text[:MAX_SHOWN_CHARACTERS] + "..."
    return text if text and text.isprintable() and " " not in text else repr(text)
