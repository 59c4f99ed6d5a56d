"""Says why a process does not exist yet: Ray waits in silence until it has a place for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from sluice.deploy.common.waiting import within
from sluice.deploy.controller.launcher import ProcessHandle
from sluice.protocol.messages import SluiceError

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0  # a process that has a place is there within a second or two
ANSWER_LIMIT_S = 5.0


async def explain(handle: ProcessHandle, who: str, say: Callable[[str], None]) -> NoReturn:
    """Say whenever something else is missing for the process, "" for nothing; never return."""
    said = ""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            why = await within(ANSWER_LIMIT_S, "Ray", handle.unplaced())
        except SluiceError as error:
            why = f"it is not known what {who} waits for: {error}"
        if why != said:
            said = why
            say(why)
            if why:
                log.warning("event=unplaced process=%s reason=%s", who, why)
