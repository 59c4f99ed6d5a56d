"""Chat templates render as transformers renders them, in the styles of the families we serve."""

from __future__ import annotations

import itertools
import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sluice.protocol.messages import ConfigError, InvalidRequest
from sluice.router.text.answers.conversation import ChatOptions
from sluice.router.text.families.template import TemplateFormat

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
STYLES = {
    "chatml": """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
""",
    "chatml with thoughts": """
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == 'user' %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content is string and loop.index0 > ns.last %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- elif message.thinking is defined %}
        {{- '<!-- ' ~ message.thinking ~ ' -->' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
""",
    "llama 3": """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%Y') %}
    {%- else %}{%- set date_string = '2024' %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == loop_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- endif %}
{%- endfor %}
""",
    "gemma": """
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}
""",
    "deepseek": """
{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{% set ns = namespace(system_prompt='', is_first=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- if ns.is_first %}{% set ns.system_prompt = message['content'] %}{% set ns.is_first = false %}
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\n\n' + message['content'] %}{%- endif %}
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{%- endif %}
{{'<｜Assistant｜></think>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}
{{- '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}{%- endif %}
""",
    "training marks and loop controls": """
{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- else %}
{{ message.content }}
{% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}
{% endfor %}
""",
    "json": """
{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=True) }}
{{ messages | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}
{{ messages | tojson(false, 4) }}{{ messages | tojson(separators=(', ', ': ')) }}
{{ {'b': '<&>\\'"', 'a': none, 'c': [1.5, true]} | tojson(sort_keys=true) }}
{{ documents is none }}{{ tools is none }}{{ dict(a=1) | tojson }}{{ namespace(a=1).a }}
""",
}  # fmt: skip
TOOL_STYLES = {
    "hermes": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n{"name": <name>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}
            {%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "llama3_json": """
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "mistral": """
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and loop.last %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Tool call IDs should be 9 characters long!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 %}
            {{- raise_exception("Tool call IDs should be 9 characters long!") }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message["content"] + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
""",
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "finds ☕", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "default": None}}}}},
    {"type": "function", "function": {"name": "g"}},
]  # fmt: skip
ROLES = [
    ("user",), ("system", "user"), ("user", "assistant"), ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"), ("user", "user"), ("assistant", "user"),
    ("system", "system", "user"), ("user", "assistant") * 3,
]  # fmt: skip
CONTENTS = ("Hi", " ☕ <&> \"'\n", "a</think>b", "")
ARGUMENTS = [{}, {"enable_thinking": False}, {"thinking": True}, {"date_string": "1 May 1999"}]


def conversations():
    for roles, content in itertools.product(ROLES, CONTENTS):
        messages = [{"role": role, "content": f"{content}{i}"} for i, role in enumerate(roles)]
        yield messages
        yield [m | ({"reasoning_content": "hm\n"} if m["role"] == "assistant" else {})
               for m in messages]  # fmt: skip


def transformers_says(template, messages, *, tools=None, opened=True, **arguments) -> str | None:
    """The prompt; None where it has none."""
    try:
        [text], _ = render_jinja_template(
            [json.loads(json.dumps(messages))], tools=tools, chat_template=template,
            add_generation_prompt=opened, **arguments, **TOKENS,
        )  # fmt: skip
    except Exception:  # noqa: BLE001
        return None
    return text


def we_say(template: TemplateFormat, messages, options: ChatOptions) -> str | None:
    try:
        return template.render(messages, options)
    except InvalidRequest:
        return None


@pytest.mark.parametrize("style", STYLES)
def test_prompts_are_those_of_transformers(style):
    template, told = TemplateFormat(STYLES[style], **TOKENS), 0
    for messages, arguments in itertools.product(conversations(), ARGUMENTS):
        for opened in (True, False):
            options = ChatOptions(
                add_generation_prompt=opened, template_arguments=tuple(arguments.items())
            )
            expected = transformers_says(STYLES[style], messages, opened=opened, **arguments)
            assert we_say(template, messages, options) == expected, messages
            told += expected is not None
    assert told > 100


@pytest.mark.parametrize("style", STYLES)
def test_each_style_can_be_tried_out(style):
    TemplateFormat(STYLES[style], **TOKENS).try_out()


@pytest.mark.parametrize(
    "source", ["{% generation %}", "{% endgeneration %}", "{% for %}", "{% no_such_tag %}"]
)
def test_a_template_that_is_no_jinja_is_refused(source):
    with pytest.raises(ConfigError, match="chat template"):
        TemplateFormat(source, **TOKENS)


def called(*ids: str):
    """A conversation with calls of these ids and their results."""
    calls = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": {"city": "Zürich"}}}
        for i in ids
    ]
    results = [{"role": "tool", "content": "sunny", "tool_call_id": i} for i in ids]
    user = {"role": "user", "content": "weather?"}
    return [user, {"role": "assistant", "content": "", "tool_calls": calls}, *results, user]


def as_openai_writes(messages):
    """The same with arguments as text, as clients send them."""
    messages = json.loads(json.dumps(messages))
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("style", TOOL_STYLES)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "none"])
@pytest.mark.parametrize("ids", [(), ("abcdefgh1",), ("abcdefgh1", "abcdefgh2")], ids=str)
def test_tools_and_calls_are_written_as_transformers_writes_them(style, tools, ids):
    template = TemplateFormat(TOOL_STYLES[style], **TOKENS)
    messages = called(*ids) if ids else [{"role": "user", "content": "hi"}]
    options = ChatOptions(tools=tuple(tool["function"] for tool in tools or ()))
    expected = transformers_says(TOOL_STYLES[style], messages, tools=tools)
    assert we_say(template, as_openai_writes(messages), options) == expected
    assert expected is not None or (style == "llama3_json" and len(ids) == 2)


def test_ids_of_our_own_calls_are_of_the_length_that_mistral_wants():
    template = TemplateFormat(TOOL_STYLES["mistral"], **TOKENS)
    first, second = "call_0123456789abcdef01234567", "call_76543210fedcba9876543210"
    text = template.render(as_openai_writes(called(first, second)), ChatOptions())
    ids = [part[:9] for part in text.split('id": "')[1:]]
    assert ids[:2] == ids[2:] and ids[0] != ids[1] and all(i.isalnum() for i in ids)
