"""Words of DeepSeek-V4's chat format: control tokens, and the texts the model was trained on."""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
REMINDER = "<｜latest_reminder｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
CONTROL_TOKENS = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML)

OPEN_CALLS = f"<{DSML}tool_calls>"
CLOSE_CALLS = f"</{DSML}tool_calls>"
CLOSE_INVOKE = f"</{DSML}invoke>"
CLOSE_PARAMETER = f"</{DSML}parameter>"

# Quick instructions: one control token asks for one short output about the conversation.
TASKS = {
    name: f"<｜{name}｜>"
    for name in ("action", "query", "authority", "domain", "title", "extracted_url", "read_url")
}

EFFORT_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
EFFORT_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple "
    "angles and are certain that no assumption remains unchecked and no error remains "
    "undiscovered.\n\n"
)

TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "{OPEN_CALLS}" block like the following:

{OPEN_CALLS}
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{CLOSE_PARAMETER}
...
{CLOSE_INVOKE}
<{DSML}invoke name="$TOOL_NAME2">
...
{CLOSE_INVOKE}
{CLOSE_CALLS}

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning \
inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

RESPONSE_FORMAT = """## Response Format:

You MUST strictly adhere to the following schema to reply:
%s"""
