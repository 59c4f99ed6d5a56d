"""Messages survive the way there and back; anything else is malformed, and nothing worse."""

import base64
import contextlib
import json
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from sluice.transfer.envelope import Malformed, seal
from sluice.transfer.notification import KIND, MAX_BYTES, Notification
from sluice.transfer.offer import ANSWER_KIND, MAX_OFFSET, Answer, Offer
from sluice.transfer.offer import KIND as OFFER
from sluice.transfer.plan import ByteRuns, Copy

DIGEST = "00ff00ff00ff00ff"
NOTE = Notification("g", 7, 2, True, {"a": range(3, 9)}, first_token=5, checksums={"a": DIGEST})
FIELDS = json.loads(NOTE.encode().split(b" ", 3)[3])
RUNS = ByteRuns(*np.array([[0, 8], [8, 0], [4, 4]]))
OFFERED = Offer(3, b"address", (Copy("a", "a", RUNS),), NOTE.encode())
MESSAGES = [NOTE, OFFERED, Answer(3), Answer(4, "no such grant")]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


def decoders():
    return (Notification, Offer, Answer)


def test_a_notification_is_read_as_it_was_written():
    assert Notification.decode(NOTE.encode()) == NOTE
    plain = Notification("g", 7, 0, False, {"a": range(1)})
    assert Notification.decode(plain.encode()) == plain


@given(st.binary(max_size=80), st.sampled_from(["", f"{KIND} ", f"{OFFER} ", f"{ANSWER_KIND} "]))
def test_random_bytes_are_malformed(rest, head):
    for kind in decoders():
        with pytest.raises(Malformed):
            kind.decode(head.encode() + rest)


@given(ANYTHING, st.sampled_from([KIND, OFFER, ANSWER_KIND]))
def test_whatever_is_sealed_is_read_or_malformed(fields, kind):
    message = seal(kind, fields)
    for decoder in decoders():
        with contextlib.suppress(Malformed):
            assert decoder.decode(message).encode() == message


@given(st.data())
def test_one_changed_byte_anywhere_is_malformed(data):
    message = data.draw(st.sampled_from(MESSAGES))
    encoded = bytearray(message.encode())
    index = data.draw(st.integers(0, len(encoded) - 1))
    encoded[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Malformed):
        type(message).decode(bytes(encoded))


@pytest.mark.parametrize("field", ["token", "epoch", "rows", "grant"])
def test_the_digest_covers_what_checksums_of_rows_do_not(field):
    old, new = {
        "token": (b'"token":5', b'"token":6'),
        "epoch": (b'"epoch":7', b'"epoch":8'),
        "rows": (b"[3,9]", b"[3,8]"),
        "grant": (b'"grant":"g"', b'"grant":"h"'),
    }[field]
    assert old in NOTE.encode()
    with pytest.raises(Malformed):
        Notification.decode(NOTE.encode().replace(old, new))


@pytest.mark.parametrize("field", sorted(FIELDS))
@pytest.mark.parametrize(
    "value", [None, -1, 1.5, 1 << 63, [], "", "\n", "x" * 600, {"a": None}, {"a": [1]}]
)
def test_a_field_of_another_kind_or_beyond_its_bounds_is_malformed(field, value):
    with pytest.raises(Malformed):
        Notification.decode(seal(KIND, FIELDS | {field: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"more": 1},
        {"last": False},
        {"token": None},
        {"last": False, "token": None, "rows": {}, "sums": {}},
        {"rows": {"a": [9, 3]}},
        {"rows": {"a": [3, 1 << 60]}},
        {"rows": {"\ud800": [3, 9]}},
        {"sums": {"b": DIGEST}},
        {"chunk": 1 << 40},
    ],
    ids=str,
)
def test_fields_that_contradict_each_other_are_malformed(changes):
    with pytest.raises(Malformed):
        Notification.decode(seal(KIND, FIELDS | changes))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_missing_field_is_malformed(field):
    fields = {key: value for key, value in FIELDS.items() if key != field}
    with pytest.raises(Malformed):
        Notification.decode(seal(KIND, fields))


def test_a_repeated_key_is_malformed():
    body = json.dumps(FIELDS, separators=(",", ":"))
    twice = body.replace('"epoch":7', '"epoch":7,"epoch":7').encode()
    with pytest.raises(Malformed):
        Notification.decode(sealed_as_it_is(KIND, twice))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("spelling", [(b",", b", "), (b"3", b"3e0"), (b'"', b'"\\u0020')])
def test_what_is_spelled_otherwise_is_malformed(message, spelling):
    head, body = message.encode().split(b"{" if message is NOTE else b"[", 1)
    kind = " ".join(head.decode().split()[:2])
    body = (b"{" if message is NOTE else b"[") + body.replace(*spelling)
    if body in message.encode():
        return  # nothing to spell
    with pytest.raises(Malformed):
        type(message).decode(sealed_as_it_is(kind, body))


@pytest.mark.parametrize("body", [b"[" * 30_000, b"1" * 30_000, b"NaN", b"[1e400]"])
def test_nesting_and_endless_numbers_are_malformed(body):
    for decoder, kind in zip(decoders(), (KIND, OFFER, ANSWER_KIND), strict=True):
        with pytest.raises(Malformed):
            decoder.decode(sealed_as_it_is(kind, body))


def test_a_message_beyond_its_size_is_malformed_at_once():
    message = sealed_as_it_is(KIND, b"[" + b"0," * MAX_BYTES + b"0]")
    started = time.monotonic()
    for _ in range(1000):
        with pytest.raises(Malformed):
            Notification.decode(message)
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize(
    "numbers",
    [
        [[-1], [0], [4]],
        [[0], [-1], [4]],
        [[0], [0], [0]],
        [[0], [0], [-4]],
        [[MAX_OFFSET], [0], [4]],
        [[0], [np.iinfo(np.int64).max], [4]],
        [[0], [0], [np.iinfo(np.int64).max]],
    ],
    ids=str,
)
def test_runs_beyond_any_memory_are_malformed(numbers):
    runs = ByteRuns(*np.array(numbers, dtype=np.int64))
    with pytest.raises(Malformed):
        Offer.decode(Offer(3, b"", (Copy("a", "a", runs),), b"").encode())


@pytest.mark.parametrize("num_bytes", [1, 8, 25])
def test_runs_that_are_not_triples_are_malformed(num_bytes):
    text = base64.b64encode(bytes(num_bytes)).decode()
    with pytest.raises(Malformed):
        Offer.decode(seal(OFFER, (3, "", [("a", "a", text)], "")))


def test_an_answer_is_one_line_of_bounded_length():
    assert Answer.decode(Answer(3, "a\nb" * 2000).encode()).error.isprintable()
    with pytest.raises(Malformed):
        Answer.decode(seal(ANSWER_KIND, (3, "a\nb")))


def sealed_as_it_is(kind, body):
    """As `seal` would, whatever the body is."""
    digest = xxhash.xxh3_128_hexdigest(kind.encode() + body)
    return f"{kind} {digest} ".encode() + body
