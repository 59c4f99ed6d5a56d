"""TemplateFormat: conversations as the checkpoint's own Jinja template writes them.

A template is a program: it may loop for ever, fill the memory, or raise anything. It is compiled,
which computes its constants, where it first renders, and that is in a helper process (readers.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice.protocol.messages import ConfigError, InvalidRequest
from sluice.router.text.answers.conversation import (
    ChatOptions,
    Landmarks,
    Message,
    OutputParser,
    PlainParser,
)
from sluice.router.text.families.calls import Reasoning, answer_grammar
from sluice.router.text.families.parser import FamilyParser
from sluice.router.text.families.tool_formats import (
    END_THINK,
    FORMATS,
    THINK,
    ToolFormat,
    calls_as_templates_read,
    tool_format_of,
)

# Of a message. What the answer thought is there for templates that show it; most leave it out.
FIELDS = frozenset({"role", "content", "name", "reasoning_content"})
MAX_REASON_CHARACTERS = 300
TRIALS = (("user",), ("system", "user"), ("user", "assistant", "user"))


CALL_FIELDS = frozenset({"tool_calls", "tool_call_id"})
THINKING = frozenset({"thinking", "enable_thinking"})  # what templates call the switch


@dataclass(frozen=True)
class Known:
    """What a template has words for, as its text tells.

    tool_format: of calls, "none" if of no family. old_calls: those of earlier answers. thinks: it
    knows reasoning from content. switches: names of its variables that switch thinking.
    """

    tool_format: str
    old_calls: bool
    thinks: bool
    switches: frozenset[str]
    has_effort: bool

    def arguments(self, options: ChatOptions) -> dict[str, Any]:
        thinking = (
            False if options.thinking is None and options.effort == "none" else options.thinking
        )
        given: dict[str, Any] = {} if thinking is None else dict.fromkeys(self.switches, thinking)
        if self.has_effort and options.effort is not None:
            given["reasoning_effort"] = options.effort
        return given


class Refused(jinja2.TemplateError):
    """The template itself says what is wrong with the messages."""


class TemplateFormat:
    """Raises ConfigError for a template that is no Jinja. `source` None: every chat is refused.

    markers: those of calls and reasoning that are one token, with its id and whether it is special.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str,
        eos_token: str,
        tool_format: str = "auto",
        markers: Mapping[str, tuple[int, bool]] = MappingProxyType({}),
    ) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._token_ids = {marker: token_id for marker, (token_id, _) in markers.items()}
        self._shown = {token_id: m for m, (token_id, is_special) in markers.items() if is_special}
        variables: frozenset[str] = frozenset()
        if source is not None:
            with _faults_named():
                tree = _environment().parse(source)
                # Not by jinja2.meta, which compiles it and so computes its constants.
                names = tree.find_all(nodes.Name)
                variables = frozenset(name.name for name in names if name.ctx == "load")
        text = source or ""
        self._knows = Known(
            tool_format=tool_format_of(text) if tool_format == "auto" else tool_format,
            old_calls="tool_calls" in text,
            thinks=END_THINK in text,
            switches=variables & THINKING,
            has_effort="reasoning_effort" in variables,
        )

    @property
    def has_template(self) -> bool:
        return self._source is not None

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source or "")

    def try_out(self) -> None:
        """Render a few words. Raises ConfigError if that fails, other than by the template's will.

        It may also never return, or end its process.
        """
        options, fault = ChatOptions(), None
        with _faults_named():
            assert self._template is not None, "it compiles"
        for roles in TRIALS:
            try:
                self.render([{"role": role, "content": "Hello"} for role in roles], options)
                return
            except InvalidRequest as error:
                fault = error
                if isinstance(error.__cause__, Refused):
                    return
        raise ConfigError(f"chat template of the checkpoint: {fault}")

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        if not self.has_template:
            raise InvalidRequest(
                "messages: this checkpoint has no chat template; use /v1/completions, or put a "
                "chat_template into its tokenizer_config.json",
                param="messages",
            )
        _check(messages, options, self._knows)
        begun = str(messages[-1]["content"]) if messages[-1].get("prefix") else None
        try:
            text = self._template.render(
                self._knows.arguments(options) | dict(options.template_arguments),
                messages=[_as_templates_read(m, self._knows.tool_format) for m in messages],
                tools=[{"type": "function", "function": tool} for tool in options.tools] or None,
                documents=None,  # templates ask whether it is none, not whether it is there
                add_generation_prompt=options.add_generation_prompt and begun is None,
                **self._tokens,
            )
        except MemoryError:
            raise  # not a word about the messages
        except Exception as error:
            raise InvalidRequest(
                f"messages: the chat template rejects them: {_reason(error)}", param="messages"
            ) from error
        return text if begun is None else _up_to(text, begun)

    def parser(self, messages: Sequence[Message], options: ChatOptions) -> OutputParser:
        calls, reasoning = self._calls(options), self._reasoning(messages, options)
        if calls is None and reasoning is Reasoning.NONE:
            return PlainParser()
        return FamilyParser(
            opened=reasoning is Reasoning.OPENED,
            thinks=reasoning is Reasoning.POSSIBLE,
            calls=calls,
            names=frozenset(tool["name"] for tool in options.tools),
        )

    def landmarks(self, messages: Sequence[Message], options: ChatOptions) -> Landmarks:
        calls, reasoning = self._calls(options), self._reasoning(messages, options)
        begin, end = self._token_ids.get(THINK), self._token_ids.get(END_THINK)
        opens = reasoning is Reasoning.POSSIBLE and begin is not None
        known = set() if calls is None else {calls.marker, calls.end}
        known |= set() if reasoning is Reasoning.NONE else {THINK, END_THINK}
        return Landmarks(
            end_of_reasoning=end if opens or reasoning is Reasoning.OPENED else None,
            begin_of_reasoning=begin if opens else None,
            begin_of_calls=() if calls is None else (calls.marker,),
            shown={token_id: text for token_id, text in self._shown.items() if text in known},
        )

    def grammar(self, messages: Sequence[Message], options: ChatOptions) -> str:
        reasoning = self._reasoning(messages, options)
        if not options.needs_grammar(reasons=reasoning is not Reasoning.NONE):
            return ""
        return answer_grammar(
            options.callable_tools,
            self._calls(options),
            self._token_ids,
            must=options.must_call is not None,
            parallel=options.parallel_calls,
            reasoning=reasoning,
            json_schema=options.json_schema,
        )

    def _calls(self, options: ChatOptions) -> ToolFormat | None:
        return FORMATS.get(self._knows.tool_format) if options.tools else None

    def _reasoning(self, messages: Sequence[Message], options: ChatOptions) -> Reasoning:
        """JSON comes at once, unless reasoning is asked for, or the prompt has begun it."""
        if not self._knows.thinks:
            return Reasoning.NONE
        if options.prompt_end.rstrip().endswith(THINK):
            return Reasoning.OPENED
        is_plain = options.json_schema is None or options.thinking
        may_open = is_plain and not messages[-1].get("prefix")
        return Reasoning.POSSIBLE if may_open else Reasoning.NONE


