"""Whatever stands in a checkpoint's JSON files, the router reads it or says one ConfigError."""

import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.protocol.config import ModelConfig
from sluice.protocol.messages import ConfigError
from sluice.router.text.checkpoint import read_checkpoint
from sluice.router.text.v4.words import DSML, END_THINK, THINK

MODELS = Path(__file__).parents[2] / "deploy/models"
TINY = MODELS / "tiny-v4"
READ = {
    "config.json": ["vocab_size", "max_position_embeddings", "eos_token_id", "model_type"],
    "generation_config.json": ["eos_token_id"],
    "tokenizer_config.json": [
        "eos_token", "bos_token", "add_bos_token", "chat_template", "pad_token",
    ],
}  # fmt: skip
words = st.sampled_from(["", "x", "\0", "\ud800", "content", "name", "template"]) | st.text()
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 10**30, math.nan, math.inf])
values = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture
def folder(tmp_path):
    """A small checkpoint that may be changed; weights are not looked at."""
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
    for name in names:
        if (TINY / name).is_file():
            shutil.copy(TINY / name, tmp_path)
    return tmp_path


def change(folder, name, changes):
    path = folder / name
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old | changes))


def test_any_value_at_any_key_that_is_read_gives_a_checkpoint_or_one_error(folder):
    before = {name: (folder / name).read_text() for name in READ if (folder / name).is_file()}
    places = [(name, key) for name, keys in READ.items() for key in keys]

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(places), values)
    def anything(place, value):
        name, key = place
        change(folder, name, {key: value})
        try:
            read_checkpoint(ModelConfig(path=folder))
        except ConfigError as error:
            assert len(str(error)) < 2000
        finally:
            (folder / name).write_text(before.get(name, "{}"))

    anything()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ("generation_config.json", {"eos_token_id": [1, 10**9]}, "eos_token_id is .1, 1000000000."),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token is 5"),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "eos_token is"),
        ("tokenizer_config.json", {"chat_template": "\ud800"}, "chat_template is"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template is 5"),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}, "`name` and `template`"),
        ("tokenizer_config.json", {"chat_template": ["x"]}, "`name` and `template`"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_file(folder, name, changes, words):
    change(folder, name, changes)
    with pytest.raises(ConfigError, match=f"{name}: .*{words}"):
        read_checkpoint(ModelConfig(path=folder))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{", "cannot be read"),
        ("tokenizer.json", b'{"model": 5}', "cannot be read"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer.json", b"[" * 100_000, "cannot be read"),
        ("tokenizer_config.json", b"\xff\xfe{\x00}\x00", "not UTF-8"),
        ("tokenizer_config.json", b'{"a":' * 100_000, "nested too deeply"),
        ("chat_template.jinja", b"\xe4", "not UTF-8"),
        ("encoding/encoding_v4.py", b"\xe4", "not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder, name, content, words):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: {words}"):
        read_checkpoint(ModelConfig(path=folder))


def test_a_tokenizer_too_large_to_be_one_is_refused_unread(folder):
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(10 << 30)  # a hole, which takes no disk
    with pytest.raises(ConfigError, match=r"tokenizer\.json: has 10240 MiB, expected at most 64"):
        read_checkpoint(ModelConfig(path=folder))


def test_the_chat_checkpoint_is_the_tiny_one_with_a_token_for_v4s_own_format():
    """Its tokenizer has that token in place of the last merge, and no template."""
    chat, tiny = MODELS / "tiny-v4-chat", MODELS / "tiny-v4"
    expected = json.loads((tiny / "tokenizer.json").read_text())
    model = expected["model"]
    *model["merges"], last = model["merges"]
    token_id = model["vocab"].pop("".join(last))
    token = expected["added_tokens"][-1] | {"id": token_id, "content": DSML, "special": False}
    expected["added_tokens"].append(token)
    for each in expected["added_tokens"]:  # as in the real one, these are text to a decoder
        each["special"] = each["special"] and each["content"] not in (THINK, END_THINK)
    assert json.loads((chat / "tokenizer.json").read_text()) == expected
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    assert json.loads((chat / "tokenizer_config.json").read_text()) == settings
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (chat / name).read_bytes() == (tiny / name).read_bytes()
