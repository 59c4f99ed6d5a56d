"""Generation: from an HTTP request to an answer, whichever API both are written in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sluice.router.openai.admission import Asked, make_jobs
from sluice.router.openai.choices import ChatOutput
from sluice.router.openai.merge import merged
from sluice.router.openai.streaming import Ending, Event, EventStream, unless_gone
from sluice.router.output_text import Delta
from sluice.router.reading.requests import Translate, as_chat, conversation, fields_named
from sluice.router.reading.schemas import ChatRequest
from sluice.router.service import Job, RouterService

LONG_BODY_BYTES = 32 << 10  # above this, encoding takes long enough to hold up other streams

T = TypeVar("T")


async def read_as(
    service: RouterService, request: Request, reader: Callable[[bytes], Awaitable[T]]
) -> T:
    """The request's body as the reader reads it; nobody holds the body afterwards."""
    async with service.bodies.read(request) as body:
        return await reader(body)


@dataclass(frozen=True)
class Conversation:
    """A conversation that was read, whichever API it came over. repeated: see Read."""

    asked: Asked
    schema: ChatRequest
    repeated: dict[str, Any]
    output: Callable[[], ChatOutput]  # one for each answer


async def read_conversation(
    service: RouterService,
    request: Request,
    translate: Translate = as_chat,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Conversation:
    """names: see Translated. Raises InvalidRequest, UnknownModel or TemplateFailed."""
    arrived = time.monotonic()
    read = await read_as(service, request, lambda body: service.readers.chat(body, translate))
    schema = read.schema
    service.check_model(schema.model)
    messages, options = conversation(schema)
    options = service.encoder.with_prompt_end(options, read.prompts[0])
    with fields_named(names):
        grammar = await _encode(read.num_bytes, lambda: service.encoder.grammar(messages, options))
    asked = Asked(
        request.state.request_id,
        schema,
        read.prompts,
        arrived,
        request.headers.get("traceparent", ""),
        grammar,
        service.encoder.landmarks(messages, options),
    )

    def output() -> ChatOutput:
        parser = service.encoder.parser(messages, options)
        return ChatOutput(parser, must_call=schema.must_call is not None)

    return Conversation(asked, schema, read.repeated, output)


class Form(Ending, Protocol):
    """The shape of an answer over one API, streamed or whole."""

    def whole(self, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The answer in one object. deltas: those of each of its outputs."""
        ...

    def events(self, index: int, delta: Delta) -> list[Event]:
        """What one output's next delta adds to the stream."""
        ...

    def end(self) -> list[Event]:
        """What ends a stream that has come to its end."""
        ...


async def respond(
    service: RouterService, request: Request, asked: Asked, form: Callable[[int], Form]
) -> Response:
    """Let it be generated. form: for so many outputs."""
    schema = asked.schema
    await service.grammars.check(schema.response_format.schema_text or "", asked.grammar)
    jobs = make_jobs(service, asked)
    answer = form(len(jobs))
    if schema.stream:
        return EventStream(_events(service, jobs, answer), answer)
    return JSONResponse(await unless_gone(request.receive, _whole(service, jobs, answer)))


async def _whole(service: RouterService, jobs: list[Job], answer: Form) -> dict[str, Any]:
    deltas: list[list[Delta]] = [[] for _ in jobs]
    async with contextlib.aclosing(merged([service.answer(job) for job in jobs])) as stream:
        async for index, delta in stream:
            deltas[index].append(delta)
    return answer.whole(deltas)


async def _events(
    service: RouterService, jobs: list[Job], answer: Form
) -> AsyncGenerator[Event, None]:
    """The stream's events; the first comes with the first token."""
    async with contextlib.aclosing(merged([service.answer(job) for job in jobs])) as stream:
        async for index, delta in stream:
            for event in answer.events(index, delta):
                yield event
    for event in answer.end():
        yield event


async def _encode(num_bytes: int, encode: Callable[[], T]) -> T:
    """Run an encoding where it holds nobody up."""
    return encode() if num_bytes < LONG_BODY_BYTES else await asyncio.to_thread(encode)
