"""What a V4 checkpoint says in tests of its chat format, and a checkpoint that says it."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.router.text.v4.words import EOS

CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Zürich ☕</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


def write_config(folder: Path, vocab_size: int, eos_token_id: int) -> None:
    config = {"model_type": "deepseek_v4", "vocab_size": vocab_size, "eos_token_id": eos_token_id}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))


def named_events(text: str) -> list[dict]:
    """The events of a stream, each named as what it is."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def answers(v4, text: str) -> None:
    """From now on the world's model says so."""
    v4.script.plan = (*v4.ids(text), v4.tokenizer.token_to_id(EOS))
