"""API keys: a file with one key a line, checked in constant time.

    KEY          opens everything but the admin endpoints
    admin:KEY    opens those too

In a file without admin keys every key opens everything.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path

from sluice.protocol.messages import ConfigError
from sluice.protocol.reading import read_text
from sluice.router.common.errors import Forbidden, Unauthorized

# Probes have no key, scrapers none unless router.metrics_key says so; the page at / asks for one.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/"})
ADMIN_PATHS = "/admin/"
ADMIN_MARK = "admin:"


@dataclass(frozen=True, repr=False)
class ApiKeys:
    """The keys without their marks; both empty where everything is open to everybody."""

    admin: tuple[bytes, ...] = ()
    others: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.admin or self.others)

    @property
    def for_admin(self) -> bytes | None:
        """A key that opens everything."""
        return next(iter(self.admin), None)

    @property
    def for_serving(self) -> bytes | None:
        """A key that opens no more than it has to."""
        return next(iter(self.others or self.admin), None)


def read_api_keys(path: Path | None, setting: str = "router.api_keys_file") -> ApiKeys:
    """The keys; empty lines and lines that begin with # are skipped. Raises ConfigError."""
    if path is None:
        return ApiKeys()
    way_out = "give a readable file with one key a line, or leave the setting out"
    lines = [line.strip() for line in read_text(path, setting, way_out).splitlines()]
    keys = [line for line in lines if line and line[0] != "#"]
    admin = [key.removeprefix(ADMIN_MARK).strip() for key in keys if key.startswith(ADMIN_MARK)]
    others = [key for key in keys if not key.startswith(ADMIN_MARK)]
    if not keys or "" in admin:
        what = "a line has no key after `admin:`" if keys else "holds no key"
        raise ConfigError(f"{setting} {path}: {what}, expected one a line")
    return ApiKeys(_bytes(admin or others), _bytes(others if admin else []))


def check_api_key(keys: ApiKeys, path: str, authorization: bytes) -> None:
    """Raises Unauthorized without a known key, Forbidden without an admin key where it takes one.

    OPEN_PATHS take none.
    """
    if not keys or path in OPEN_PATHS:
        return
    is_admin = _known(keys, authorization)
    if path.startswith(ADMIN_PATHS) and not is_admin:
        raise Forbidden(
            f"{path}: this API key is not an admin key; use one that stands behind `admin:` in "
            "the server's api_keys_file"
        )


def check_any_key(keys: ApiKeys, authorization: bytes) -> None:
    """Raises Unauthorized without a known key, for a path that is open by default."""
    _known(keys, authorization)


def _known(keys: ApiKeys, authorization: bytes) -> bool:
    """Whether the key is an admin's. Raises Unauthorized if it is nobody's."""
    is_admin, is_other = _given(keys, authorization)
    if not (is_admin or is_other):
        raise Unauthorized(
            "missing or unknown API key; send it as `Authorization: Bearer KEY` "
            "with a key from the server's api_keys_file"
        )
    return is_admin


def opens_admin(keys: ApiKeys, authorization: bytes) -> bool:
    """Whether the header carries an admin key; without keys everybody is let in."""
    return not keys or _given(keys, authorization)[0]


def _given(keys: ApiKeys, authorization: bytes) -> tuple[bool, bool]:
    """Whether the header carries an admin key, and whether one of the others."""
    scheme, _, given = authorization.partition(b" ")
    is_admin, is_other = _is_among(given, keys.admin), _is_among(given, keys.others)
    bearer = scheme.lower() == b"bearer"
    return bearer and is_admin, bearer and is_other


def _is_among(given: bytes, keys: tuple[bytes, ...]) -> bool:
    # Every key is compared, so that the time taken says nothing about which one is close.
    return sum(hmac.compare_digest(given.strip(), key) for key in keys) > 0


def _bytes(keys: list[str]) -> tuple[bytes, ...]:
    return tuple(key.encode() for key in keys)
