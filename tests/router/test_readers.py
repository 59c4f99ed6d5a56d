"""Bodies become the same token ids wherever they are read, and nothing in them holds others up."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from sluice.protocol.config import ModelConfig
from sluice.protocol.messages import ConfigError, InvalidRequest
from sluice.router.http.server import serve
from sluice.router.reading.readers import MEDIUM_BYTES, SHORT_BYTES, Readers
from sluice.router.reading.requests import conversation
from sluice.router.reading.schemas import ChatRequest
from sluice.router.text.chat import ChatEncoder
from sluice.router.text.checkpoint import read_checkpoint
from sluice.router.text.v4.words import BOS, CLOSE_CALLS, CONTROL_TOKENS, EOS, OPEN_CALLS

LENGTHS = (10, SHORT_BYTES, MEDIUM_BYTES)  # a body is longer than the text in it
PIECES = [
    "the ",
    "cat",
    "\n\n",
    "  ",
    "é",
    "☕",
    "深度",
    "\u0000",
    "1234",
    "</s>",
    "<user>",
    "'s",
    "\t",
]
NOISE = "".join(map(chr, range(0x20, 0x250))) + "\U0001f408\u202e"


def config_of(folder, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


@pytest.fixture(scope="module", params=["template", "v4"])
def folder(request, tmp_path_factory, checkpoint_writer):
    """Of a model with a long context, with a chat template of its own or with V4's format."""
    folder = tmp_path_factory.mktemp("readers") / request.param
    if request.param == "template":
        checkpoint_writer(folder)
        config_of(folder, max_position_embeddings=1 << 20)
        return folder
    checkpoint_writer(folder, chat_template=None)
    tokenizer = read_checkpoint(ModelConfig(path=folder)).tokenizer
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.add_tokens(list(CONTROL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config_of(
        folder, model_type="deepseek_v4", max_position_embeddings=1 << 20,
        vocab_size=tokenizer.get_vocab_size(), eos_token_id=tokenizer.token_to_id(EOS),
    )  # fmt: skip
    return folder


@pytest.fixture
async def readers(folder):
    model = ModelConfig(path=folder)
    checkpoint = read_checkpoint(model)
    readers = Readers(ChatEncoder(checkpoint), model, checkpoint.max_model_len)
    yield readers
    await readers.close()


@pytest.fixture(scope="module")
def encoder(folder):
    return ChatEncoder(read_checkpoint(ModelConfig(path=folder)))


def text_of(rng: random.Random, num_bytes: int) -> str:
    text = "".join(rng.choices([*PIECES, *NOISE], k=num_bytes))
    return text.encode()[:num_bytes].decode(errors="ignore")


async def test_ids_are_the_same_wherever_a_body_is_read(readers, encoder):
    for seed, num_bytes in enumerate(LENGTHS):
        print("seed", seed)
        rng = random.Random(seed)
        text, other = text_of(rng, num_bytes), text_of(rng, 50)
        body = json.dumps({"model": "m", "prompt": [text, other], "echo": True}).encode()
        read = await readers.completion(body)
        assert read.prompts == [encoder.encode_text(text), encoder.encode_text(other)]
        assert read.shown == [text, other]
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": other}]
        messages.append({"role": "user", "content": other})
        body = json.dumps({"model": "m", "messages": messages}).encode()
        expected = encoder.encode_chat(messages)
        assert (await readers.chat(body)).prompts == [expected]
        body = json.dumps({"messages": messages}).encode()
        assert (await readers.tokenize(body))[1:] == (len(expected), json.dumps(expected))
        ids = list(encoder.encode_text(text))
        body = json.dumps({"tokens": ids}).encode()
        assert (await readers.detokenize(body))[1] == encoder.decode(ids)
        body = json.dumps({"model": "m", "prompt": ids}).encode()
        assert (await readers.completion(body)).prompts == [tuple(ids)]


def parsed(parser) -> list:
    invoke = '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>'
    parts = parser.push(f"hm</think>so\n\n{OPEN_CALLS}\n{invoke}\n{CLOSE_CALLS}")
    return parts + parser.flush(complete=True)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONVERSATIONS = [
    {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "stop": ["a"], "seed": 5},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes",
                  "prefix": True}], "temperature": 0.5},
    {"messages": [{"role": "system", "content": "hi", "tools": [TOOL]},
                  {"role": "user", "content": "you", "task": "title"}], "max_tokens": 7},
    {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "tool_choice": "required",
     "parallel_tool_calls": False},
    {"messages": [{"role": "user", "content": "hi"}], "stream": True,
     "response_format": {"type": "json_object"}, "thinking": {"type": "disabled"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", CONVERSATIONS, ids=lambda fields: str(fields)[-40:])
@pytest.mark.parametrize("folder", ["v4"], indirect=True)
async def test_all_but_the_text_of_a_long_conversation_is_kept(readers, encoder, fields):
    """What an answer needs of its request is that of the whole request."""
    whole = ChatRequest.model_validate({"model": "m", **fields})
    first = fields["messages"][0]
    longer = [first | {"content": "long " * SHORT_BYTES}, *fields["messages"][1:]]
    body = json.dumps({"model": "m", **fields, "messages": longer}).encode()
    read = await readers.chat(body)
    assert read.schema.model_dump(exclude={"messages"}) == whole.model_dump(exclude={"messages"})
    asked, kept = conversation(whole), conversation(read.schema)
    assert encoder.grammar(*kept) == encoder.grammar(*asked)
    assert encoder.landmarks(*kept) == encoder.landmarks(*asked)
    assert parsed(encoder.parser(*kept)) == parsed(encoder.parser(*asked))
    assert read.num_bytes < 1000


async def test_a_long_body_is_checked_as_a_short_one_is(world):
    long = "the cat " * SHORT_BYTES
    for fields, param in [
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"x": 1}, "x"),
    ]:
        for prompt in ("the cat", long):
            answer = await world.complete(prompt, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            answer = await world.chat(prompt, **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("token_id", ["-1", "301", str(2**32), str(-(2**63) - 1), "9" * 4000])
@pytest.mark.parametrize("num_tokens", [1, 200, 2000])  # the last are read in a helper process
async def test_tokens_that_there_are_not_are_refused(world, num_tokens, token_id):
    for path, field in (("/v1/completions", "prompt"), ("/detokenize", "tokens")):
        body = f'{{"model": "tiny", "{field}": [{"5, " * num_tokens}{token_id}]}}'
        answer = await world.http.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field
        assert len(answer.json()["error"]["message"]) < 200


async def test_what_is_long_beside_the_text_is_refused(readers):
    big = [{"type": "function", "function": {"name": "f" * 1000}}] * 1500
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": big})
    with pytest.raises(InvalidRequest, match="beside `messages`|not supported"):
        await readers.chat(body.encode())


@pytest.mark.parametrize("kind", ["complete", "chat"])
async def test_a_text_that_length_alone_refuses_is_not_tokenized(world, kind):
    answer = await getattr(world, kind)("a" * 1_000_000)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "1000" in error["message"] and "cannot be fewer than 256 tokens" in error["message"]


async def test_large_bodies_are_held_within_a_limit_and_small_ones_beside_them(world, monkeypatch):
    monkeypatch.setattr("sluice.router.common.body.MAX_LARGE_BODIES_BYTES", 1 << 20)
    arrived, rest = asyncio.Event(), asyncio.Event()

    async def slowly():
        yield b" " * (900 << 10)
        arrived.set()
        await rest.wait()
        yield b"{}"

    headers = {"content-type": "application/json"}
    first = asyncio.create_task(
        world.http.post("/v1/completions", content=slowly(), headers=headers)
    )
    await arrived.wait()
    answer = await world.complete("a" * (200 << 10))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_large_bodies")
    assert answer.headers["retry-after"]
    assert (await world.complete()).status_code == 200
    rest.set()
    assert (await first).status_code == 400
    assert (await world.complete("a" * (200 << 10))).json()["error"][
        "code"
    ] != "too_many_large_bodies"


# Templates: `bad` is what one does whatever it is given, or where a message says "bad".
BAD = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "format": "{{ '{}{}'.format(1) }}",
    "padding": "{{ '%1000000000d' % 5 }}",
    "power": "{% set n = 10 ** 8 %}{{ 10 ** n }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
    "division": "{{ 1 // 0 }}",
}
NEVER_ENDS = {"loops", "padding", "power", "output"}


@pytest.fixture
def checkpoint_with(tmp_path, checkpoint_writer):
    return lambda template: checkpoint_writer(tmp_path / "checkpoint", chat_template=template)


CONSTANT = "{{ 10 ** (10 ** 8) }}"  # computed when it is compiled


@pytest.mark.parametrize("template", [BAD["recursion"], BAD["padding"], BAD["power"], CONSTANT])
async def test_a_template_that_is_bad_from_the_start_is_a_config_error_within_seconds(
    make_world, checkpoint_with, template
):
    world = await make_world(folder=checkpoint_with(template))
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="chat template of the checkpoint"):
        await serve(world.service, "127.0.0.1", 0)
    assert time.monotonic() - begun < 60  # of which a quiet machine takes one


async def test_a_template_that_is_no_jinja_is_a_config_error(make_world, checkpoint_with):
    with pytest.raises(ConfigError, match="chat template of the checkpoint"):
        await make_world(folder=checkpoint_with("{% for %}"))


async def test_a_template_that_is_bad_for_some_messages_stops_nobody_else(
    make_world, checkpoint_with
):
    case = "{%% if messages[0].content == '%s' %%}%s{%% endif %%}"
    cases = [case % named for named in BAD.items()]
    world = await make_world(folder=checkpoint_with("".join(cases) + "hello"))
    world.add_prefill()
    world.add_decode()
    for kind in BAD:
        asked = asyncio.create_task(world.chat(kind))
        while not asked.done():
            assert (await world.complete()).status_code == 200
            await asyncio.sleep(0.01)  # leaves the processor to the template
        error = asked.result().json()["error"]
        if kind in NEVER_ENDS:
            assert (asked.result().status_code, error["code"]) == (500, "chat_template_failed")
        else:
            assert (asked.result().status_code, error["param"]) == (400, "messages")
        assert "chat template" in error["message"] and len(error["message"]) < 1000
    assert (await world.chat("good")).status_code == 200
