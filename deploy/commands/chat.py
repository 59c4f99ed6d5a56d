"""`sluice chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from sluice.deploy.common.http_client import RouterClient
from sluice.protocol.messages import InvalidRequest

Message = dict[str, Any]


def answer(
    router: RouterClient, console: Console, messages: list[Message], **sampling: object
) -> str:
    """Print the answer to `messages` as it streams in, and return it."""
    pieces = []
    for piece in router.stream_chat(messages, **sampling):
        pieces.append(piece)
        console.print(piece, end="", markup=False, highlight=False)
    console.print()
    return "".join(pieces)


def converse(
    router: RouterClient, console: Console, messages: list[Message], **sampling: object
) -> None:
    """Read lines and answer them until end of input; Ctrl-C stops an answer, not the talk."""
    console.print(f"[dim]{router.model()} at {router.url}; an empty line or Ctrl-D ends it[/]")
    while line := _read(console):
        messages.append({"role": "user", "content": line})
        try:
            text = answer(router, console, messages, **sampling)
        except KeyboardInterrupt:
            console.print("\n[dim]stopped[/]")
            messages.pop()
        except InvalidRequest as error:  # for example: the conversation became too long
            console.print(f"[red]{error}[/]", highlight=False)
            messages.pop()
        else:
            messages.append({"role": "assistant", "content": text})


def _read(console: Console) -> str:
    try:
        return console.input("[bold]you>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""
