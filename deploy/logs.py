"""How processes of a deployment log: lines of key=value on stderr, which Ray keeps in a file."""

from __future__ import annotations

import logging
import sys


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send this project's log lines of `level` and above to stderr, once per process."""
    logger = logging.getLogger("sluice")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
