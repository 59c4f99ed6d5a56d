"""What has come meanwhile is read at once: in order, with its end, and before what failed."""

import asyncio
import time

import pytest

from sluice.protocol.messages import FinishReason, Logprobs, NodeLost, TokenChunk
from sluice.router.dispatch.inbox import Inbox


def filled(*arrived) -> Inbox:
    inbox = Inbox(lambda: None)
    for item in arrived:
        inbox.put(item)
    return inbox


async def test_tokens_that_wait_are_one_chunk():
    scored = [Logprobs(-float(number)) for number in range(3)]
    inbox = filled(
        TokenChunk("r", (1,), logprobs=(scored[0],)),
        TokenChunk("r", (2, 3), FinishReason.STOP, logprobs=(scored[1], scored[2]), position=1),
    )
    assert await inbox.get() == TokenChunk(
        "r", (1, 2, 3), FinishReason.STOP, logprobs=tuple(scored)
    )


@pytest.mark.parametrize(
    "failure",
    [TokenChunk("r", (), error="broken"), TokenChunk("r", (), error="later", preempted=True)],
)
async def test_a_failure_comes_after_the_tokens_before_it(failure):
    inbox = filled(TokenChunk("r", (1,)), TokenChunk("r", (2,), position=1), failure)
    assert (await inbox.get()).token_ids == (1, 2)
    assert await inbox.get() == failure


async def test_a_lost_node_is_noticed_after_its_tokens():
    inbox = filled(TokenChunk("r", (1,)), NodeLost("gone"))
    assert (await inbox.get()).token_ids == (1,)
    with pytest.raises(NodeLost, match="gone"):
        await inbox.get()


async def test_only_a_reader_who_could_come_and_does_not_leaves_chunks_unread():
    inbox = filled(TokenChunk("r", (1,)))
    assert not inbox.is_unread(0)  # it cannot come yet
    inbox.expect_reader()
    while not inbox.is_unread(0):  # found twice
        await asyncio.sleep(0)
    await inbox.get()
    reader = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.put(TokenChunk("r", (2,), position=1))  # the reader is here, and has its turn later
    assert not any(inbox.is_unread(0) for _ in range(10))
    assert (await reader).token_ids == (2,)


async def test_a_pause_of_our_own_is_not_the_readers():
    inbox = filled()
    inbox.expect_reader()
    inbox.put(TokenChunk("r", (1,)))
    time.sleep(0.05)  # the loop stands still, and then a chunk is there before the reader is
    inbox.put(TokenChunk("r", (2,), position=1))
    assert not inbox.is_unread(0.04)
