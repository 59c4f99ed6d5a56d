"""The status page: what it shows, to whom, and that it never shows what a request says."""

from __future__ import annotations

import logging
import re

from sluice.protocol.messages import TransferFailed
from sluice.router.recent import Recent
from sluice.router.troubles import MAX_KEPT


async def page(world, **headers) -> str:
    answer = await world.http.get("/", headers=headers)
    assert answer.headers["content-type"].startswith("text/html")
    return answer.text


async def test_it_shows_nodes_pools_load_and_latencies(world):
    world.add_decode("decode-1")
    await world.complete(max_tokens=9)
    text = await page(world)
    for shown in ("tiny", "prefill-0", "decode-0", "decode-1", "0 pages used, 0 cached, 64 free"):
        assert shown in text
    assert text.count('class="state ready"') == 4  # three nodes and the whole
    assert len(re.findall(r'"value">[\d.]+ m?s<', text)) == 2  # both medians


async def test_it_loads_nothing_from_anywhere_and_runs_only_its_own_script(world):
    answer = await world.http.get("/")
    policy = answer.headers["content-security-policy"]
    [nonce] = re.findall(r"'nonce-([\w-]+)'", policy)
    assert "default-src 'none'" in policy and f'<script nonce="{nonce}">' in answer.text
    assert not re.search(r'(src|href)="(https?:)?//', answer.text)
    assert nonce not in (await world.http.get("/")).headers["content-security-policy"]


async def test_with_keys_it_says_nothing_without_one(make_world, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\n")
    world = await make_world(router={"api_keys_file": str(keys)})
    world.add_prefill()
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = await world.http.get("/", headers=headers)
        assert answer.status_code == 401 and "<form>" in answer.text
        assert "prefill-0" not in answer.text and "tiny" not in answer.text
    assert "prefill-0" in await page(world, authorization="Bearer first")


async def test_troubles_are_shown_without_the_request_s_text(world):
    world.prefills["prefill-0"].faults = [TransferFailed("the cable is cut")] * 3
    answer = await world.complete("a secret prompt")
    text = await page(world)
    assert answer.status_code == 500 and "the cable is cut" in text and "retry" in text
    assert answer.headers["x-request-id"] in text and "secret" not in text


async def test_troubles_are_bounded(world):
    for number in range(MAX_KEPT + 5):
        logging.getLogger("sluice.router").warning("event=trouble number=%d", number)
    text = await page(world)
    assert text.count("<tr>") == MAX_KEPT
    assert f"number={MAX_KEPT + 4}<" in text and "number=4<" not in text


async def test_what_others_wrote_is_text_and_never_markup(make_world, checkpoint):
    world = await make_world(model={"path": str(checkpoint), "name": "<script>x</script>"})
    world.add_decode("<img src=x>")
    text = await page(world)
    assert "&lt;script&gt;x" in text and "&lt;img src=x&gt;" in text and "<img" not in text
    assert text.count("<script") == 1


async def test_without_a_role_it_says_why_nothing_is_answered(world):
    world.remove("decode-0")
    assert "no decode node is ready" in await page(world)


def test_throughput_forgets_what_is_older_than_a_minute():
    now = [1000.0]
    recent = Recent(clock=lambda: now[0])
    recent.add_tokens(30)
    now[0] += 60
    recent.add_tokens(5)
    assert sum(recent.tokens_by_second()) == 30
    now[0] += 1
    assert recent.tokens_by_second() == [0] * 59 + [5]
