"""Limits of what a request may ask, for router and nodes alike."""

from __future__ import annotations

from sluice.protocol.messages import InvalidRequest

MAX_TEMPERATURE = 2.0
GREEDY_BELOW = 1e-5  # a temperature at which nothing but the likeliest token is ever drawn
MAX_PENALTY = 2.0  # of presence and frequency, either way
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 10.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_TOP_LOGPROBS = 20

# Between the tokens of a JSON text: a space, or a line break with its indentation. A weak model
# that may write any white space at all writes nothing else.
WHITE_SPACE = r"(\n[ \t]{0,32}|[ ]?)"

# Characters of a JSON schema, or of the grammar of tools; those in use have a few thousand.
MAX_SCHEMA_CHARACTERS = 256 << 10

# Of SamplingParams: the least and the most each number may be.
BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
}


def check_size(text: str, param: str) -> None:
    """Raises InvalidRequest for a schema or grammar that is too long. param: where it came from."""
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise InvalidRequest(
            f"{param}: {len(text)} characters of schemas, expected at most {MAX_SCHEMA_CHARACTERS}",
            param=param,
        )
