"""tokenizer.json and tokenizer_config.json from a GGUF file's metadata: byte-level BPE."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from sluice.model.gguf.file import GgufFile
from sluice.protocol.messages import ConfigError

CONTROL, USER_DEFINED = 3, 4  # token types that are matched whole in the text

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    """Every digit apart, and only then words: spaces before a number are a piece of their own."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


_PRE_TOKENIZERS = {  # by tokenizer.ggml.pre; they decide how merges apply, so no guesses
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """Raises ConfigError for kinds of tokenizers that are not known here."""
    if (model := file.require("tokenizer.ggml.model")) != "gpt2":
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model is {model!r}, expected 'gpt2' (byte-level BPE)"
        )
    pre = _pre(file)
    if pre not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}, expected one of "
            f"{', '.join(_PRE_TOKENIZERS)}"
        )
    tokens = file.require("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.require("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    types = file.require("tokenizer.ggml.token_type")
    whole = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(whole)
    return tokenizer


def _pre(file: GgufFile) -> str:
    return str(file.get("tokenizer.ggml.pre", "default"))


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """tokenizer_config.json: special tokens by role, and the chat template if there is one."""
    tokens = file.require("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", _pre(file) == "llama-bpe"),
        "model_max_length": file.require(f"{file.require('general.architecture')}.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := file.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            settings[f"{key}_token"] = tokens[token_id]
    if (template := file.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    return settings
