"""GrammarJudge: whether a client's schema can be followed, found out where it stops nobody.

A schema of forty characters can take llguidance minutes and gigabytes, without a limit that it
would keep by itself. So it is tried in a helper process, which is given up where it takes too long
or too much; nodes then see only what has passed there, and judge it the same way. The functions at
the end run in the helper.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.protocol.limits import check_size
from sluice.protocol.messages import InvalidRequest, QueueFull, SamplingParams
from sluice.router.common.offload import GivenUp, Offload, Overdue
from sluice.router.text.checkpoint import Checkpoint

if TYPE_CHECKING:
    from sluice.protocol.grammar import Grammars

LIMIT_S = 0.25  # of CPU time; an object of 700 properties takes 0.05, one of 5,000 0.3
MAX_BYTES = 128 << 20
NICENESS = 10
MAX_WAITING = 128
PATIENCE_S = 30.0  # for what waits before it
MAX_VERDICTS = 4096
MAX_REASON_CHARACTERS = 500

Verdict = tuple[str, str] | None  # what is wrong, and the field at fault


class GrammarJudge:
    """Judges for one checkpoint, each schema once. Belongs to one event loop."""

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        self._helper = Offload(
            1,
            max_bytes=MAX_BYTES,
            max_waiting=MAX_WAITING,
            niceness=NICENESS,
            setup=_load,
            setup_args=(str(folder), checkpoint.vocab_size, checkpoint.eos_token_ids),
        )
        self._verdicts: OrderedDict[bytes, asyncio.Task[Verdict]] = OrderedDict()

    async def check(self, json_schema: str, grammar: str) -> None:
        """Raises InvalidRequest for a schema or grammar that no node could follow; "" is neither.

        Raises QueueFull if too many others are being looked at.
        """
        if not json_schema and not grammar:
            return
        check_size(json_schema, "response_format")
        check_size(grammar, "tools")
        try:
            async with asyncio.timeout(PATIENCE_S):
                verdict = await asyncio.shield(self._judgement(json_schema, grammar))
        except TimeoutError as error:
            raise QueueFull(
                f"the schema could not be looked at within {PATIENCE_S:g} s, as many others are; "
                "try again in a moment"
            ) from error
        if verdict is not None:
            message, param = verdict
            raise InvalidRequest(message, param=param)

    async def close(self) -> None:
        await self._helper.close()

    def _judgement(self, json_schema: str, grammar: str) -> asyncio.Task[Verdict]:
        """Of all who ask for the same at once, one has it worked out."""
        key = hashlib.sha256(f"{len(json_schema)} {json_schema}{grammar}".encode()).digest()
        if (task := self._verdicts.get(key)) is None:
            task = asyncio.create_task(self._judge(json_schema, grammar))
            task.add_done_callback(lambda done: self._note(key, done))
            self._verdicts[key] = task
        self._verdicts.move_to_end(key)
        return task

    def _note(self, key: bytes, task: asyncio.Task[Verdict]) -> None:
        """Keep verdicts, the latest; what has come to none is worked out anew."""
        if task.cancelled() or task.exception() is not None:
            self._verdicts.pop(key, None)
        while len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    async def _judge(self, json_schema: str, grammar: str) -> Verdict:
        param = "response_format" if json_schema else "tools"
        try:
            await self._helper.run(_try, json_schema, grammar, limit_s=LIMIT_S)
        except Overdue as error:  # no verdict: another time it may have the machine's attention
            raise QueueFull(f"{param}: {error}; try again in a moment") from error
        except GivenUp as error:
            return f"{param}: this schema is too much to follow: {error}; simplify it", param
        except InvalidRequest as error:
            return str(error)[:MAX_REASON_CHARACTERS], error.param or param
        return None


_grammars: Grammars  # the helper's, from `_load` on


def _load(folder: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
    from sluice.protocol.grammar import Grammars  # the router itself needs neither it nor numpy

    global _grammars
    _grammars = Grammars(Path(folder), vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def _try(json_schema: str, grammar: str) -> None:
    """Raises InvalidRequest for what no node could follow."""
    _grammars.check(SamplingParams(max_tokens=1, json_schema=json_schema, grammar=grammar))
