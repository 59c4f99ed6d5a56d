"""API keys: a file with one key a line, checked in constant time."""

from __future__ import annotations

import hmac
from pathlib import Path

from sluice.engine.protocol import ConfigError
from sluice.router.errors import Unauthorized

# Probes and scrapers have no key; the status page at / asks for one itself.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/"})


def read_api_keys(path: Path | None, setting: str = "router.api_keys_file") -> tuple[bytes, ...]:
    """The keys; empty lines and lines that begin with # are skipped. Raises ConfigError."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"{setting} {path}: {error.strerror or error}; "
            "give a readable file with one key a line, or leave the setting out"
        ) from error
    keys = [line.strip().encode() for line in lines if line.strip() and line.strip()[0] != "#"]
    if not keys:
        raise ConfigError(f"{setting} {path}: holds no key, expected one a line")
    return tuple(keys)


def check_api_key(keys: tuple[bytes, ...], path: str, authorization: bytes) -> None:
    """Raises Unauthorized unless the path is open or the header carries a known key."""
    if path not in OPEN_PATHS and not knows_key(keys, authorization):
        raise Unauthorized(
            "missing or unknown API key; send it as `Authorization: Bearer KEY` "
            "with a key from the server's api_keys_file"
        )


def knows_key(keys: tuple[bytes, ...], authorization: bytes) -> bool:
    """Whether the header carries one of the keys; without keys everybody is known."""
    scheme, _, given = authorization.partition(b" ")
    # Every key is compared, so that the time taken says nothing about which one is close.
    known = [hmac.compare_digest(given.strip(), key) for key in keys]
    return not keys or (scheme.lower() == b"bearer" and any(known))
