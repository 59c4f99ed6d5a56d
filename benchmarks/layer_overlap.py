"""What sending a chunk's layers while the chunk still computes could gain at most.

    python -m sluice.benchmarks.layer_overlap

Pages of finished chunks move while the next chunk computes, so a client waits for the last chunk's
transfer alone. Posting groups of layers as they finish would hide all of that but the last group.
A prefill node here and a decode node in another process, over UCX with shared memory and with TCP,
a DeepSeek-V4 of 50 million parameters, prompts of one chunk, where that wait weighs most:

    compute ms      the chunk's step
    transfer ms     from posting its pages to their completion: the most there is to gain
    share           of both together

It is below one in a hundred (results/layer_overlap.csv), so there is no such option. The same by
arithmetic for DeepSeek-V4-Flash: the experts of 2,048 tokens alone (7 of 3 x 4096 x 2048 numbers in
each of 43 layers) take an H200 16 ms at its peak of 1,979 TFLOPS, and the 11 MB of all pools cross
a link of 50 GB/s in 0.2 ms.
"""

from __future__ import annotations

import multiprocessing as mp
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.vs_transformers import MID
from sluice.decode_node.node import DecodeNode
from sluice.model.make_checkpoint import make_checkpoint
from sluice.prefill_node.node import PrefillNode
from sluice.protocol.config import SluiceConfig, parse_config
from sluice.protocol.messages import GenerateRequest, PageGrant, SamplingParams

LENGTHS_TOKENS = (128, 512, 2_048)
REPEATS = 5
WIRES = {"shared memory": {}, "TCP": {"engine_config": "TLS=tcp"}}


@dataclass(frozen=True)
class Measured:
    """A line of the CSV: medians of REPEATS prompts."""

    wire: str
    num_tokens: int
    compute_ms: float
    transfer_ms: float
    share: float


def config_of(folder: Path, wire: str) -> SluiceConfig:
    role = {"max_batch_tokens": max(LENGTHS_TOKENS), "prefix_cache": False}
    return parse_config(
        {
            "model": {"path": str(folder), "max_model_len": 2 * max(LENGTHS_TOKENS)},
            "prefill": role,
            "decode": role,
            "transfer": {"backend_params": WIRES[wire], "lease_s": 600},
        }
    )


def decode(connection: Connection, config: SluiceConfig) -> None:
    """The other process: grants what is asked for, and takes it back when the next is."""
    torch.set_num_threads(1)
    node = DecodeNode.load(config, "decode", "")
    node.start()
    connection.send(node.info)
    while (request := connection.recv()) is not None:
        grant = node.reserve(request).result()
        connection.send(grant)
        connection.recv()
        node.release(grant.request_id, in_flight=False).result()
    node.stop()


class Prefill:
    """This process's node, and what its metrics say of one prompt."""

    def __init__(self, config: SluiceConfig, connection: Connection) -> None:
        self._connection = connection
        self._node = PrefillNode.load(config, "prefill", "")
        self._node.start()
        self._node.connect(connection.recv()).result()

    def seconds(self, request: GenerateRequest) -> tuple[float, float]:
        """Of its chunk's step, and of its transfer."""
        self._connection.send(request)
        grant: PageGrant = self._connection.recv()
        before = self._sums()
        self._node.run(request, grant).result()
        self._connection.send("over")
        step, transfer = (after - b for after, b in zip(self._sums(), before, strict=True))
        return step, transfer

    def _sums(self) -> tuple[float, float]:
        samples = {
            name: value
            for family in self._node.status("benchmark").result().metrics
            for name, _, value in family.samples
        }
        return samples["sluice:step_seconds_sum"], samples["sluice:transfer_seconds_sum"]

    def stop(self) -> None:
        self._node.stop()


def measure(folder: Path, wire: str) -> Iterator[Measured]:
    config = config_of(folder, wire)
    context = mp.get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=decode, args=(other, config), daemon=True)
    process.start()
    prefill = Prefill(config, connection)
    for num_tokens in LENGTHS_TOKENS:
        times = []
        for turn in range(1 + REPEATS):  # the first does not count
            prompt = tuple(3 + (7 * i + turn) % (MID.vocab_size - 3) for i in range(num_tokens))
            name = f"{num_tokens}.{turn}"
            request = GenerateRequest(name, prompt, SamplingParams(max_tokens=2))
            times.append(prefill.seconds(request))
        step, transfer = (statistics.median(each) for each in zip(*times[1:], strict=True))
        share = transfer / (step + transfer)
        yield Measured(
            wire, num_tokens, round(1e3 * step, 1), round(1e3 * transfer, 2), round(share, 4)
        )
    connection.send(None)
    process.join(10)
    prefill.stop()


def main() -> int:
    torch.set_num_threads(1)
    console = Console()
    origin = provenance("python -m sluice.benchmarks.layer_overlap")
    print_provenance(console, origin)
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), config=MID, seed=1)
        results = [line for wire in WIRES for line in measure(Path(folder), wire)]
    table = Table("wire", "tokens", "compute ms", "transfer ms", "share")
    for line in results:
        table.add_row(*(str(value) for value in asdict(line).values()))
    console.print(table)
    write_csv(RESULTS / "layer_overlap.csv", origin, [asdict(line) for line in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
