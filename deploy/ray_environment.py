"""What Ray reads from the environment, set before Ray is imported.

Ray reads some of it only once, at import, so this module must not import it. Whatever the user has
set stays.
"""

from __future__ import annotations

import os
from pathlib import Path

AUTH_MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"

TOKEN_HELP = (
    f"If it was started with a token, set {AUTH_MODE}=token and {TOKEN} to that token, or put it "
    "into ~/.ray/auth_token"
)


def prepare(*, joining: bool) -> None:
    """Set up this process to start a Ray of its own, or to join a running cluster.

    A driver that joins by address authenticates only if the mode says so; a Ray of our own makes
    its token and sets the mode by itself.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing leaves this machine
    if joining:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # a refusal is said once, by us
        if _token_found():
            os.environ.setdefault(AUTH_MODE, "token")


def _token_found() -> bool:
    """Whether there is a token in one of the places where Ray looks for it."""
    return bool(
        os.environ.get(TOKEN)
        or os.environ.get(TOKEN_PATH)
        or (Path.home() / ".ray" / "auth_token").is_file()
    )
