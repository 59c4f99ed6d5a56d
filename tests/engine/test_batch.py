"""The flat form of a ragged batch."""

from sluice.cache.manager import CacheManager
from sluice.cache.spec import Full, PoolSpec, Window
from sluice.engine.batch import Chunk, build_inputs
from sluice.engine.request import Request
from sluice.protocol.messages import SamplingParams

FULL = PoolSpec("rows", (0,), (1,), "float32", 2, 4, Full())
WINDOW = PoolSpec("window", (0,), (1,), "float32", 1, 2, Window(3))


def request(name, num_tokens):
    return Request(name, name, num_tokens, SamplingParams(1), list(range(100, 100 + num_tokens)))


def test_chunks_become_flat_tokens_and_page_tables():
    manager = CacheManager((FULL, WINDOW), {FULL.table: 9, WINDOW.table: 9}, 4)
    manager.grant("a", num_tokens=6, max_tokens=8)
    manager.grant("b", num_tokens=0, max_tokens=3)
    manager.extend("a", 7)
    manager.extend("b", 3)
    inputs = build_inputs([Chunk(request("a", 7), 6, 7), Chunk(request("b", 3), 0, 3)], manager)

    assert inputs.token_ids.tolist() == [106, 100, 101, 102]
    assert inputs.positions.tolist() == [6, 0, 1, 2]
    assert inputs.request_index.tolist() == [0, 1, 1, 1]
    assert inputs.query_start.tolist() == [0, 1, 4]
    assert inputs.num_computed.tolist() == [6, 0]
    window = inputs.page_tables[WINDOW.table]
    held = manager.page_tables("a")[WINDOW.table]
    assert inputs.first_pages[WINDOW.table].tolist() == [held.first, 0] == [2, 0]
    assert window.tolist()[0] == list(held.pages), "no column for pages before the window"
    slots = inputs.slots(FULL, inputs.request_index, inputs.positions)
    assert slots[0].item() == manager.page_tables("a")[FULL.table].pages[1] * 2 + 1
