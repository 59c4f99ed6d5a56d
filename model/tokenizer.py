"""A small byte-level BPE tokenizer for made checkpoints, with DeepSeek's special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.model.v4.config import DeepseekV4Config
from sluice.protocol.messages import ConfigError

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 0, 1, 2

# Words with the space before them, numbers two digits at a time, runs of other characters.
_SPLIT = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def write_tokenizer(folder: Path, texts: Iterable[str], config: DeepseekV4Config) -> None:
    """Train merges on `texts` and write tokenizer.json and tokenizer_config.json.

    Raises ConfigError if the vocabulary cannot hold the bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(SPECIAL_TOKENS)
    if config.vocab_size < least:
        raise ConfigError(f"vocab_size is {config.vocab_size}, expected at least {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_TOKEN_ID],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[PAD_TOKEN_ID],
        "model_max_length": config.max_model_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8")
