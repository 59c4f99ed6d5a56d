"""What clients add unasked changes nothing; what they replay in other words says the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.protocol.messages import InvalidRequest
from sluice.router.reading.parsing import parse
from sluice.router.reading.schemas import ChatRequest

USER = {"role": "user", "content": "the cat"}
ANSWER = {"role": "assistant", "content": "and the hat"}
NOTES = {
    "annotations": [], "reasoning_details": [{"type": "reasoning.text", "text": "x"}],
    "provider_specific_fields": {"a": None}, "thinking_blocks": [{"signature": "x"}], "id": "msg-1",
    "type": "message", "cache_control": {"type": "ephemeral"}, "metadata": {}, "refusal": None,
    "audio": None, "function_call": None, "status": "completed", "parsed": None, "prefix": False,
    "tool_calls": [], "additional_kwargs": {}, "created_at": 5, "no_such_field": [[{}]],
}  # fmt: skip


@pytest.fixture
def prompt_of(world):
    """The prompt that a chat becomes, as text."""
    seen = world.seen_requests()

    async def ask(messages, **fields) -> str:
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, **fields}
        answer = await world.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return world.tokenizer.decode(seen[-1].prompt_token_ids, skip_special_tokens=False)

    return ask


@pytest.mark.parametrize("field", NOTES)
async def test_notes_of_other_servers_on_messages_change_no_prompt(prompt_of, field):
    plain = await prompt_of([USER, ANSWER, USER])
    note = {field: NOTES[field]}
    assert await prompt_of([USER | note, ANSWER | note, USER | note]) == plain
    part = note | {"type": "text", "text": USER["content"]}
    assert await prompt_of([USER | {"content": [part]}, ANSWER, USER]) == plain


SAYINGS = {
    "content is null": {"content": None},
    "content is no part": {"content": []},
    "only thought": {"content": None, "reasoning": "hm"},
}


@pytest.mark.parametrize("answer", SAYINGS.values(), ids=SAYINGS)
async def test_an_answer_that_says_nothing_is_an_empty_one(prompt_of, answer):
    assert await prompt_of([USER, {"role": "assistant", **answer}, USER]) == (
        "<bos><user>the cat<assistant><user>the cat<assistant>"
    )


@pytest.mark.parametrize(
    "answer",
    [
        {"content": [{"type": "output_text", "text": "and the hat", "annotations": []}]},
        {"content": [{"type": "refusal", "refusal": "and the hat"}]},
        {"content": None, "refusal": "and the hat"},
    ],
    ids=str,
)
async def test_an_answer_in_other_words_is_the_same_answer(prompt_of, answer):
    plain = await prompt_of([USER, ANSWER, USER])
    assert await prompt_of([USER, {"role": "assistant", **answer}, USER]) == plain


TOP_LEVEL = [
    {"stream_options": None}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": None},
    {"user": "me"}, {"store": True}, {"metadata": {"a": "b"}}, {"prediction": None},
    {"prediction": {"type": "content", "content": "x"}}, {"web_search_options": None},
    {"audio": None}, {"functions": None}, {"verbosity": "medium"}, {"use_beam_search": False},
    {"length_penalty": 1.0}, {"skip_special_tokens": True}, {"continue_final_message": False},
    {"service_tier": "auto"}, {"safety_identifier": "x"}, {"logprobs": False},
]  # fmt: skip


@pytest.mark.parametrize("fields", TOP_LEVEL, ids=str)
async def test_fields_without_effect_are_let_through(prompt_of, fields):
    assert await prompt_of([USER], **fields) == "<bos><user>the cat<assistant>"


@pytest.mark.parametrize(
    "fields",
    [{"web_search_options": {}}, {"verbosity": "low"}, {"length_penalty": 0.5}, {"audio": {}},
     {"continue_final_message": True}, {"no_such_field": 1}, {"reasoning": {"effort": "high"}}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["chat", "complete"])
async def test_fields_that_would_change_an_answer_are_refused_by_name(world, kind, fields):
    answer = await getattr(world, kind)(**fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("wanted", [True, False])
async def test_no_padding_is_sent_whether_or_not_it_is_asked_for(world, events, kind, wanted):
    options = {"include_obfuscation": wanted}
    stream, done = events((await getattr(world, kind)(stream=True, stream_options=options)).text)
    assert done and not any("obfuscation" in event or "usage" in event for event in stream)


@pytest.mark.parametrize("kind", ["chat", "complete"])
@pytest.mark.parametrize("at_the_end", [True, False])
async def test_usage_is_told_in_every_chunk_where_it_is_asked_for(world, events, kind, at_the_end):
    options = {"continuous_usage_stats": True, "include_usage": at_the_end}
    answer = await getattr(world, kind)(max_tokens=6, stream=True, stream_options=options)
    stream, done = events(answer.text)
    counts = [event["usage"]["completion_tokens"] for event in stream]
    assert done and counts == sorted(counts) and counts[0] < counts[-1] == 6
    assert (stream[-1]["choices"] == []) is at_the_end
    plain = (await getattr(world, kind)(max_tokens=6)).json()["usage"]
    assert stream[-1]["usage"] == plain


TEMPLATE = (
    "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }}\n{% endfor %}"
    "{{ style }}{{ ' not thinking' if enable_thinking is false else '' }}"
    "{{ ' null' if style is none else '' }}"
)


@pytest.fixture
async def with_template(make_world, checkpoint_writer, tmp_path):
    world = await make_world(folder=checkpoint_writer(tmp_path / "own", chat_template=TEMPLATE))
    world.add_prefill()
    world.add_decode()
    seen = world.seen_requests()

    async def ask(messages=(USER,), **fields):
        body = {"model": "tiny", "messages": list(messages), "max_tokens": 2, **fields}
        answer = await world.http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return answer.status_code, answer.json()["error"]["param"]
        return world.tokenizer.decode(seen[-1].prompt_token_ids, skip_special_tokens=False)

    return ask


async def test_a_template_is_given_what_an_answer_thought_in_either_spelling(with_template):
    for field in ("reasoning", "reasoning_content"):
        assert await with_template([USER, ANSWER | {field: "hm"}]) == "|the cat\nhm|and the hat\n"
    both = {"reasoning": "no", "reasoning_content": "hm"}
    assert await with_template([USER, ANSWER | both]) == "|the cat\nhm|and the hat\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"style": "terse"}, "terse"),
        ({"style": 5}, "5"),
        ({"style": "a", "enable_thinking": False}, "a not thinking"),
        ({"style": None}, "None null"),
        ({"unheard_of": True}, ""),
    ],
    ids=str,
)
async def test_a_template_gets_the_clients_arguments(with_template, arguments, text):
    assert await with_template(chat_template_kwargs=arguments) == "|the cat\n" + text


@pytest.mark.parametrize(
    "arguments",
    [5, [], "x", {"messages": "x"}, {"tools": None}, {"bos_token": "x"}, {"_x": 1}, {"x": [1]},
     {"add_generation_prompt": False}, {"x": {"y": 1}}, {"range": 1}, {"raise_exception": 1},
     {f"a{i}": i for i in range(65)}],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
async def test_arguments_that_are_not_the_clients_to_set_are_refused(with_template, arguments):
    assert await with_template(chat_template_kwargs=arguments) == (400, "chat_template_kwargs")


def test_any_message_is_read_or_refused_whatever_is_in_its_other_fields():
    """As other servers may yet invent fields."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=4,
    )
    fields = st.sampled_from(
        ["reasoning", "refusal", "tool_calls", "prefix", "content", "audio", "name", "x", "tools"]
    )

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(
        st.sampled_from(["user", "assistant", "tool", "system"]), st.dictionaries(fields, values)
    )
    def read(role, extra):
        message = {"role": role, "content": "a", **extra}
        body = json.dumps({"model": "m", "messages": [message]}).encode()
        try:
            parse(ChatRequest, body)
        except InvalidRequest as error:
            assert error.param.startswith("messages.0")

    read()
