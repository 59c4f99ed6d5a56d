"""What ends a text is read by one rule, whoever asks."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models

from sluice.protocol.messages import ConfigError
from sluice.protocol.special_tokens import eos_token_ids, readable_tokenizer

CONFIG = "tokenizer_config.json"


@pytest.fixture
def tokenizer():
    """Its token `<end>` is one that was added, `old` one of the vocabulary."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "old": 1}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<end>")])
    return tokenizer


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config.json": {"eos_token_id": 3}}, (3,)),
        ({"config.json": {"eos_token_id": [3, 4]}}, (3, 4)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [5, 3]}},
         (5, 3)),
        ({"config.json": {"eos_token_id": None}, "generation_config.json": {}}, ()),
        ({CONFIG: {"eos_token": "<end>"}}, (2,)),
        ({CONFIG: {"eos_token": "old"}}, (1,)),
        ({"config.json": {"eos_token_id": 8}, CONFIG: {"eos_token": {"content": "<end>"}}}, (8, 2)),
        ({"config.json": {"eos_token_id": 2}, CONFIG: {"eos_token": "<end>"}}, (2,)),
        ({CONFIG: {"eos_token": "<gone>"}}, ()),
        ({CONFIG: {"eos_token": None}}, ()),
    ],
)  # fmt: skip
def test_every_id_that_a_file_names_ends_a_text(tmp_path, tokenizer, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert eos_token_ids(tmp_path, 10, tokenizer) == expected
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert eos_token_ids(tmp_path, 10, readable_tokenizer(tmp_path)) == expected


def test_a_node_needs_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / CONFIG).write_text('{"eos_token": "<end>"}')
    assert readable_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    assert readable_tokenizer(tmp_path) is None
    assert eos_token_ids(tmp_path, 10, None) == (3,)


@pytest.mark.parametrize("value", [10, -1, "3", 3.0, True, [3, None], {}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_token_is_the_files_fault(tmp_path, name, value):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=rf"{name}: eos_token_id is .*below vocab_size \(10\)"):
        eos_token_ids(tmp_path, 10, None)


@pytest.mark.parametrize("token", [5, ["x"], {"content": 5}, "\ud800", {"content": "a\udfff"}])
def test_what_is_no_text_is_the_files_fault(tmp_path, tokenizer, token):
    (tmp_path / CONFIG).write_text(json.dumps({"eos_token": token}))
    with pytest.raises(ConfigError, match=rf"{CONFIG}: eos_token is .*expected text"):
        eos_token_ids(tmp_path, 10, tokenizer)
