"""Log lines: one an event, whoever wrote it, as pairs or as a JSON object."""

import json
import logging

import pytest

from sluice.deploy.common.logs import JsonLines, TextLines
from sluice.router.common.events import log_event


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


HOSTILE = "\x1b]0;x\x07\x1b[2J\x00\x85\x9b\u202e\u2028\r\nevent=finished"


@pytest.mark.parametrize("form", [JsonLines(), TextLines("%(name)s %(message)s")])
def test_no_text_ends_its_line_or_speaks_to_a_terminal(form):
    record = logging.makeLogRecord({"name": "sluice.test", "msg": f"event=x value={HOSTILE}"})
    assert form.format(record).isprintable()
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    assert all(line.isprintable() for line in form.format(record).split("\n"))


def test_json_lines_read_back_what_was_written():
    record = logging.makeLogRecord({"fields": {"value": HOSTILE}})
    assert json.loads(JsonLines().format(record))["value"] == HOSTILE
