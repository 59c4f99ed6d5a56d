"""Requests made from /openapi.json, within the schema and beside it: none breaks the router.

`SLUICE_FUZZ_CASES=5000 pytest tests/router/test_fuzz.py` sends so many in all, drawn anew; what
fails is printed with its curl line.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks

from sluice.router.http.openapi import openapi

OPERATIONS = {
    operation.label: operation
    for result in schemathesis.openapi.from_dict(openapi("tiny")).get_all_operations()
    if (operation := result.ok()).body or operation.path_parameters
}  # the others take nothing that could be wrong
PLAIN = {
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "the cat"}]},
    "POST /v1/completions": {"prompt": "the cat"},
}
NUM_CASES = int(os.environ.get("SLUICE_FUZZ_CASES", "0"))
FEW_CASES = 30  # of each operation, where no number is given: these take seconds
CHECKS = [
    checks.not_a_server_error,
    checks.response_schema_conformance,
    checks.content_type_conformance,
    checks.status_code_conformance,
]


def cases_of(operation):
    """Within the schema, with something wrong, and a good request with a few fields of either."""
    within = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not operation.body:  # a path's text cannot be wrong
        return within
    beside = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    if operation.label not in PLAIN:
        return within | beside
    return within | beside | mostly_plain(operation, within) | mostly_plain(operation, beside)


@st.composite
def mostly_plain(draw, operation, cases):
    """Gets further: fields drawn one by one hardly ever go together."""
    case, stream = draw(cases), draw(st.booleans())
    body = {"model": "tiny", "max_tokens": 8, "stream": stream, **PLAIN[operation.label]}
    if isinstance(case.body, dict) and case.body:
        names = st.lists(st.sampled_from(sorted(case.body)), max_size=2)
        body |= {name: case.body[name] for name in draw(names)}
    return operation.Case(method=case.method, body=body, media_type="application/json")


async def send(http: httpx.AsyncClient, case) -> httpx.Response:
    raw = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
    return await http.request(raw.method, raw.url, headers=dict(raw.headers), content=raw.body)


@pytest.mark.timeout(3600 if NUM_CASES else 60)
@pytest.mark.parametrize("label", OPERATIONS)
async def test_no_request_breaks_the_router(world, label):
    loop, statuses = asyncio.get_running_loop(), Counter()

    @settings(
        max_examples=NUM_CASES // len(OPERATIONS) or FEW_CASES,
        derandomize=not NUM_CASES,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases_of(OPERATIONS[label]))
    def fuzz(case) -> None:
        answer = asyncio.run_coroutine_threadsafe(send(world.http, case), loop).result()
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    await asyncio.to_thread(fuzz)
    print(label, dict(statuses))
    assert label not in PLAIN or {200, 400} <= set(statuses), statuses
    await world.until(world.quiescent)
