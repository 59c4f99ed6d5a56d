"""What a chat format is given and what it gives back, whichever checkpoint it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
Message = Mapping[str, Any]  # OpenAI's shape, content as one string, absent fields left out


@dataclass(frozen=True)
class ChatOptions:
    """How a conversation is to be rendered and its answer read.

    tools: function objects in OpenAI's shape. must_call: names of those of which one has to be
    called; None leaves it to the model. parallel_calls: it may call several at once. thinking,
    effort: None where the client leaves it to the model. json_schema: what the answer must satisfy,
    None for free text; with `show_schema` the prompt says so too. template_arguments: what the
    client sets of the variables of the checkpoint's own template. prompt_end: the last characters
    of the prompt, where a template has written it.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: frozenset[str] | None = None
    parallel_calls: bool = True
    thinking: bool | None = None
    effort: str | None = None
    json_schema: str | None = None
    show_schema: bool = False
    add_generation_prompt: bool = True
    template_arguments: tuple[tuple[str, Any], ...] = ()
    prompt_end: str = ""

    @property
    def callable_tools(self) -> list[Mapping[str, Any]]:
        """Those that may be called: all, or of which one has to be."""
        return [t for t in self.tools if self.must_call is None or t["name"] in self.must_call]

    def needs_grammar(self, *, reasons: bool) -> bool:
        """Whether the answer follows more than a JSON schema. reasons: it may reason first."""
        if self.json_schema is not None:
            return bool(self.tools) or reasons
        is_strict = any(tool.get("strict") for tool in self.tools)
        must = self.must_call is not None
        return bool(self.tools) and (must or is_strict or not self.parallel_calls)


@dataclass(frozen=True)
class Landmarks:
    """What tells the parts of an answer from one another, before they are parsed.

    end_of_reasoning: the token that ends the reasoning with which the answer begins.
    begin_of_reasoning: the one that opens it, as the answer's first; None if the prompt has. There
    is none where both are None. begin_of_calls: texts of which one begins the tool calls. shown:
    special tokens whose texts the parser has to see.
    """

    end_of_reasoning: int | None = None
    begin_of_reasoning: int | None = None
    begin_of_calls: tuple[str, ...] = ()
    shown: Mapping[int, str] = field(default_factory=dict)


NO_LANDMARKS = Landmarks()  # plain text


@dataclass(frozen=True)
class CallPart:
    """A piece of one tool call. `name` comes with the call's first piece only."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Part:
    """A piece of an answer; one of the fields is set."""

    content: str = ""
    reasoning: str = ""
    call: CallPart | None = None

    @property
    def owner(self) -> str | int:
        """What it is a piece of, among an answer's parts in a row: the index of a call, or which
        text. The next part that is a piece of something else begins that."""
        if self.call is not None:
            return self.call.index
        return "reasoning" if self.reasoning else "content"


class OutputParser(Protocol):
    """Reads one output as it comes. The parts do not depend on how the text was cut."""

    def push(self, text: str) -> list[Part]: ...

    def flush(self, *, complete: bool) -> list[Part]:
        """The rest at the end of the output. complete: the model ended it, not a limit."""
        ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> list[Part]:
        return [Part(content=text)] if text else []

    def flush(self, *, complete: bool) -> list[Part]:
        return []


class ChatFormat(Protocol):
    """One checkpoint's way to write conversations. Safe to call from several threads."""

    def render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The prompt. Raises InvalidRequest naming what the format cannot express."""
        ...

    def parser(self, messages: Sequence[Message], options: ChatOptions) -> OutputParser:
        """A parser for one answer to that prompt."""
        ...

    def landmarks(self, messages: Sequence[Message], options: ChatOptions) -> Landmarks:
        """What tells the parts of such an answer from one another."""
        ...

    def grammar(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """What the answer must follow where the JSON schema alone does not say it; "" otherwise.

        Raises InvalidRequest for schemas that no grammar can be made of.
        """
        ...
