"""Checkpoints: three name dialects, one content; what does not fit is refused by name."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.model.common.checkpoint import official_name, read_weights
from sluice.model.common.weight_files import fingerprint
from sluice.model.make_checkpoint import TINY, make_checkpoint, random_tensors, saved_name
from sluice.model.registry import load_model
from sluice.model.v4.config import LayerType
from sluice.model.v4.inventory import tensor_shapes
from sluice.protocol.messages import ConfigError

FILE = "model.safetensors"


@pytest.fixture
def checkpoint(tmp_path):
    make_checkpoint(tmp_path, seed=2)
    return tmp_path


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_saved_names_are_read_back():
    for name in tensor_shapes(TINY):
        assert official_name(saved_name(name)) == name
        assert official_name(name) == name


def test_a_made_checkpoint_loads_in_transformers_with_every_tensor(checkpoint):
    from transformers import AutoTokenizer, DeepseekV4ForCausalLM

    _, info = DeepseekV4ForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"


@pytest.mark.parametrize("original_format", [True, False])
def test_what_transformers_saves_loads_here(checkpoint, tmp_path, original_format):
    from transformers import DeepseekV4ForCausalLM

    again = tmp_path / "again"
    reference = DeepseekV4ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    reference.save_pretrained(again, save_original_format=original_format)
    assert same(read_weights(again), read_weights(checkpoint))
    assert load_model(again).specs == load_model(checkpoint).specs


def test_official_names_and_mtp_tensors_load(checkpoint):
    tensors = read_weights(checkpoint)
    save_file(tensors | {"mtp.0.norm.weight": torch.ones(64)}, checkpoint / FILE)
    assert same(read_weights(checkpoint), tensors)
    load_model(checkpoint)


def test_a_checkpoint_in_several_files_loads(checkpoint):
    tensors = load_file(checkpoint / FILE)
    (checkpoint / FILE).unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{place % 3}.safetensors" for place, name in enumerate(names)}
    for part in set(weight_map.values()):
        chosen = {name: tensors[name] for name in names if weight_map[name] == part}
        save_file(chosen, checkpoint / part)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    load_model(checkpoint)
    (checkpoint / "part-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"part-1\.safetensors.*is not there"):
        load_model(checkpoint)


def rewritten(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("head.weight"), r"missing: head\.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "unexpected: extra"),
        (lambda t: t.update({"head.weight": torch.ones(3, 4)}), r"\(3, 4\), expected \(512, 64\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(checkpoint, change, message):
    rewritten(checkpoint, change)
    with pytest.raises(ConfigError, match=message):
        load_model(checkpoint)


def test_a_missing_or_broken_weights_file_is_named(checkpoint):
    (checkpoint / FILE).write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read"):
        load_model(checkpoint)
    (checkpoint / FILE).unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file"):
        load_model(checkpoint)


def test_an_unknown_dtype_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="model.dtype is 'int8'"):
        load_model(checkpoint, dtype="int8")


def test_equal_arguments_give_equal_bytes_and_leave_torch_alone(tmp_path):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for folder in ("a", "b"):
        make_checkpoint(tmp_path / folder, seed=4, texts=["the sluice opens at the tide " * 9])
    assert torch.equal(before, torch.get_rng_state())
    for file in sorted(path.name for path in (tmp_path / "a").iterdir()):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_fingerprints_tell_seeds_apart(tmp_path):
    for seed, folder in ((0, "a"), (0, "b"), (1, "c")):
        make_checkpoint(tmp_path / folder, seed=seed)
    prints = [fingerprint(tmp_path / folder) for folder in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_hash_tables_name_distinct_experts():
    table = random_tensors(TINY, seed=0)["layers.0.ffn.gate.tid2eid"]
    assert table.unique().tolist() == list(range(TINY.num_experts))
    assert (table[:, 0] != table[:, 1]).all()


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size is 100, expected at least 263"):
        make_checkpoint(tmp_path, config=dataclasses.replace(TINY, vocab_size=100))


def test_a_model_of_sliding_layers_alone_works(tmp_path, driver):
    config = dataclasses.replace(
        TINY, layer_types=(LayerType.SLIDING,) * 2, mlp_types=TINY.mlp_types[1:3]
    )
    make_checkpoint(tmp_path, config=config)
    logits = driver(load_model(tmp_path)).run("r", list(range(40)), [13, 1, 26])
    assert logits.isfinite().all()
