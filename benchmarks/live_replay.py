"""Hit rates of a running deployment on a request trace, beside the same replay without a model.

    sluice make-checkpoint model --hca-ratio 16 --window 8
    sluice up live.yaml --detach                        # a config with model.path: model
    python -m sluice.benchmarks.live_replay --config live.yaml --trace FILE [--trace FILE ...]
        [--scale 16] [--limit 200] [--url http://127.0.0.1:8000]

Every prompt of the scaled trace is sent to the router, one after another, with a cache salt of the
run's own, and `cached_tokens` of the answers is added up. The replay without a model puts the same
prompts through the scheduler and the cache manager that the config's prefill node has. Exit code 1
if the two differ by more than 2 % of the blocks, or a request fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.replay import Hits, make_scheduler, replay
from sluice.benchmarks.traces import Prompt, Trace, read_trace
from sluice.engine.runner import Runner
from sluice.model.registry import describe, load_model
from sluice.protocol.config import SluiceConfig, load_config
from sluice.protocol.messages import Role

TOLERANCE = 0.02  # of all blocks
FIRST_TOKEN_ID = 3  # below are the special tokens
API_KEY = "SLUICE_API_KEY"


def vocabulary_tokens(trace: Trace, prompt: Prompt, vocab_size: int) -> list[int]:
    """The prompt's tokens within a model's vocabulary: equal where blocks are, else random."""
    parts = [
        np.random.default_rng(block).integers(FIRST_TOKEN_ID, vocab_size, trace.block_tokens)
        for block in prompt.block_ids
    ]
    return [int(token) for token in np.concatenate(parts)[: prompt.num_tokens]]


def live_hits(trace: Trace, client: httpx.Client, model: str, vocab_size: int) -> Hits:
    """Blocks and tokens that the deployment says it had; a failed request ends it all."""
    num_blocks = num_tokens = 0
    salt = uuid.uuid4().hex  # nothing that earlier runs left is found
    for prompt in tqdm(trace.prompts, desc="live", unit="request", disable=None):
        answer = client.post(
            "/v1/completions",
            json={
                "model": model,
                "prompt": vocabulary_tokens(trace, prompt, vocab_size),
                "max_tokens": 1,
                "temperature": 0,
                "cache_salt": salt,
            },
        )
        if answer.is_error:
            raise SystemExit(f"{client.base_url}: {answer.status_code}: {answer.text}")
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        num_blocks += cached // trace.block_tokens
        num_tokens += cached
    return Hits(num_blocks, num_tokens)


def modelless_hits(trace: Trace, config: SluiceConfig) -> Hits:
    """What the prefill node of this config finds cached, by its books alone."""
    runner = Runner.around(load_model(config.model.path), config, Role.PREFILL)
    scheduler = make_scheduler(
        runner.manager,
        resume_every_tokens=config.prefill.resume_every_tokens,
        max_batch_tokens=config.prefill.max_batch_tokens,
    )
    return replay(trace, runner.manager, scheduler, "without a model")


def compare(trace: Trace, config: SluiceConfig, client: httpx.Client) -> dict[str, str | float]:
    """A line of the CSV."""
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    live = live_hits(trace, client, model, describe(config.model.path).vocab_size)
    books = modelless_hits(trace, config)
    return {
        "trace": trace.name,
        "num_requests": len(trace.prompts),
        "num_blocks": trace.num_blocks,
        "live_block_hit_rate": round(live.num_blocks / trace.num_blocks, 4),
        "modelless_block_hit_rate": round(books.num_blocks / trace.num_blocks, 4),
        "ideal_block_hit_rate": round(trace.ideal_hit_rate, 4),
        "live_token_hit_rate": round(live.num_tokens / trace.num_tokens, 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="what the deployment runs")
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--scale", type=int, default=16, help="divide lengths and blocks by this")
    parser.add_argument("--limit", type=int, default=200, help="send only so many requests")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--csv", type=Path, default=RESULTS / "live_replay.csv")
    given = parser.parse_args(arguments)
    config, console = load_config(given.config), Console()
    traces = [read_trace(path, scale=given.scale, limit=given.limit) for path in given.trace]
    names = " ".join(f"--trace {path.name}" for path in given.trace)
    origin = provenance(
        f"python -m sluice.benchmarks.live_replay --config {given.config.name} {names} "
        f"--scale {given.scale} --limit {given.limit}"
    )
    print_provenance(console, origin)
    key = os.environ.get(API_KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=given.url, headers=headers, timeout=600, trust_env=False) as client:
        rows = [compare(trace, config, client) for trace in traces]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)
    write_csv(given.csv, origin, rows)
    apart = (
        abs(float(row["live_block_hit_rate"]) - float(row["modelless_block_hit_rate"]))
        for row in rows
    )
    return 1 if any(difference > TOLERANCE for difference in apart) else 0


if __name__ == "__main__":
    sys.exit(main())
