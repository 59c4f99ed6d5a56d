"""TemplateFormat: conversations as the checkpoint's own Jinja template writes them.

A template is a program: it may loop for ever, fill the memory, or raise anything. It is compiled,
which computes its constants, where it first renders, and that is in a helper process (readers.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sluice.engine.protocol import ConfigError, InvalidRequest
from sluice.router.conversation import ChatOptions, Message, OutputParser, PlainParser

# Of a message. What the answer thought is there for templates that show it; most leave it out.
FIELDS = frozenset({"role", "content", "name", "reasoning_content"})
MAX_REASON_CHARACTERS = 300
TRIALS = (("user",), ("system", "user"), ("user", "assistant", "user"))


# Templates ask whether they are none, not whether they are there.
ABSENT = {"tools": None, "documents": None}


class Refused(jinja2.TemplateError):
    """The template itself says what is wrong with the messages."""


class TemplateFormat:
    """Raises ConfigError for a template that is no Jinja. `source` None: every chat is refused."""

    def __init__(self, source: str | None, *, bos_token: str, eos_token: str) -> None:
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        if source is not None:
            with _faults_named():
                _environment().parse(source)

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
        _check(messages, options)
        begun = str(messages[-1]["content"]) if messages[-1].get("prefix") else None
        try:
            text = self._template.render(
                dict(options.template_arguments),
                messages=[_as_templates_read(message) for message in messages],
                add_generation_prompt=options.add_generation_prompt and begun is None,
                **ABSENT,
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
        return PlainParser()

    def end_of_reasoning(self, messages: Sequence[Message], options: ChatOptions) -> int | None:
        return None

    def begin_of_calls(self, messages: Sequence[Message], options: ChatOptions) -> tuple[str, ...]:
        return ()

    def grammar(self, messages: Sequence[Message], options: ChatOptions) -> str:
        return ""  # where there are tools, `render` has refused them


def _as_templates_read(message: Message) -> Message:
    ours = {field: value for field, value in message.items() if field != "prefix"}
    if "reasoning_content" in ours:  # some templates have another name for it
        ours = {"thinking": ours["reasoning_content"], **ours}
    return ours


def _up_to(text: str, begun: str) -> str:
    """The conversation up to the end of its last message, an answer that is to go on."""
    start = text.rfind(begun.strip())
    if not begun.strip() or start < 0:
        raise InvalidRequest(
            "messages: the last one has `prefix`, but the chat template does not write its content "
            "as it stands; give it some content, or leave `prefix` out",
            param="messages",
        )
    return text[: start + len(begun.strip())]


def _check(messages: Sequence[Message], options: ChatOptions) -> None:
    """Raises InvalidRequest for what only a format with a parser of its own can serve."""
    asked = {
        "tools": bool(options.tools),
        "thinking": bool(options.thinking),
        "reasoning_effort": options.effort not in (None, "none"),
    }
    asked |= {
        f"messages.{index}.{field}": True
        for index, message in enumerate(messages)
        for field in message
        if field not in FIELDS and (field, index) != ("prefix", len(messages) - 1)
    }
    for param in (name for name, given in asked.items() if given):
        raise InvalidRequest(
            f"{param}: not supported with this checkpoint's chat template, leave it out",
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
