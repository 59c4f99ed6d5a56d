"""What ends a text is read by one rule, whoever asks."""

from __future__ import annotations

import json

import pytest

from sluice.protocol.eos import eos_token_ids
from sluice.protocol.messages import ConfigError

ADDED = [{"id": 7, "content": "<end>"}, {"id": 8, "content": "<other>"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config.json": {"eos_token_id": 3}}, (3,)),
        ({"config.json": {"eos_token_id": [3, 4]}}, (3, 4)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [5, 3]}},
         (5, 3)),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {}}, ()),
        ({"tokenizer_config.json": {"eos_token": "<end>"},
          "tokenizer.json": {"added_tokens": ADDED}}, (7,)),
        ({"config.json": {"eos_token_id": 8},
          "tokenizer_config.json": {"eos_token": {"content": "<end>"}},
          "tokenizer.json": {"added_tokens": ADDED}}, (8, 7)),
        ({"tokenizer_config.json": {"eos_token": "<gone>"},
          "tokenizer.json": {"added_tokens": ADDED}}, ()),
    ],
)  # fmt: skip
def test_every_id_that_a_file_names_ends_a_text(tmp_path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path, 10) == expected


@pytest.mark.parametrize("value", [10, -1, "3", 3.0, True, [3, None], {}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_token_is_the_files_fault(tmp_path, name, value):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=rf"{name}: eos_token_id is .*below vocab_size \(10\)"):
        eos_token_ids(tmp_path, 10)
