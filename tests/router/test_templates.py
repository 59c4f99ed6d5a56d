"""Chat templates render as transformers renders them, in the styles of the families we serve."""

from __future__ import annotations

import itertools
import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sluice.engine.protocol import ConfigError, InvalidRequest
from sluice.router.conversation import ChatOptions
from sluice.router.template import TemplateFormat

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
