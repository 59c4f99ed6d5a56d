"""An innocent client: ten short requests and ten looks at /health a second, come what may.

Open loop: what is late does not hold up what comes next, as other people's requests would not wait
either. Every text is compared with the one that its prompt got when nothing else ran.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sluice.benchmarks.hostile_ways import answered
from sluice.benchmarks.load import PROMPTS, body, percentile
from sluice.benchmarks.load_client import stream

PER_S = 10
OUTPUT_TOKENS = 8  # with 16 the client alone took most of two cores
LIMIT_S = 30.0
HEALTH = b"GET /health HTTP/1.1\r\nhost: sluice\r\nconnection: close\r\n\r\n"
WRONG = "wrong text"


@dataclass(frozen=True)
class Asked:
    """One request, or one look at /health (`first_s` is None); `problem` is empty if it is well."""

    at_s: float  # when it was sent, as time.monotonic counts
    whole_s: float
    first_s: float | None
    problem: str = ""


@dataclass(frozen=True)
class Waits:
    """What the requests of a stretch of time had to wait; failed ones are only counted."""

    num_answers: int
    num_wrong: int
    num_failed: int
    answer_p50_ms: float
    answer_p99_ms: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    health_p50_ms: float
    health_p99_ms: float


async def references(url: str, model: str) -> dict[str, str]:
    """What each prompt is answered. Raises ConnectionError or TimeoutError if one is not."""
    texts = {}
    async with asyncio.timeout(LIMIT_S):
        for prompt in PROMPTS:
            got = await stream(url, body(model, prompt, OUTPUT_TOKENS))
            if got.problem:
                raise ConnectionError(f"{url}: {prompt!r}: {got.problem}")
            texts[prompt] = got.text
    return texts


async def ask(
    url: str, model: str, expected: Mapping[str, str], enough: asyncio.Event
) -> list[Asked]:
    """Ask until it is enough; returns once all that was asked is answered or given up."""
    tasks: list[asyncio.Task[Asked]] = []
    begin = time.monotonic()
    for number, prompt in enumerate(itertools.cycle(expected)):
        await asyncio.sleep(begin + number / PER_S - time.monotonic())
        if enough.is_set():
            break
        tasks.append(asyncio.create_task(_request(url, model, prompt, expected[prompt])))
        tasks.append(asyncio.create_task(_health(url)))
    return await asyncio.gather(*tasks)


def stretches(
    asked: Iterable[Asked], attack_begin_s: float, attack_end_s: float
) -> tuple[Waits, Waits, Waits]:
    """Before, during and after an attack; what was under way when it began was beside it."""
    before, during, after = list[Asked](), list[Asked](), list[Asked]()
    for one in asked:
        if one.at_s + one.whole_s < attack_begin_s:
            before.append(one)
        elif one.at_s < attack_end_s:
            during.append(one)
        else:
            after.append(one)
    return waits(before), waits(during), waits(after)


def waits(asked: Sequence[Asked]) -> Waits:
    good = [a for a in asked if not a.problem]
    num_wrong = sum(a.problem == WRONG for a in asked)
    answers = [a.whole_s for a in good if a.first_s is not None]
    first = [a.first_s for a in good if a.first_s is not None]
    health = [a.whole_s for a in good if a.first_s is None]
    return Waits(
        sum(a.first_s is not None for a in asked),
        num_wrong,
        sum(bool(a.problem) for a in asked) - num_wrong,
        *(round(1000 * v, 1) for times in (answers, first, health) for v in _p50_p99(times)),
    )


def problems(asked: Iterable[Asked]) -> Counter[str]:
    """What went wrong, and how often."""
    return Counter(a.problem for a in asked if a.problem)


def _p50_p99(times: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return percentile(ordered, 0.5), percentile(ordered, 0.99)


async def _request(url: str, model: str, prompt: str, expected: str) -> Asked:
    sent = time.monotonic()
    try:
        async with asyncio.timeout(LIMIT_S):
            got = await stream(url, body(model, prompt, OUTPUT_TOKENS))
    except TimeoutError:
        return Asked(sent, LIMIT_S, LIMIT_S, f"no answer within {LIMIT_S:g} s")
    problem = got.problem or (WRONG if got.text != expected else "")
    return Asked(sent, got.whole_s, got.first_s, problem)


async def _health(url: str) -> Asked:
    sent = time.monotonic()
    try:
        async with asyncio.timeout(LIMIT_S):
            status = await answered(url, HEALTH)
    except OSError as error:
        return Asked(sent, time.monotonic() - sent, None, f"/health: {type(error).__name__}")
    problem = "" if status == "200" else f"/health: {status}"
    return Asked(sent, time.monotonic() - sent, None, problem)
