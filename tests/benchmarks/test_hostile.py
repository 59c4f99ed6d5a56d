"""What the hostile benchmark sends, and what it says of the figures it is given."""

import asyncio
import json
import math

import pytest

from sluice.benchmarks.hostile import broken, compared
from sluice.benchmarks.hostile_attack import UNANSWERED, attack, numbered
from sluice.benchmarks.hostile_bodies import MARK
from sluice.benchmarks.hostile_inputs import GOOD, INPUTS, NUMBERS, SCHEMAS, Hostile
from sluice.benchmarks.hostile_ways import answered, held
from sluice.benchmarks.innocent import WRONG, Asked, stretches, waits


def split(request):
    head, _, body = request.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("name", [*NUMBERS, *SCHEMAS, *GOOD])
def test_requests_are_whole(name):
    for request in INPUTS[name].requests("tiny"):
        head, body = split(request)
        assert b"content-length: %d" % len(body) in head


@pytest.mark.parametrize("name", ["top_k", "schema_of_itself", "optional_10000", "tool_shapes"])
def test_no_two_attempts_send_the_same(name):
    for request in INPUTS[name].requests("tiny"):
        first, second = (numbered(request, number) for number in (0, 1))
        assert first != second and len(first) == len(second)
        assert MARK not in json.dumps(json.loads(split(first)[1]))


def test_what_an_attack_adds_is_the_difference_of_the_slowest_hundredths():
    quick = [Asked(0.0, 0.010, 0.005)] * 99 + [Asked(0.0, 0.5, 0.005), Asked(0.0, 0.001, None)]
    slow = [Asked(1.0, 0.030, 0.006)] * 5 + [Asked(1.0, 0.041, None), Asked(1.0, 9.0, 9.0, "lost")]
    row = compared(*stretches([*quick, *slow], attack_begin_s=1.0, attack_end_s=2.0))
    assert (row["added_answer_p99_ms"], row["added_health_p99_ms"]) == (20.0, 40.0)
    assert (row["num_wrong"], row["num_failed"]) == (0, 1)


def test_what_is_under_way_when_an_attack_begins_is_no_baseline():
    asked = [Asked(at_s, 1.5, 1.0) for at_s in (0.0, 1.0, 2.0, 3.0, 4.0)]
    before, during, after = stretches(asked, attack_begin_s=2.0, attack_end_s=4.0)
    assert (before.num_answers, during.num_answers, after.num_answers) == (1, 3, 1)


def test_wrong_texts_are_no_failures():
    counted = waits([Asked(0.0, 1.0, 1.0, WRONG), Asked(0.0, 1.0, 1.0, "lost")])
    assert (counted.num_answers, counted.num_wrong, counted.num_failed) == (2, 1, 1)


def test_each_limit_is_judged_and_work_may_take_time():
    row = {
        "num_wrong": 0,
        "num_failed": 0,
        "added_answer_p99_ms": 50.0,
        "added_health_p99_ms": 50.0,
        "router_grown_mb": 256.0,
        "node_grown_mb": 256.0,
        "num_ended": 0,
        "rest_s": 0.1,
    }
    assert broken(row, is_work=False) == []
    for key in row:
        is_work = key.startswith("added")
        assert len(broken({**row, key: row[key] + 999}, is_work=False)) == 1
        assert len(broken({**row, key: math.nan}, is_work=True)) == 1 - is_work


async def test_attempts_are_counted_by_how_they_end():
    async def serve(reader, writer):
        if await reader.readuntil(b"\r\n\r\n") != b"hang up\r\n\r\n":
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    requests = [b"odd\r\n\r\n", b"hang up\r\n\r\n"]
    polite = Hostile(lambda model: requests, answered, num_connections=2, pause_s=0.01)
    patient = Hostile(lambda model: [b"half"], held, num_connections=3)
    async with server:
        outcomes = await attack(polite, requests, url, 0.3)
        assert outcomes["400"] > 0 and outcomes["closed"] > 0
        assert await attack(patient, [b"half"], url, 0.1) == {UNANSWERED: 3}
