"""Admission: a checked body to its Jobs, or a clear refusal before any node is touched."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sluice.protocol.messages import GenerateRequest, InvalidRequest, SamplingParams
from sluice.router.common.errors import too_long
from sluice.router.reading.schemas import ChatRequest, CompletionRequest, GenerationSchema
from sluice.router.service import Job, RouterService
from sluice.router.text.answers.conversation import NO_LANDMARKS, Landmarks

MAX_SCORED_TOKENS = 16_384


@dataclass(frozen=True)
class Asked:
    """A request as it was read. arrived: time.monotonic(). grammar: what the answer follows.

    traceparent, landmarks: see Job.
    """

    request_id: str
    schema: ChatRequest | CompletionRequest
    prompts: list[tuple[int, ...]]
    arrived: float
    traceparent: str
    grammar: str = ""
    landmarks: Landmarks = NO_LANDMARKS

    @property
    def is_chat(self) -> bool:
        return isinstance(self.schema, ChatRequest)

    @property
    def stop(self) -> tuple[str, ...]:
        """Where a call has to come there is no text that could be stopped."""
        schema = self.schema
        forced = isinstance(schema, ChatRequest) and schema.must_call is not None
        return () if forced else tuple(schema.stop)


def make_jobs(service: RouterService, asked: Asked) -> list[Job]:
    """Jobs for `n` answers to each prompt, in the order of their choices' indexes.

    Raises InvalidRequest if one can never fit, Unavailable if no node is ready.
    """
    schema = asked.schema
    prompt_field = "messages" if asked.is_chat else "prompt"
    for prompt in asked.prompts:
        _check_length(service, len(prompt), prompt_field)
        _check_scored(schema, len(prompt), prompt_field)
        check_token_ids(service, prompt, prompt_field)
    check_token_ids(service, schema.stop_token_ids, "stop_token_ids")
    check_token_ids(service, list(schema.logit_bias), "logit_bias")
    service.check_ready()
    if asked.grammar and schema.min_tokens:
        raise InvalidRequest(
            "min_tokens: a tool call ends where it is complete, leave it out", param="min_tokens"
        )
    seed = _seed(schema.seed)
    requests = [
        (prompt, sampling if answer == 0 else replace(sampling, seed=(seed + answer) % 2**63))
        for prompt in asked.prompts
        for sampling in [_sampling(service, asked, len(prompt), prompt_field, seed)]
        for answer in range(schema.n)
    ]
    return [
        Job(
            GenerateRequest(
                _part_id(asked.request_id, index, len(requests)),
                prompt,
                sampling,
                priority=schema.priority,
                cache_salt=_salt(service, schema),
            ),
            asked.stop,
            asked.arrived,
            asked.traceparent,
            asked.landmarks,
            schema.only_prompt,
        )
        for index, (prompt, sampling) in enumerate(requests)
    ]


def _part_id(request_id: str, index: int, num_parts: int) -> str:
    return request_id if num_parts == 1 else f"{request_id}-{index}"


def _sampling(
    service: RouterService, asked: Asked, num_prompt_tokens: int, prompt_field: str, seed: int
) -> SamplingParams:
    schema = asked.schema
    max_tokens = _max_tokens(service, schema, num_prompt_tokens, prompt_field)
    stop_token_ids = _stop_token_ids(service, schema)
    _check_min_tokens(service, schema, max_tokens, len(stop_token_ids))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=schema.temperature,
        top_p=schema.top_p,
        top_k=min(max(0, schema.top_k), service.checkpoint.vocab_size),
        min_p=schema.min_p,
        stop_token_ids=stop_token_ids,
        min_tokens=schema.min_tokens,
        presence_penalty=schema.presence_penalty,
        frequency_penalty=schema.frequency_penalty,
        repetition_penalty=schema.repetition_penalty,
        logit_bias=tuple(schema.logit_bias.items()),
        num_top_logprobs=schema.num_top_logprobs,
        num_prompt_logprobs=schema.num_prompt_logprobs,
        json_schema=schema.response_format.schema_text or "",
        seed=seed,
        grammar=asked.grammar,
    )


def check_token_ids(service: RouterService, token_ids: Sequence[int], field: str) -> None:
    """Raises InvalidRequest for a token the model does not have."""
    vocab_size = service.checkpoint.vocab_size
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    index = next(i for i, token_id in enumerate(token_ids) if not 0 <= token_id < vocab_size)
    shown = reprlib.repr(token_ids[index])
    raise InvalidRequest(
        f"{field}.{index}: token id {shown}, expected 0 to {vocab_size - 1}", param=field
    )


def _check_length(service: RouterService, num_prompt_tokens: int, field: str) -> None:
    """Raises InvalidRequest for a prompt that the model itself cannot take."""
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{field}: it has no token, expected at least one", param=field)
    max_model_len = service.checkpoint.max_model_len
    if num_prompt_tokens >= max_model_len:
        raise too_long(
            f"{field}: {num_prompt_tokens} tokens, expected at most {max_model_len - 1}",
            max_context_tokens=max_model_len,
            param=field,
        )


def _check_scored(schema: GenerationSchema, num_prompt_tokens: int, field: str) -> None:
    """Raises InvalidRequest for more log-probabilities than one answer should hold."""
    if schema.num_prompt_logprobs is not None and num_prompt_tokens > MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"{field}: {num_prompt_tokens} tokens whose log-probabilities are asked for, expected "
            f"at most {MAX_SCORED_TOKENS}; leave out echo or prompt_logprobs, or send parts",
            param=field,
        )


def _salt(service: RouterService, schema: GenerationSchema) -> str:
    """A prompt that is scored is computed whole: what is cached has no logits."""
    if schema.num_prompt_logprobs is not None:
        return secrets.token_hex(16)
    return service.secret_salt(schema.cache_salt)


def _check_min_tokens(
    service: RouterService, schema: GenerationSchema, max_tokens: int, num_stop_tokens: int
) -> None:
    """Raises InvalidRequest if the output cannot become that long."""
    if schema.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {schema.min_tokens}, expected at most max_tokens, {max_tokens}",
            param="min_tokens",
        )
    if schema.min_tokens and num_stop_tokens >= service.checkpoint.vocab_size:
        raise InvalidRequest(
            "min_tokens: every token is a stop token, so there is none to begin with",
            param="min_tokens",
        )


def _max_tokens(
    service: RouterService, schema: GenerationSchema, num_prompt_tokens: int, field: str
) -> int:
    """Output tokens to allow: what the client asks for, else what is usual, as far as it fits."""
    limit = min(service.checkpoint.max_model_len, _room(service))
    max_prompt_tokens = min(limit - 1, _prefill_room(service))
    if num_prompt_tokens > max_prompt_tokens:
        raise too_long(
            f"{field}: {num_prompt_tokens} tokens, expected at most {max_prompt_tokens}: "
            "no node of this deployment has pages for more",
            max_context_tokens=max_prompt_tokens + 1,
            param=field,
        )
    room = limit - num_prompt_tokens
    if schema.only_prompt:
        return 1  # the least that nodes can do
    max_tokens = schema.output_limit or min(schema.usual_max_tokens or room, room)
    if max_tokens > room:
        raise too_long(
            f"max_tokens: {max_tokens} after a prompt of {num_prompt_tokens} tokens, expected at "
            f"most {room}",
            max_context_tokens=limit,
            param="max_tokens",
        )
    return max_tokens


def _room(service: RouterService) -> int:
    """Longest request that some ready decode node can hold, in tokens."""
    return max(node.ledger.max_tokens for node in service.nodes.decode if node.ready)


def _prefill_room(service: RouterService) -> int:
    """Longest prompt that some ready prefill node can hold, in tokens."""
    return max(node.ledger.max_tokens for node in service.nodes.prefill if node.ready)


def _seed(given: int | None) -> int:
    """A seed of 63 bits. Without a seed from the client one is drawn here, once: a request that
    is repeated on other nodes then goes on with the same random draws."""
    return secrets.randbits(63) if given is None else given & (2**63 - 1)


def _stop_token_ids(service: RouterService, schema: GenerationSchema) -> tuple[int, ...]:
    eos = () if schema.ignore_eos else service.checkpoint.eos_token_ids
    return tuple(dict.fromkeys((*eos, *schema.stop_token_ids)))
