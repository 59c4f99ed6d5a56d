"""Checks of a request on the node that takes it: past them no number raises where a step computes.

The router has refused all that is beyond the limits, in its schemas; a node does not rely on it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from sluice.protocol.limits import BOUNDS, MAX_BIAS, MAX_BIASES, MAX_TOP_LOGPROBS
from sluice.protocol.messages import GenerateRequest, InvalidRequest, SamplingParams


def checked_tokens(request: GenerateRequest, *, vocab_size: int, max_model_len: int) -> array[int]:
    """The request's tokens, prompt and emitted, once all it asks is found to be within limits.

    Raises InvalidRequest naming the field, its value and the expectation.
    """
    sampling = request.sampling
    _check_numbers(sampling)
    _check_lengths(request, max_model_len)
    _check_ids(_ids(sampling.stop_token_ids, "stop_token_ids"), "stop_token_ids", vocab_size)
    _check_biases(sampling, vocab_size)
    token_ids = _ids(request.token_ids, "prompt")
    _check_ids(token_ids, "prompt", vocab_size)
    return token_ids


def _check_numbers(sampling: SamplingParams) -> None:
    for name, (least, most) in BOUNDS.items():
        value = getattr(sampling, name)
        if not (_is_number(value) and least <= value <= most):
            raise _invalid(name, value, f"a number from {least:g} to {most:g}")
    if sampling.top_p == 0:
        raise _invalid("top_p", sampling.top_p, "a number above 0")
    if not (_is_whole(sampling.top_k) and 0 <= sampling.top_k < 2**31):
        raise _invalid("top_k", sampling.top_k, "a whole number from 0")
    if not _is_whole(sampling.seed):
        raise _invalid("seed", sampling.seed, "a whole number")
    for name in ("num_top_logprobs", "num_prompt_logprobs"):
        num_top = getattr(sampling, name)
        if num_top is not None and not (_is_whole(num_top) and 0 <= num_top <= MAX_TOP_LOGPROBS):
            raise _invalid("logprobs", num_top, f"0 to {MAX_TOP_LOGPROBS}")


def _check_lengths(request: GenerateRequest, max_model_len: int) -> None:
    sampling, num_prompt_tokens = request.sampling, len(request.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise _invalid("prompt", (), "at least one token")
    most = max_model_len - num_prompt_tokens
    if not (_is_whole(sampling.max_tokens) and 1 <= sampling.max_tokens <= most):
        raise _invalid(
            "max_tokens", sampling.max_tokens, f"1 to {most} after {num_prompt_tokens} tokens"
        )
    if len(request.emitted_token_ids) >= sampling.max_tokens:
        raise _invalid(
            "max_tokens", sampling.max_tokens, f"more than the {len(request.emitted_token_ids)} out"
        )
    if not (_is_whole(sampling.min_tokens) and 0 <= sampling.min_tokens <= sampling.max_tokens):
        raise _invalid("min_tokens", sampling.min_tokens, f"0 to {sampling.max_tokens}")


def _check_biases(sampling: SamplingParams, vocab_size: int) -> None:
    biases = sampling.logit_bias
    if len(biases) > MAX_BIASES:
        raise _invalid("logit_bias", len(biases), f"at most {MAX_BIASES} biases")
    _check_ids(_ids([token_id for token_id, _ in biases], "logit_bias"), "logit_bias", vocab_size)
    for token_id, bias in biases:
        if not (_is_number(bias) and -MAX_BIAS <= bias <= MAX_BIAS):
            raise _invalid(f"logit_bias.{token_id}", bias, f"-{MAX_BIAS:g} to {MAX_BIAS:g}")


def _ids(token_ids: Sequence[int], field: str) -> array[int]:
    """Token ids of a message; whatever is none raises InvalidRequest."""
    try:
        return array("q", token_ids)
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"{field}: not all are token ids: {error}", param=field) from error


def _check_ids(token_ids: array[int], field: str, vocab_size: int) -> None:
    if not token_ids:
        return
    values = np.frombuffer(token_ids, dtype=np.int64)
    for token_id in (int(values.min()), int(values.max())):
        if not 0 <= token_id < vocab_size:
            raise _invalid(field, token_id, f"token ids from 0 to {vocab_size - 1}")


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _invalid(field: str, value: Any, expectation: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {_shown(value)}, expected {expectation}", param=field.split(".")[0]
    )


def _shown(value: Any) -> str:
    """Short, whatever it is: Python itself refuses to write out a number of 5,000 digits."""
    if type(value) is int and value.bit_length() > 128:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)[:60]
