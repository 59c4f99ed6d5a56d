"""AsyncPrefill: a prefill node as the router's PrefillClient, for whoever shares its process."""

from __future__ import annotations

from sluice.engine.node import InProcess
from sluice.protocol.clients import PrefillCalls


class AsyncPrefill(InProcess, PrefillCalls):
    """The async face of a PrefillNode."""
