"""Admission: a checked body to a Job, or a clear refusal before any node is touched."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from sluice.engine.protocol import GenerateRequest, InvalidRequest, SamplingParams
from sluice.router.schemas import GenerationSchema
from sluice.router.service import Job, RouterService

TOO_LONG = "context_length_exceeded"


def make_job(
    service: RouterService,
    schema: GenerationSchema,
    prompt_token_ids: Sequence[int],
    *,
    prompt_field: str,
    request_id: str,
    arrived: float,
) -> Job:
    """Raises InvalidRequest if the request can never fit, Unavailable if no node is ready."""
    _check_length(service, len(prompt_token_ids), prompt_field)
    check_token_ids(service, prompt_token_ids, prompt_field)
    check_token_ids(service, schema.stop_token_ids, "stop_token_ids")
    service.check_ready()
    max_tokens = _max_tokens(service, schema, len(prompt_token_ids), prompt_field)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=schema.temperature,
        top_p=schema.top_p,
        top_k=max(0, schema.top_k),
        seed=_seed(schema.seed),
        stop_token_ids=_stop_token_ids(service, schema),
    )
    request = GenerateRequest(request_id, tuple(prompt_token_ids), sampling)
    return Job(request, tuple(schema.stop), arrived)


def check_token_ids(service: RouterService, token_ids: Sequence[int], field: str) -> None:
    """Raises InvalidRequest for a token the model does not have."""
    vocab_size = service.checkpoint.vocab_size
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field}.{index}: token id {token_id}, expected 0 to {vocab_size - 1}",
                param=field,
            )


def _check_length(service: RouterService, num_prompt_tokens: int, field: str) -> None:
    """Raises InvalidRequest for a prompt that the model itself cannot take."""
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{field}: it has no token, expected at least one", param=field)
    max_model_len = service.checkpoint.max_model_len
    if num_prompt_tokens >= max_model_len:
        raise InvalidRequest(
            f"{field}: {num_prompt_tokens} tokens, expected at most {max_model_len - 1}: the "
            f"model's context is {max_model_len} tokens, prompt and output together",
            param=field,
            code=TOO_LONG,
        )


def _max_tokens(
    service: RouterService, schema: GenerationSchema, num_prompt_tokens: int, field: str
) -> int:
    """Output tokens to allow: what the client asks for, else all that fit."""
    limit = min(service.checkpoint.max_model_len, _room(service))
    max_prompt_tokens = min(limit - 1, _prefill_room(service))
    if num_prompt_tokens > max_prompt_tokens:
        raise InvalidRequest(
            f"{field}: {num_prompt_tokens} tokens, expected at most {max_prompt_tokens}: "
            "no node of this deployment has pages for more",
            param=field,
            code=TOO_LONG,
        )
    max_tokens = schema.output_limit or limit - num_prompt_tokens
    if num_prompt_tokens + max_tokens > limit:
        raise InvalidRequest(
            f"max_tokens: {max_tokens} after a prompt of {num_prompt_tokens} tokens, expected at "
            f"most {limit - num_prompt_tokens}: a request can have {limit} tokens in all",
            param="max_tokens",
            code=TOO_LONG,
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
