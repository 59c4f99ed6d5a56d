"""Readers: bodies to token ids, whatever is in them, without holding up anybody else.

Short ones are read at once, in the event loop. Longer ones are read in helper processes: `medium`
ones do not wait behind `long` ones. A checkpoint's own chat template is code that we do not know,
so it runs in helper processes only, of which short conversations have one to themselves.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sluice.protocol.config import ModelConfig
from sluice.protocol.messages import ConfigError, InvalidRequest
from sluice.router.common.errors import TemplateFailed
from sluice.router.common.offload import GivenUp, Offload
from sluice.router.reading import requests
from sluice.router.reading.parsing import parse
from sluice.router.reading.requests import Ids, Translate
from sluice.router.reading.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from sluice.router.text.answers.conversation import ChatOptions, Message
from sluice.router.text.chat import ChatEncoder

SHORT_BYTES = 4 << 10  # 3 ms with a large vocabulary; a helper process is reached in 0.3 ms
MEDIUM_BYTES = 128 << 10  # 0.1 s
MEDIUM_NICENESS = 5
LONG_NICENESS = 19  # what takes long in any case gives way to what others wait for
MAX_WAITING = 256
SHORT_LIMIT_S = 0.5  # of CPU time, for what takes some milliseconds
LIMIT_S = 2.0  # of CPU time, and as much more as the slowest text takes
BYTES_PER_S = 250_000
MAX_BYTES = 128 << 20
MAX_BYTES_PER_TOKEN = 600  # a text of a token's five characters, at what tokenizing takes for each

S = TypeVar("S", ChatRequest, CompletionRequest)
T = TypeVar("T")


@dataclass(frozen=True)
class Read(Generic[S]):
    """A body as it was read. shown: prompts that the answer begins with, none if it does not.

    num_bytes, schema: without the text of messages and prompts, if they were long. repeated: what
    the answer repeats of a request that was translated.
    """

    num_bytes: int
    schema: S
    prompts: list[Ids]
    shown: list[str]
    repeated: dict[str, Any]


class Readers:
    """For one checkpoint and one event loop. Helper processes start with their first body."""

    def __init__(self, encoder: ChatEncoder, model: ModelConfig, max_model_len: int) -> None:
        self._encoder = encoder

        def helpers(niceness: int, max_bytes: int = MAX_BYTES) -> Offload:
            return Offload(
                1,
                max_bytes=max_bytes,
                niceness=niceness,
                max_waiting=MAX_WAITING,
                setup=requests.load,
                setup_args=(model,),
            )

        self._short, self._medium = helpers(0), helpers(MEDIUM_NICENESS)
        self._long = helpers(LONG_NICENESS, max(MAX_BYTES, MAX_BYTES_PER_TOKEN * max_model_len))

    async def warm(self) -> None:
        """Start the helper processes that most requests need, if they need one.

        Raises ConfigError if the checkpoint's chat template cannot be used.
        """
        if not self._encoder.has_template:
            return
        await self._short.start()
        try:
            await self._short.run(requests.try_template, limit_s=SHORT_LIMIT_S)
        except GivenUp as error:
            raise ConfigError(
                f"chat template of the checkpoint: to render a few words, {error}"
            ) from error

    async def close(self) -> None:
        for helpers in (self._short, self._medium, self._long):
            await helpers.close()

    async def chat(self, body: bytes, translate: Translate = requests.as_chat) -> Read[ChatRequest]:
        """Raises InvalidRequest, or TemplateFailed."""
        if len(body) > SHORT_BYTES:
            rest, prompts, repeated = await self._read(
                requests.read_chat, body, translate, field="messages"
            )
            schema = parse(ChatRequest, rest)
            return Read(len(rest), schema, requests.unpacked(prompts), [], repeated)
        asked, schema = requests.translated(body, translate)
        with asked.in_its_words():
            ids = await self._chat_ids(*requests.conversation(schema))
        return Read(len(body), schema, [ids], [], asked.repeated)

    async def completion(self, body: bytes) -> Read[CompletionRequest]:
        """Raises InvalidRequest."""
        if len(body) <= SHORT_BYTES:
            schema = parse(CompletionRequest, body)
            prompts = requests.completion_ids(self._encoder, schema)
            shown = requests.shown_prompts(self._encoder, schema)
            return Read(len(body), schema, prompts, shown, {})
        rest, packed, shown = await self._read(requests.read_completion, body, field="prompt")
        schema = parse(CompletionRequest, rest)
        return Read(len(rest), schema, requests.unpacked(packed), shown, {})

    async def tokenize(self, body: bytes) -> tuple[str | None, int, str]:
        """The model asked for, the number of tokens, and the tokens as JSON."""
        if len(body) > SHORT_BYTES:
            return await self._read(requests.read_tokenize, body, field="prompt")
        schema = parse(TokenizeRequest, body)
        if schema.messages is None:
            ids = requests.text_ids(self._encoder, schema)
        else:
            ids = await self._chat_ids(*requests.conversation(schema))
        return schema.model, len(ids), json.dumps(ids)

    async def detokenize(self, body: bytes) -> tuple[str | None, str]:
        """The model asked for, and the text."""
        if len(body) > SHORT_BYTES:
            return await self._read(requests.read_detokenize, body, field="tokens")
        return requests.read_detokenize(self._encoder, body)

    async def _chat_ids(self, messages: list[Message], options: ChatOptions) -> Ids:
        """Of a short conversation."""
        if not self._encoder.has_template:
            return self._encoder.encode_chat(messages, options)
        job = (requests.with_encoder, requests.packed_chat_ids, messages, options)
        with self._limits_named("messages", is_short=True):
            return requests.unpacked([await self._short.run(*job, limit_s=SHORT_LIMIT_S)])[0]

    async def _read(self, read: Callable[..., T], body: bytes, *more: Any, field: str) -> T:
        """A reading of a longer body: `read(encoder, body, *more)`."""
        is_medium = len(body) <= MEDIUM_BYTES
        helpers = self._medium if is_medium else self._long
        limit_s = LIMIT_S + len(body) / BYTES_PER_S
        with self._limits_named(field, is_short=is_medium):
            return await helpers.run(requests.with_encoder, read, body, *more, limit_s=limit_s)

    @contextlib.contextmanager
    def _limits_named(self, field: str, *, is_short: bool) -> Iterator[None]:
        """Raises an error that says whose fault it is that a helper process reached a limit."""
        try:
            yield
        except GivenUp as error:
            if field == "messages" and is_short and self._encoder.has_template:
                raise TemplateFailed(
                    f"the checkpoint's chat template cannot render this conversation: {error}; use "
                    "/v1/completions, or give the checkpoint another chat template"
                ) from error
            raise InvalidRequest(
                f"{field}: too long to be read, or made to be: {error}", param=field
            ) from error
