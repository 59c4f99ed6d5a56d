"""Every bad request gets a 4xx in OpenAI's shape that names the field, and touches no node."""

from __future__ import annotations

import re

import pytest

BAD_FIELDS = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids.1"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"min_p": 1.5}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-60}, "repetition_penalty"),
    ({"repetition_penalty": 11}, "repetition_penalty"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9}, "min_tokens"),
    ({"min_tokens": 1, "response_format": {"type": "json_object"}}, "min_tokens"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format",
    ),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"extra": 1}}, "stream_options.extra"),
    ({"model": 5}, "model"),
]
BAD_PROMPTS = [5, "", [], [[]], ["a", ""], ["a", [1]], [[1], []], [1, None], [1, "a"], [-1],
               [[1], [10**6]], {"a": 1}, ["a"] * 129]  # fmt: skip
CALLED = {"name": "f", "arguments": "{}"}
BAD_MESSAGES = [
    [],
    "hello",
    [{"role": "user"}],
    [{"role": "nobody", "content": "a"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    [{"role": "user", "content": "a", "tool_calls": [{"function": CALLED}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    [{"role": "user", "content": "a", "reasoning_content": "b"}],
    [{"role": "user", "content": "a", "task": "nothing"}],
    [{"role": "assistant", "content": "a", "function_call": CALLED}],
    [{"role": "assistant", "content": "a", "audio": {"id": "b"}}],
    [{"role": "tool", "content": "the template refuses this"}],
]


def check(answer, status: int, param: str | None = None) -> dict:
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer.headers["x-request-id"]
    assert param is None or error["param"] == param
    return error


@pytest.mark.parametrize(("fields", "param"), BAD_FIELDS, ids=lambda value: str(value)[:40])
async def test_bad_fields_are_refused_by_name(world, fields, param):
    error = check(await world.complete(**fields), 400, param)
    assert param.split(".")[0] in error["message"]
    assert not world.decodes["decode-0"].calls and not world.prefills["prefill-0"].calls


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=str)
async def test_bad_prompts_are_refused(world, prompt):
    check(await world.complete(prompt), 400, "prompt")


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda value: str(value)[:60])
async def test_bad_messages_are_refused(world, messages):
    body = {"model": "tiny", "messages": messages}
    error = check(await world.http.post("/v1/chat/completions", json=body), 400)
    assert error["param"].startswith("messages")


async def test_min_tokens_needs_a_token_that_does_not_stop(world):
    everything = list(range(world.service.checkpoint.vocab_size))
    check(await world.complete(min_tokens=1, stop_token_ids=everything), 400, "min_tokens")


BAD_CHAT_FIELDS = [
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"reasoning_effort": "endless"}, "reasoning_effort"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT_FIELDS, ids=lambda value: str(value)[:40])
async def test_bad_chat_fields_are_refused_by_name(world, fields, param):
    check(await world.chat(**fields), 400, param)
    assert not world.decodes["decode-0"].calls and not world.prefills["prefill-0"].calls


async def test_neutral_and_ignored_fields_are_let_through(world):
    fields = {"n": 1, "user": "me", "metadata": {"a": "b"}, "store": False, "logprobs": None,
              "presence_penalty": 0.0, "logit_bias": {}, "stop": None, "seed": None}  # fmt: skip
    assert (await world.complete(**fields)).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b"\xff", b'{"model": "\\ud800"}',
                                  b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
                                  b"[" * 100_000])  # fmt: skip
async def test_bodies_that_are_no_json_object_are_refused(world, body):
    headers = {"content-type": "application/json"}
    check(await world.http.post("/v1/completions", content=body, headers=headers), 400)


async def test_wrong_content_type_and_oversized_body(world):
    check(await world.http.post("/v1/completions", content=b"{}"), 415)
    headers = {"content-type": "application/json"}
    big = b" " * ((16 << 20) + 1)
    check(await world.http.post("/v1/completions", content=big, headers=headers), 413)

    async def unannounced():
        for _ in range(17):
            yield b" " * (1 << 20)

    check(await world.http.post("/v1/completions", content=unannounced(), headers=headers), 413)


async def test_unknown_paths_methods_and_models(world):
    check(await world.http.get("/v1/nothing"), 404)
    check(await world.http.get("/v1/completions"), 405)
    assert check(await world.complete(model="other"), 404)["code"] == "model_not_found"
    check(await world.http.get("/v1/models/other"), 404)


async def test_prompt_over_the_limit_is_refused_before_any_node(world):
    longest = world.service.checkpoint.max_model_len
    assert check(await world.complete([9] * longest), 400)["code"] == "context_length_exceeded"
    error = check(await world.complete([9] * 250, max_tokens=7), 400, "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert (await world.complete([9] * (longest - 1), max_tokens=1)).status_code == 200
    await world.until(world.quiescent)
    assert world.decodes["decode-0"].calls == ["reserve", "release"]


@pytest.mark.parametrize(
    ("kind", "content", "max_tokens"),
    [
        ("chat", "a b " * 130, 1),
        ("chat", "a b " * 100, 60),
        ("chat", "a" * 100_000, 1),
        ("complete", [9] * 256, 1),
        ("complete", [9] * 200, 57),
        ("complete", [[9], [9] * 300], 1),
        ("complete", "a" * 5000, 1),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.parametrize(("num_pages", "limit"), [(64, 256), (10, 160)])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_refusal_of_a_length_has_the_words_that_clients_look_for(
    make_world, kind, content, max_tokens, num_pages, limit, stream
):
    world = await make_world()
    world.add_prefill()
    world.add_decode(num_pages=num_pages)
    answer = await getattr(world, kind)(content, max_tokens=max_tokens, stream=stream)
    error = check(answer, 400)
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    said = re.search(r"This model's maximum context length is (\d+) tokens", error["message"])
    assert int(said[1]) in (limit, 256)


async def test_a_request_no_node_can_hold_is_refused_before_any_node(make_world):
    world = await make_world()
    world.add_prefill(num_pages=3)
    world.add_decode(num_pages=4)
    check(await world.complete([9] * 40, max_tokens=25), 400, "max_tokens")
    check(await world.complete([9] * 49, max_tokens=1), 400, "prompt")
    assert (await world.complete([9] * 48, max_tokens=16)).status_code == 200


async def test_without_a_chat_template_only_completions_work(
    make_world, checkpoint_writer, tmp_path
):
    world = await make_world(folder=checkpoint_writer(tmp_path / "bare", chat_template=None))
    world.add_prefill()
    world.add_decode()
    assert "chat template" in check(await world.chat(), 400, "messages")["message"]
    assert (await world.complete()).status_code == 200


async def test_a_bug_is_an_internal_error_with_shape_and_id(world):
    world.prefills["prefill-0"].faults = [ZeroDivisionError("bug")]
    check(await world.complete(), 500)
    await world.until(world.quiescent)
    world.prefills["prefill-0"].faults = [ZeroDivisionError("bug")]
    check(await world.complete(stream=True), 500)
