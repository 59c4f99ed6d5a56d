"""What Ray reads from the environment, set before Ray is imported.

Ray reads some of it only once, at import, so this module must not import it. Whatever the user has
set stays.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

AUTH_MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ONE_HOST = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0", on any system: this host is 127.0.0.1
LOOPBACK = "127.0.0.1"

TOKEN_HELP = (
    f"If it was started with a token, set {AUTH_MODE}=token and {TOKEN} to that token, or put it "
    "into ~/.ray/auth_token"
)


def prepare(*, joining: bool) -> None:
    """Set up this process to start a Ray of its own, or to join a running cluster.

    A Ray of our own lives on the loopback interface, and its token in its processes' environment,
    which no other user can read; Ray itself would write it to ~/.ray for everybody. A driver that
    joins by address authenticates only if the mode says so.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    if joining:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # a refusal is said once, by us
        if _token_found():
            os.environ.setdefault(AUTH_MODE, "token")
        return
    os.environ[ONE_HOST] = "0"
    os.environ.setdefault(AUTH_MODE, "token")
    if not os.environ.get(TOKEN_PATH):
        os.environ.setdefault(TOKEN, secrets.token_hex(32))


def _token_found() -> bool:
    """Whether there is a token in one of the places where Ray looks for it."""
    return bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH) or _lies_at_home())


def _lies_at_home() -> bool:
    try:
        return (Path.home() / ".ray" / "auth_token").is_file()
    except (OSError, RuntimeError):  # no home, or one that we may not look into
        return False