def _as_templates_read(message: Message, tool_format: str) -> Message:
    ours = calls_as_templates_read(message, tool_format)
    ours.pop("prefix", None)
    if "reasoning_content" in ours:  # some templates have another name for it
        ours = {"thinking": ours["reasoning_content"], **ours}
    return ours


def _up_to(text: str, begun: str) -> str:
    """The conversation up to the end of its last message, an answer that is to go on."""
    start = text.rfind(begun.strip())
    if not begun.strip() or start < 0:
        raise InvalidRequest(
            "messages: the last one is the answer's beginning, but the chat template does not "
            "write its content as it stands; give it some content, or end with a user's message",
            param="messages",
        )
    return text[: start + len(begun.strip())]


def _check(messages: Sequence[Message], options: ChatOptions, known: Known) -> None:
    """Raises InvalidRequest for what the template has no words for."""
    fields = FIELDS | CALL_FIELDS if known.old_calls else FIELDS
    asked = {
        "tools": bool(options.tools) and known.tool_format == "none",
        "thinking": bool(options.thinking) and not known.switches,
        "reasoning_effort": options.effort not in (None, "none") and not known.has_effort,
    }
    asked |= {
        f"messages.{index}.{field}": True
        for index, message in enumerate(messages)
        for field in message
        if field not in fields and (field, index) != ("prefix", len(messages) - 1)
    }
    for param in (name for name, given in asked.items() if given):
        raise InvalidRequest(
            f"{param}: not supported with this checkpoint's chat template, leave it out"
            f"{', or set model.tool_format in the config' if param == 'tools' else ''}",
            param=param,
            code="unsupported_parameter",
        )


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@contextlib.contextmanager
def _faults_named() -> Iterator[None]:
    """Raises ConfigError for whatever Jinja has to say about a template."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigError(f"chat template of the checkpoint: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = str(error)[:MAX_REASON_CHARACTERS]
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _raise_exception(message: str) -> None:
    raise Refused(message)


class _Generation(Extension):
    """`{% generation %}`: marks what a model is trained on, and changes no text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class has it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it, in its order of arguments; Jinja's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
