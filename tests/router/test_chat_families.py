"""Tools and thoughts on a model with a template of its own, through HTTP."""

from __future__ import annotations

import json

import pytest

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} say <tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls"
    " else '' }}{% endfor %}<assistant>{% if enable_thinking is not false %}<think>\n{% endif %}"
    "{# </think> #}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture
async def world(make_world, checkpoint_writer, tmp_path):
    folder = checkpoint_writer(tmp_path / "hermes", chat_template=TEMPLATE)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 4096}))
    world = await make_world(folder=folder)
    world.add_prefill(num_pages=256, max_model_len=4096)
    world.add_decode(num_pages=256, max_model_len=4096)
    return world


async def test_a_thought_and_a_call_are_read_streamed_or_whole(world, events):
    world.script.plan = (*world.ids(f"hm\n</think>\n\nOne moment.\n{CALL}"), 1)
    fields = {"max_tokens": 300, "tools": TOOLS}
    seen = world.seen_requests()
    [choice] = (await world.chat(**fields)).json()["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "One moment.")
    assert choice["finish_reason"] == "tool_calls"
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"city": "Bern"}'}
    prompt = world.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith(json.dumps(TOOLS)) and prompt.endswith("<assistant><think>\n")
    stream, done = events((await world.chat(**fields, stream=True)).text)
    deltas = [event["choices"][0]["delta"] for event in stream]
    for field in ("reasoning_content", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == message[field]
    [piece] = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert done and piece["function"] == call["function"]


async def test_thinking_switches_the_templates_own_variable(world):
    world.script.plan = (*world.ids("Hello"), 1)
    seen = world.seen_requests()
    answer = (await world.chat(thinking={"type": "disabled"})).json()["choices"][0]["message"]
    assert answer == {"role": "assistant", "content": "Hello"}
    prompt = world.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<assistant>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
    ids=str,
)
async def test_what_is_not_enforced_is_refused_by_name(world, fields, param):
    answer = await world.chat(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
