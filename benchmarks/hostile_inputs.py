"""What a hostile client sends: a table of inputs, each with its requests and the way to send them.

An input's requests are built when it is its turn, as some have many megabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.benchmarks.hostile_bodies import (
    CHAT,
    COMPLETIONS,
    MARK,
    Requests,
    completions,
    flat_object,
    get,
    head,
    http,
    longest_prompts,
    nested_schemas,
    past_calls,
    repeated,
    schemas,
    texts,
    tiny_chunks,
    tools,
    written_out,
)
from sluice.benchmarks.hostile_ways import Way, answered, dripped, held, leaving, unread

MB = 10**6

ODD_NUMBERS = (
    {"top_k": 2**31},
    {"top_k": 2**64},
    {"top_k": 10**400},
    {"seed": 2**63 - 1, "temperature": 5e-324},
    {"seed": -(2**63), "temperature": 1e-300, "top_p": 5e-324},
    {"min_p": 1.0, "temperature": 2.0, "top_k": 1},
    {"min_p": 5e-324, "top_p": 5e-324, "temperature": 1},
    {"max_tokens": 2**63},
    {"max_tokens": 10**400},
    {"min_tokens": 2**63, "max_tokens": 2**63},
    {"stop_token_ids": [2**63, -1]},
    {"stop_token_ids": [10**400]},
    {"prompt": [2**63]},
    {"prompt": [-1]},
    {"logit_bias": {"0": 1e-320, "999999999": 100}},
    {"logit_bias": {str(token): -100 for token in range(1_024)}, "temperature": 2},
    {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 5e-324},
    {"priority": 2**63},
)
ODD_TOOL_SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": None},
    {"type": "object", "properties": [1]},
    {"type": "object", "properties": {"a": 5}, "required": 5},
    {"type": "object", "properties": {"a": {"enum": 5}}},
    {"type": "object", "properties": {"a": {"anyOf": 5, "type": {"a": 1}}}},
    {"$ref": "#"},
    {"$ref": "#/nowhere"},
)
SCHEMAS_OF_THEMSELVES = (
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
)
PATTERNS = ("^((a{1,1000}){1,1000}){1,1000}$", "(a|aa)*" * 1_000 + "b", ".*" * 10_000)
PAST_ARGUMENTS = (
    "[" * 1_000,
    "[" * 1_000 + "]" * 1_000,
    r'{"a":"\ud800"}',
    '{"a":' * 100_000,
    "5",
)
CONTROL_CHARACTERS = "".join(f"%{code:02x}" for code in (*range(0x21), *range(0x7F, 0xA0)))
TEN_TOKENS = {"max_tokens": 10, "ignore_eos": True}
THOUSAND_TOKENS = {"max_tokens": 1_000, "ignore_eos": True}


@dataclass(frozen=True)
class Hostile:
    """So many connections, each of which makes one attempt after the other.

    pause_s: between two attempts of a connection; a second where some are answered, so that what
    they ask for is felt and not that they ask.
    is_work: these are good requests. Their share of the machine is theirs, so what others wait for
    it is shown and not judged.
    """

    requests: Callable[[str], Requests]  # for a model's name; they are sent in turn
    way: Way = answered
    num_connections: int = 4
    pause_s: float = 0.25
    is_work: bool = False


# Nothing, to see what the machine's own noise is.
NOTHING = {"nothing": Hostile(lambda model: [], num_connections=0)}

NUMBERS = {
    "top_k": Hostile(
        lambda model: completions(model, {"temperature": 1, "top_k": 2**63}), pause_s=1.0
    ),
    "tiny_penalty": Hostile(
        lambda model: completions(
            model, {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e-60}
        )
    ),
    "tiny_penalty_top_p": Hostile(
        lambda model: completions(
            model, {"repetition_penalty": 1e-300, "temperature": 1, "top_p": 0.9}
        )
    ),
    "tiny_penalty_logprobs": Hostile(
        lambda model: completions(
            model,
            {"repetition_penalty": 1e-300, "logprobs": 5},
            {"repetition_penalty": 1e-60, "logprobs": 5},
        )
    ),
    "odd_numbers": Hostile(lambda model: completions(model, *ODD_NUMBERS), pause_s=1.0),
    "long_numbers": Hostile(
        lambda model: written_out(
            model,
            COMPLETIONS,
            '"prompt": "a", "max_tokens": ' + "9" * 4 * MB,
            '"prompt": "a", "temperature": 1e' + "9" * MB,
            '"prompt": ' + repeated("9" * 4_000, 4 * MB),
        ),
        pause_s=0.5,
    ),
}

SCHEMAS = {
    "multiple_of": Hostile(
        lambda model: schemas(
            model,
            *(
                {"type": "integer", "multipleOf": number}
                for number in (99_991, 499_979, 999_983, 2**61 - 1, 1e-9)
            ),
        ),
        pause_s=1.0,
    ),
    "schema_of_itself": Hostile(lambda model: schemas(model, *SCHEMAS_OF_THEMSELVES)),
    "optional_700": Hostile(lambda model: schemas(model, flat_object(700))),
    "optional_10000": Hostile(lambda model: schemas(model, flat_object(10_000))),
    "required_5000": Hostile(
        lambda model: schemas(
            model, flat_object(5_000, required=[f"property_{i}" for i in range(5_000)])
        )
    ),
    "schema_counts": Hostile(
        lambda model: schemas(
            model,
            {"type": "string", "maxLength": 10**9},
            {"type": "string", "minLength": 10**6},
            {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
            {"enum": [f"value {i}" for i in range(100_000)]},
            {"anyOf": [{"const": i} for i in range(50_000)]},
        ),
        pause_s=1.0,
    ),
    "schema_patterns": Hostile(
        lambda model: schemas(model, *({"type": "string", "pattern": p} for p in PATTERNS)),
        pause_s=1.0,
    ),
    "schema_deep": Hostile(lambda model: nested_schemas(model, 1_000)),
    "tool_shapes": Hostile(lambda model: tools(model, *ODD_TOOL_SCHEMAS)),
    "tool_properties": Hostile(lambda model: tools(model, flat_object(5_000))),
}

TEXTS = {
    "text_1mb": Hostile(lambda model: texts(model, MB)),
    "text_4mb": Hostile(lambda model: texts(model, 4 * MB), pause_s=0.5),
    "text_14mb": Hostile(lambda model: texts(model, 14 * MB), pause_s=1.0),
    "words_14mb": Hostile(
        lambda model: texts(model, 14 * MB, "love is patient, love is kind, "), pause_s=1.0
    ),
    "messages_14mb": Hostile(
        lambda model: written_out(
            model, CHAT, '"messages": ' + repeated('{"role":"user","content":"a"}', 14 * MB)
        ),
        pause_s=1.0,
    ),
    "errors_4mb": Hostile(
        lambda model: written_out(
            model,
            CHAT,
            '"messages": ' + repeated("1", 4 * MB),
            '"messages": ' + repeated("{}", 4 * MB),
            '"messages": [{"role": "user", "content": "a"}], "tools": ' + repeated("1", 4 * MB),
            '"messages": [{"role": "user", "content": ' + repeated("1", 4 * MB) + "}]",
        ),
        pause_s=0.5,
    ),
    "unknown_fields_4mb": Hostile(
        lambda model: written_out(
            model, COMPLETIONS, ",".join(f'"field_{i}":1' for i in range(280_000))
        ),
        pause_s=0.5,
    ),
    "deep_json": Hostile(
        lambda model: [
            http(CHAT, b"[" * 10_000),
            http(CHAT, b"[" * 10_000 + b"]" * 10_000),
            http(CHAT, b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
            *written_out(model, CHAT, '"messages": ' + "[" * 10_000 + "]" * 10_000),
        ]
    ),
    "deep_json_10mb": Hostile(
        lambda model: [
            http(CHAT, b"[" * 10 * MB),
            http(CHAT, b"[" * 5 * MB + b"]" * 5 * MB),
            http(CHAT, b'{"a":' * 2 * MB),
        ],
        pause_s=1.0,
    ),
    "past_calls": Hostile(lambda model: past_calls(model, *PAST_ARGUMENTS)),
    "lone_surrogates": Hostile(
        lambda model: written_out(
            model,
            COMPLETIONS,
            r'"prompt": "\ud800", "max_tokens": 8',
            r'"prompt": "a", "stop": "\udfff", "max_tokens": 8',
        )
    ),
}

CONNECTIONS = {
    "header_200mb": Hostile(
        lambda model: [head(b"x: " + b"a" * 200 * MB + b"\r\n\r\n")], pause_s=1.0
    ),
    "header_lines": Hostile(lambda model: [head(b"x: a\r\n" * 500_000 + b"\r\n")], pause_s=0.5),
    "half_bodies": Hostile(
        lambda model: [http(CHAT, b"x" * 1_000)[:-500]], way=held, num_connections=300
    ),
    "half_headers": Hostile(lambda model: [head(b"x: ")], way=held, num_connections=300),
    "slow_headers": Hostile(
        lambda model: [head(b"x: " + b"a" * 10_000)], way=dripped, num_connections=300
    ),
    "idle": Hostile(lambda model: [b""], way=held, num_connections=1_000),
    "tiny_chunks": Hostile(lambda model: [tiny_chunks(500_000)], pause_s=1.0),
    "no_http": Hostile(
        lambda model: [
            bytes(range(256)) * 64,
            b"\x16\x03\x01\x02\x00" * 100,
            b"\r\n" * 10_000 + b"?\r\n\r\n",
        ]
    ),
    "control_paths": Hostile(
        lambda model: [
            get(f"/{CONTROL_CHARACTERS}{MARK}"),
            get("/%1b]0;x%07%1b[2J"),
            get("/v1/models/" + "%0a" * 1_000),
            get("/\x1b]0;x\x07"),
            get("/health", headers="x-request-id: \x1b[2J\r\n"),
        ]
    ),
    "gzip_body": Hostile(
        lambda model: [http(CHAT, b"\x1f\x8b" + bytes(1_000), "content-encoding: gzip\r\n")]
    ),
}

# Good requests, of clients that leave, do not read, or want much.
GOOD = {
    "leaving": Hostile(
        lambda model: completions(model, THOUSAND_TOKENS), way=leaving, pause_s=0.04, is_work=True
    ),
    "leaving_streams": Hostile(
        lambda model: completions(model, {**THOUSAND_TOKENS, "stream": True, "n": 4}),
        way=leaving,
        pause_s=0.04,
        is_work=True,
    ),
    "leaving_longest": Hostile(
        lambda model: longest_prompts(model, 8), way=leaving, pause_s=0.1, is_work=True
    ),
    "unread": Hostile(
        lambda model: completions(model, {**THOUSAND_TOKENS, "stream": True, "logprobs": 20}),
        way=unread,
        num_connections=100,
        is_work=True,
    ),
    "choices_128": Hostile(
        lambda model: completions(model, {**TEN_TOKENS, "n": 128}), is_work=True
    ),
    "prompts_128": Hostile(
        lambda model: completions(
            model, {**TEN_TOKENS, "prompt": [f"{MARK} {i} " + "love " * 100 for i in range(128)]}
        ),
        is_work=True,
    ),
    "longest_prompts": Hostile(lambda model: longest_prompts(model, 8), is_work=True),
}

INPUTS: dict[str, Hostile] = {
    **NOTHING,
    **NUMBERS,
    **SCHEMAS,
    **TEXTS,
    **CONNECTIONS,
    **GOOD,
}
