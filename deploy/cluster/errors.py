"""Ray's exceptions mapped to ours, at the border where a call leaves for another process.

the process or its host is gone, or the call was dropped  ->  NodeLost
the method raised one of our errors                       ->  that error
the method raised anything else                           ->  NodeError with its words
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from sluice.protocol.messages import NodeError, NodeLost, SluiceError

T = TypeVar("T")


@contextmanager
def mapped(who: str) -> Iterator[None]:
    """Re-raise Ray's errors from the block as ours. `who` is named in the message."""
    try:
        yield
    except RayError as error:
        raise translate(error, who) from error


async def call(who: str, result: Awaitable[T]) -> T:
    """Await a remote call's result with its errors mapped."""
    with mapped(who):
        return await result


def translate(error: RayError, who: str) -> SluiceError:
    """The error of ours that says what this one of Ray's means."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, SluiceError) else NodeError(f"{who} failed: {cause!r}")
    if isinstance(error, RayActorError | TaskCancelledError):
        return NodeLost(f"{who} is gone: {summary(error)}")
    return NodeLost(f"{who} cannot be reached: {summary(error)}")


def summary(error: RayError) -> str:
    """The one telling sentence of Ray's multi-line report of a death."""
    text = str(error)
    for marker in ("Worker exit detail:", "Death cause:", "The actor is dead because"):
        if marker in text:
            text = text.split(marker, 1)[1]
            break
    sentences = " ".join(text.split()).split(". ")
    return sentences[0].strip().rstrip(".")
