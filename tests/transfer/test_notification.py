"""Notifications survive the way there and back; anything else is malformed, and nothing worse."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.transfer.notification import Malformed, Notification

NOTE = Notification("g", 7, 2, True, {"a": range(3, 9)}, first_token=5, checksums={"a": "ff"})
FIELDS = json.loads(NOTE.encode())


def test_a_notification_is_read_as_it_was_written():
    assert Notification.decode(NOTE.encode()) == NOTE
    plain = Notification("g", 7, 0, False, {})
    assert Notification.decode(plain.encode()) == plain


@given(st.binary(max_size=80))
def test_random_bytes_are_malformed(message):
    with pytest.raises(Malformed):
        Notification.decode(message)


@pytest.mark.parametrize("field", sorted(FIELDS))
@pytest.mark.parametrize("value", [None, -1.5, [], {"a": None}, {"a": [1]}, {"a": [9, 3]}, "x"])
def test_a_field_of_another_kind_is_malformed(field, value):
    if (field == "token" and value is None) or (field in ("rows", "sums") and not value):
        value = 1.5
    if field == "grant" and value == "x":
        value = 4
    with pytest.raises(Malformed):
        Notification.decode(json.dumps(FIELDS | {field: value}).encode())


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_missing_field_is_malformed(field):
    fields = {key: value for key, value in FIELDS.items() if key != field}
    with pytest.raises(Malformed):
        Notification.decode(json.dumps(fields).encode())


def test_deep_nesting_is_malformed():
    with pytest.raises(Malformed):
        Notification.decode(b"[" * 100_000)
