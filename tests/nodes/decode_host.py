"""A decode node in a process of its own, driven through a pipe: the other half of a PD pair.

Run as `python decode_host.py ADDRESS CONFIG`; each message is (method of DecodeHost, arguments)
and is answered by (ok, value or exception).
"""

from __future__ import annotations

import json
import queue
import sys
from collections import defaultdict
from dataclasses import replace
from multiprocessing.connection import Client
from pathlib import Path

import torch

from sluice.decode_node.grants import Stream
from sluice.decode_node.node import DecodeNode
from sluice.engine.runner import Runner
from sluice.protocol.config import parse_config
from sluice.protocol.messages import GenerateRequest, NodeInfo, PageGrant, TokenChunk
from sluice.transfer.receiver import Arrival

ROUTER = "test-router"


def live_rows(runner: Runner, holder: str, num_tokens: int) -> dict[str, bytes]:
    """Bytes of the rows of each pool that must stay at `num_tokens` tokens, in logical order."""
    tables = runner.manager.page_tables(holder)
    found = {}
    for spec in runner.specs:
        tokens = torch.tensor(spec.live_rows(num_tokens), dtype=torch.int64) * spec.tokens_per_row
        held = tables[spec.table]
        pages = [
            held.pages[token // spec.tokens_per_page - held.first] for token in tokens.tolist()
        ]
        offsets = tokens % spec.tokens_per_page // spec.tokens_per_row
        rows = runner.pools[spec.name].tensor[torch.tensor(pages, dtype=torch.int64), :, offsets]
        found[spec.name] = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return found


class WatchedDecodeNode(DecodeNode):
    """A decode node that remembers each pool's bytes as they arrived, and can zero a pool then."""

    zeroed_pool: str | None = None

    def _take_arrival(self, stream: Stream, arrival: Arrival) -> None:
        super()._take_arrival(stream, arrival)
        if stream.running:
            grant = stream.grant
            self.arrived[grant.grant_id] = live_rows(self.runner, grant.grant_id, grant.num_tokens)
            if self.zeroed_pool is not None:
                self.runner.pools[self.zeroed_pool].tensor.zero_()

    def start(self) -> None:
        self.arrived: dict[str, dict[str, bytes]] = {}
        super().start()


class DecodeHost:
    """What the tests ask of the decode process."""

    def __init__(self, config_json: str) -> None:
        config = parse_config(json.loads(config_json))
        self.node = WatchedDecodeNode.load(config, "decode-0", "127.0.0.1")
        self.node.start()
        self.chunks: queue.Queue[list[TokenChunk]] = queue.Queue()
        self.received: dict[str, list[TokenChunk]] = defaultdict(list)
        self.node.subscribe(ROUTER, self.chunks.put)

    def info(self) -> NodeInfo:
        return self.node.info

    def reserve(self, request: GenerateRequest) -> PageGrant:
        return self.node.reserve(replace(request, router_id=ROUTER)).result(30)

    def release(self, request_id: str) -> None:
        self.node.release(request_id, in_flight=False).result(30)

    def zero(self, pool: str | None) -> None:
        self.node.zeroed_pool = pool

    def finish(self, grant: PageGrant) -> tuple[list[int], dict[str, bytes]]:
        """Tokens until the request's end, and the bytes that had arrived before the first."""
        received = self.received[grant.request_id]
        while not (received and received[-1].finish_reason is not None):
            for chunk in self.chunks.get(timeout=60):
                assert chunk.error is None or chunk.request_id != grant.request_id, chunk.error
                self.received[chunk.request_id].append(chunk)
        tokens = [token for chunk in received for token in chunk.token_ids]
        del self.received[grant.request_id]
        return tokens, self.node.arrived.pop(grant.grant_id)

    def used_pages(self) -> int:
        status = self.node.status(ROUTER).result(30)
        return sum(pool["used"] for pool in status.pools.values())


def main(address: str, config_json: str) -> None:
    torch.set_num_threads(1)
    host = DecodeHost(config_json)
    with Client(address) as connection:
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                break
            try:
                connection.send((True, getattr(host, method)(*arguments)))
            except Exception as error:  # noqa: BLE001 - goes back to the test
                connection.send((False, error))
    host.node.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8"))
