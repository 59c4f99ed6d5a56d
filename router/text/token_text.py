"""TokenTexts: single tokens as bytes and text, for answers that list tokens.

A token need not be whole characters, so its bytes are taken from the vocabulary itself. Two
spellings of bytes are known: the byte-level alphabet, where each byte has a printable character,
and `<0xE2>` beside `▁` for a space. Other tokenizers' tokens are decoded one by one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """For one tokenizer; keeps what it has looked up, as answers repeat their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content for token_id, token in _added_tokens(tokenizer).items()
        }
        self._spelled = _spelling(tokenizer)
        self.bytes_of = functools.lru_cache(maxsize=65536)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        """The token's text; a token that is no whole characters is written `bytes:\\xe2\\x98`."""
        content = self.bytes_of(token_id)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        if self._spelled is not None and (content := self._spelled(token)) is not None:
            return content
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()


def _added_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    return tokenizer.get_added_tokens_decoder()


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes | None] | None:
    """How this tokenizer's vocabulary spells bytes; None if in no way that is known."""
    decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
    if '"ByteLevel"' in decoder:
        return _from_byte_level
    if '"ByteFallback"' in decoder:
        return _from_byte_fallback
    return None


def _from_byte_level(token: str) -> bytes | None:
    alphabet = _byte_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return None


def _from_byte_fallback(token: str) -> bytes | None:
    if (match := BYTE_TOKEN.fullmatch(token)) is not None:
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte: itself, or the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}
