"""Tools and thoughts on a model with a template of its own, through HTTP."""

from __future__ import annotations

import json

import pytest
from grammar_walks import passes_through
from tokenizers import Tokenizer

from sluice.protocol.grammar import Grammars

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
    pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert done and pieces[0]["name"] == "f" and len(pieces) > 5  # as they come
    assert "".join(p["arguments"] for p in pieces) == call["function"]["arguments"]


async def test_thinking_switches_the_templates_own_variable(world):
    world.script.plan = (*world.ids("Hello"), 1)
    seen = world.seen_requests()
    answer = (await world.chat(thinking={"type": "disabled"})).json()["choices"][0]["message"]
    assert answer == {"role": "assistant", "content": "Hello"}
    prompt = world.tokenizer.decode(seen[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<assistant>")


async def test_a_choice_that_the_template_does_not_know_is_refused_by_name(world):
    answer = await world.chat(reasoning_effort="high")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reasoning_effort")


@pytest.mark.parametrize(
    ("fields", "passes", "fails"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, CALL, "Hello"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "Hello", f"{CALL}{CALL}"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "{}", "Hello"),
        ({"response_format": {"type": "json_object"}}, "{}", "Hello"),
    ],
    ids=str,
)
async def test_what_the_answer_has_to_follow_goes_to_the_nodes(world, fields, passes, fails):
    """The prompt has opened the reasoning: what has to be comes after it."""
    seen, it = world.seen_requests(), world.tokenizer
    world.script.plan = (*world.ids(f"hm</think>{passes}"), 1)
    answer = await world.chat(**fields, max_tokens=300)
    assert answer.status_code == 200
    message = answer.json()["choices"][0]["message"]
    assert message["reasoning_content"] == "hm"
    folder = world.service.config.model.path
    grammars = Grammars(folder, vocab_size=it.get_vocab_size(), eos_token_ids=(1,))
    for text, good in (
        (f"hm</think>{passes}", True),
        (f"hm</think>{fails}", False),
        (passes, False),
    ):
        assert passes_through(it, grammars.matcher_for(seen[0].sampling), text) is good, text


@pytest.fixture
async def marked(make_world, checkpoint_writer, tmp_path):
    """A world of the Mistral family whose markers are special tokens."""
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
    folder = checkpoint_writer(tmp_path / "mistral", chat_template=template)
    it = Tokenizer.from_file(str(folder / "tokenizer.json"))
    it.add_special_tokens(["[TOOL_CALLS]", "<think>", "</think>"])
    it.save(str(folder / "tokenizer.json"))
    path = folder / "config.json"
    config = {"max_position_embeddings": 4096, "vocab_size": it.get_vocab_size()}
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    world = await make_world(folder=folder)
    world.add_prefill(num_pages=256, max_model_len=4096)
    world.add_decode(num_pages=256, max_model_len=4096)
    return world


@pytest.mark.parametrize("opened", [True, False])
async def test_special_tokens_tell_the_parts_of_an_answer(marked, events, opened):
    """They have no text for a client, but the parser sees them; stop strings leave them alone."""
    call = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "stop"}}]'
    said = f"{'' if opened else '<think>'}\nstop here\n</think>\n\nOne moment.{call}"
    marked.script.plan = (*marked.ids(said), 1)
    thinking = {} if opened else {"thinking": {"type": "disabled"}}
    fields = {"max_tokens": 300, "tools": TOOLS, "stop": ["stop"], **thinking}
    whole = (await marked.chat(**fields)).json()
    [choice] = whole["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("stop here", "One moment.")
    assert choice["finish_reason"] == "tool_calls"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "stop"}'}
    num_reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == len(marked.ids("\nstop here\n")) + (not opened)
    stream, done = events((await marked.chat(**fields, stream=True)).text)
    said = "".join(e["choices"][0]["delta"].get("content") or "" for e in stream if e["choices"])
    assert done and said == message["content"]
