"""Tokens to text: exact, in whole characters, up to the first stop string."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from sluice.router.text.answers.stop import StopFilter
from sluice.router.text.detokenize import Detokenizer


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], group_size: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    starts = range(0, len(token_ids), group_size)
    groups = [token_ids[start : start + group_size] for start in starts]
    return [detokenizer.push(group) for group in groups] + [detokenizer.flush()]


def sentencepiece_tokenizer() -> Tokenizer:
    """Like Llama's: words begin with a mark, unknown characters are single bytes."""
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "▁": 4}
    vocab |= {f"<0x{byte:02X}>": 5 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


async def test_pieces_join_to_the_whole_text_for_any_tokens(world):
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    vocab_size = world.tokenizer.get_vocab_size()
    for _ in range(100):
        ids = [rng.randrange(vocab_size) for _ in range(rng.randrange(40))]
        pieces = pieces_of(world.tokenizer, ids, rng.randrange(1, 9))
        assert "".join(pieces) == world.tokenizer.decode(ids, skip_special_tokens=True)


async def test_a_character_of_several_tokens_comes_whole(world):
    ids = list(world.ids("a☕b"))
    assert "".join(pieces_of(world.tokenizer, ids)) == "a☕b"
    assert not any("\ufffd" in piece for piece in pieces_of(world.tokenizer, ids))


async def test_an_unfinished_character_is_shown_at_the_end(world):
    ids = list(world.ids("日"))[:-1]
    *pieces, rest = pieces_of(world.tokenizer, ids)
    assert "".join(pieces) == "" and "\ufffd" in rest


def test_sentencepiece_spaces_bytes_and_special_tokens_survive():
    tokenizer = sentencepiece_tokenizer()
    bos = tokenizer.token_to_id("<s>")
    coffee = [5 + byte for byte in "☕é".encode()]
    for ids in ([1, 2, 3], [bos, 1, 2], [1, bos, 2], [2, *coffee, 1], [*coffee, *coffee, 4, 2]):
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def filtered(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop_filter = StopFilter(stop)
    text = "".join(stop_filter.push(piece) for piece in pieces)
    return text + ("" if stop_filter.stopped else stop_filter.flush()), stop_filter.stopped


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["ab"], "xxabyy", "xx"),
        (["aab"], "aaab", "a"),
        (["abc", "b"], "abc", "a"),
        (["bc", "abc"], "xabc", "x"),
        (["abc"], "xxab", "xxab"),
        (["end"], "", ""),
    ],
)
def test_text_ends_before_the_first_complete_stop_string(stop, text, expected):
    assert filtered(stop, list(text))[0] == expected
    assert filtered(stop, list(text))[1] == (expected != text)


def test_nothing_of_a_stop_string_is_shown_early():
    stop_filter = StopFilter(["stop!"])
    assert stop_filter.push("a sto") == "a "
    assert stop_filter.push("ry st") == "story "
    assert stop_filter.push("op!") == "" and stop_filter.stopped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab\n<calls>ba\nx", "ab\n<calls>ba\nx"),
        ("ab\nb<calls>", "ab"),
        ("ab\n<cal", "ab"),
        ("ab\n\n<calls>x", "ab"),
        ("abx<calls>", "ab"),
    ],
)
def test_from_one_of_the_ends_on_nothing_stops_a_text(text, expected):
    for pieces in ([text], list(text)):
        stop_filter = StopFilter(["\n", "x", "alls"], ends=["\n<calls>", "<calls>"])
        shown = "".join(stop_filter.push(piece) for piece in pieces)
        if expected == "ab" and not stop_filter.stopped:
            assert text == "ab\n<cal" and shown == "ab"  # not decided yet
        else:
            assert shown == expected and stop_filter.stopped == (expected == "ab")


def test_text_without_a_match_passes_unchanged_however_it_is_cut():
    seed = random.randrange(2**32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(30))
        stop = ["".join(rng.choice("ab") for _ in range(rng.randrange(3, 8))) for _ in range(2)]
        ends = [text.find(s) + len(s) for s in stop if s in text]
        starts = [text.find(s) for s in stop if s in text and text.find(s) + len(s) == min(ends)]
        assert filtered(stop, list(text))[0] == (text[: min(starts)] if ends else text)
