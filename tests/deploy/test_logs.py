"""JSON log lines: one object an event, whoever wrote it."""

import json
import logging

import pytest

from sluice.deploy.logs import JsonLines
from sluice.router.events import log_event


@pytest.fixture
def lines():
    """What a logger wrote as JSON so far; the logger is `log`."""

    class Lines(logging.Handler):
        def __init__(self):
            super().__init__()
            self.setFormatter(JsonLines())
            self.log = logging.Logger("sluice.test")
            self.log.addHandler(self)
            self.written = []

        def emit(self, record):
            self.written.append(json.loads(self.format(record)))

    return Lines()


def test_an_events_fields_keep_their_types(lines):
    log_event(lines.log, "finished", request_id="r", tokens=3, took_s=0.5, detail=ValueError("a b"))
    [line] = lines.written
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "INFO", "logger": "sluice.test", "event": "finished", "request_id": "r",
        "tokens": 3, "took_s": 0.5, "detail": "a b",
    }  # fmt: skip


def test_a_line_of_pairs_becomes_fields_with_the_spaces_in_their_values(lines):
    lines.log.warning("event=node_dead node=%s reason=%s", "decode-0", "it is\ngone: a b")
    [line] = lines.written
    assert (line["event"], line["node"], line["reason"]) == (
        "node_dead", "decode-0", "it is\ngone: a b",
    )  # fmt: skip


def test_any_other_line_is_a_message_and_a_traceback_stays_in_its_line(lines):
    try:
        raise RuntimeError("bug")
    except RuntimeError:
        lines.log.exception("something failed")
    [line] = lines.written
    assert line["message"] == "something failed" and "RuntimeError: bug" in line["traceback"]
