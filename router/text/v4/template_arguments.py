"""`chat_template_kwargs` where there is no template: the names that switch thinking elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from sluice.protocol.messages import InvalidRequest
from sluice.router.text.answers.conversation import ChatOptions, Effort

FIELD = "chat_template_kwargs"
THINKING = ("thinking", "enable_thinking")
EFFORT = "reasoning_effort"


def without_template_arguments(options: ChatOptions) -> ChatOptions:
    """The options that say the same. Raises InvalidRequest where arguments do not say it clearly.

    Null is "not given". A name that the format knows nothing of may be meant to change the prompt.
    """
    thinking, effort = options.thinking, options.effort
    for name, value in options.template_arguments:
        if value is None:
            continue
        if name in THINKING:
            thinking = _agreed(name, _bool(name, value), thinking)
        elif name == EFFORT:
            effort = _agreed(name, _effort(value), effort)
        else:
            expected = ", ".join((*THINKING, EFFORT))
            raise _fault(name, f"this model does not know it, expected one of {expected}")
    return replace(options, thinking=thinking, effort=effort, template_arguments=())


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _fault(name, f"got {str(value)!r:.60}, expected true or false")
    return value


def _effort(value: Any) -> str:
    if not isinstance(value, str) or value not in get_args(Effort):
        expected = ", ".join(get_args(Effort))
        raise _fault(EFFORT, f"got {str(value)!r:.60}, expected one of {expected}")
    return value


def _agreed(name: str, value: Any, other: Any) -> Any:
    if other is not None and other != value:
        raise _fault(name, "another field of the request says otherwise, leave one of the two out")
    return value


def _fault(name: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{FIELD}.{name}: {problem}", param=f"{FIELD}.{name}")
