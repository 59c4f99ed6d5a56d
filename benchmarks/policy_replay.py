"""How well the router's policies spread an hour of traffic over four prefill nodes.

    python -m sluice.benchmarks.policy_replay --trace FILE [--trace FILE ...]
        [--memory quarter] [--utilisation 0.7] [--limit N]

Requests arrive at the trace's times. The router's own policy, ledgers and view of the nodes' caches
choose the node; each node is a prefill node's scheduler and cache manager, with the pools of
DeepSeek-V4-Flash and a quarter of the memory, and computes at a fixed rate. Reports of what is
cached come at the router's heartbeat. There is no model, and decode always has room.

The rate is such that four nodes that hit what one node with all the memory hits are busy for the
`--utilisation` part of the time. `one node` has all memory and four times the rate.

    hit rate    part of all tokens that was found cached
    imbalance   queued tokens (sent to a node and not computed, or waiting for it), time-averaged:
                the fullest node's over the mean of all
    wait        seconds from arrival to the first token

Exit code 1 if cache_aware misses its goals: 95 % of one node's hit rate, an imbalance below 1.3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.benchmarks.replay import (
    MAX_REQUESTS,
    STEP_TOKENS,
    Hits,
    make_job,
    make_scheduler,
    pages_within,
    replay,
)
from sluice.benchmarks.trace_replay import SPECS, memory_bytes
from sluice.benchmarks.traces import Prompt as TracePrompt
from sluice.benchmarks.traces import Trace, read_trace
from sluice.cache.manager import CacheManager
from sluice.cache.spec import TableSpec, unit_tokens
from sluice.engine.batch import Chunk
from sluice.engine.runner import RESUME_SHARE
from sluice.prefill_node.scheduler import Job
from sluice.protocol.config import PrefillConfig
from sluice.protocol.messages import GenerateRequest, NodeInfo, Role, SamplingParams
from sluice.router.dispatch.cached import CachedPrefixes
from sluice.router.dispatch.ledger import Ledger
from sluice.router.dispatch.policy import Policy, Turn
from sluice.router.dispatch.prompt import Prompt
from sluice.router.dispatch.routed_node import HEARTBEAT_S

NUM_NODES = 4
POLICIES = ("round_robin", "power_of_two", "least_loaded", "cache_aware")
MIN_SHARE_OF_ONE_NODE, MAX_IMBALANCE = 0.95, 1.3


class Node:
    """A prefill node that computes `tokens_per_s` tokens, and the router's books of it."""

    def __init__(
        self, node_id: str, num_pages: Mapping[TableSpec, int], tokens_per_s: float
    ) -> None:
        self.node_id = node_id
        self.manager = CacheManager(SPECS, num_pages, MAX_REQUESTS)
        every = PrefillConfig().resume_every_tokens
        self.scheduler = make_scheduler(self.manager, resume_every_tokens=every)
        info = self._info(num_pages)
        self.ledger = Ledger(info, max_outstanding_tokens=2 * STEP_TOKENS, on_return=lambda: None)
        self.cached = CachedPrefixes("", unit_tokens(SPECS))
        self.last_picked = 0
        self.trusted = True
        self.step_ends_s: float | None = None
        self.jobs: dict[str, Job] = {}
        self._tokens_per_s = tokens_per_s
        self._chunks: list[Chunk] = []

    def _info(self, num_pages: Mapping[TableSpec, int]) -> NodeInfo:
        return NodeInfo(
            self.node_id, "", Role.PREFILL, "", "", SPECS, 1 << 20, MAX_REQUESTS, STEP_TOKENS,
            num_pages,
        )  # fmt: skip

    @property
    def max_tokens(self) -> int:
        return self.ledger.max_tokens

    def room_tokens(self, beside: int = 0) -> int:
        return self.ledger.room_tokens(beside)

    @property
    def queued_tokens(self) -> int:
        return sum(
            job.num_prompt_tokens - max(job.request.num_computed_tokens, job.num_cached_tokens)
            for job in self.jobs.values()
        )

    def send(self, prompt: Prompt) -> Job:
        """Take the prompt in, as the router's nodes and a prefill node's `run` do."""
        request = prompt.request
        work = max(1, prompt.num_tokens - self.cached.num_tokens(prompt))
        self.ledger.take(request.request_id, prompt.num_tokens, work)
        self.cached.expect(request.request_id, prompt)
        job = make_job(self.manager, request.request_id, list(request.token_ids))
        self.jobs[request.request_id] = job
        self.scheduler.add(job)
        return job

    def begin_step(self, now_s: float) -> float | None:
        """Compute the next chunks, if there are any; returns when that is done."""
        self._chunks = self.scheduler.next_chunks()
        if not self._chunks:
            return None
        return now_s + sum(chunk.num_tokens for chunk in self._chunks) / self._tokens_per_s

    def end_step(self) -> list[Job]:
        """The jobs whose first token is there now."""
        done = []
        for chunk in self._chunks:
            name = chunk.request.request_id
            job = self.jobs[name]
            chunk.request.num_computed_tokens = chunk.end
            self.scheduler.settle(job)
            if job.computed:
                self.scheduler.remove(job)
                del self.jobs[name]
                self.ledger.give_back(name)
                self.cached.end(name)
                done.append(job)
        self._chunks = []
        return done

    def report(self) -> None:
        self.cached.take(self.manager.report(self.cached.version))


class Ample:
    """A decode node that always has room."""

    node_id = "decode"
    last_picked = 0
    trusted = True
    ledger: Ledger
    cached: CachedPrefixes

    max_tokens = sys.maxsize

    def room_tokens(self, beside: int = 0) -> int:
        return self.max_tokens


class Replay:
    """The trace's hour, event by event. Times are seconds since it began."""

    def __init__(self, trace: Trace, policy: str, nodes: Sequence[Node]) -> None:
        self.trace = trace
        self.nodes = nodes
        self.waits_s: list[float] = []
        self.num_cached_tokens = 0
        self.busy_s = 0.0
        self.queued_token_s = {node.node_id: 0.0 for node in nodes}  # tokens times seconds queued
        # One node leaves nothing to choose.
        self._policy = Policy("round_robin" if len(nodes) == 1 else policy, "round_robin", seed=0)
        self._waiting: list[Prompt] = []
        self._claims: dict[str, int] = {}
        self._arrived_s: dict[str, float] = {}
        self._now_s = 0.0

    def run(self) -> None:
        """Until the last prompt is computed."""
        arrivals = enumerate(self.trace.prompts)
        upcoming = next(arrivals, None)
        report_s = 0.0
        while upcoming or self._waiting or any(node.jobs for node in self.nodes):
            ends = [node.step_ends_s for node in self.nodes if node.step_ends_s is not None]
            arrival_s = upcoming[1].arrived_s if upcoming else float("inf")
            self._advance(min([arrival_s, report_s, *ends]))
            if upcoming and arrival_s <= self._now_s:
                self._arrive(*upcoming)
                upcoming = next(arrivals, None)
            if report_s <= self._now_s:
                report_s += HEARTBEAT_S
                for node in self.nodes:
                    node.report()
            self._end_steps()
            self._dispatch()
            self._begin_steps()

    def _advance(self, now_s: float) -> None:
        for node in self.nodes:
            queued = node.queued_tokens + self._claims.get(node.node_id, 0)
            self.queued_token_s[node.node_id] += queued * (now_s - self._now_s)
            self.busy_s += (now_s - self._now_s) * (node.step_ends_s is not None)
        self._now_s = now_s

    def _arrive(self, number: int, prompt: TracePrompt) -> None:
        name = f"r{number}"
        tokens = tuple(self.trace.token_ids(prompt))
        request = GenerateRequest(name, tokens, SamplingParams(max_tokens=1))
        if not any(len(tokens) <= node.max_tokens for node in self.nodes):
            raise ValueError(
                f"a prompt has {len(tokens)} tokens, expected at most "
                f"{self.nodes[0].ledger.max_tokens}, which a node has pages for; give more --memory"
            )
        self._waiting.append(Prompt(request))
        self._arrived_s[name] = self._now_s

    def _end_steps(self) -> None:
        for node in self.nodes:
            if node.step_ends_s is not None and node.step_ends_s <= self._now_s:
                node.step_ends_s = None
                for job in node.end_step():
                    arrived_s = self._arrived_s.pop(job.request.request_id)
                    self.waits_s.append(self._now_s - arrived_s)
                    self.num_cached_tokens += job.num_cached_tokens

    def _dispatch(self) -> None:
        """As the router's queue does it."""
        turn = Turn(self._policy, self.nodes, [Ample()])
        for prompt in list(self._waiting):
            if pair := turn.pick(prompt):
                prefill, _ = pair
                assert prefill is not None, "no prompt of a trace is computed on decode"
                self._waiting.remove(prompt)
                prefill.send(prompt)
            elif turn.over or (turn.only_local and len(turn.claims) in (0, len(self.nodes))):
                break  # nobody starts any more, and each node has its claims
        self._claims = turn.claims

    def _begin_steps(self) -> None:
        for node in self.nodes:
            if node.step_ends_s is None:
                node.step_ends_s = node.begin_step(self._now_s)


@dataclass(frozen=True)
class Result:
    """A line of the CSV."""

    trace: str
    num_requests: int
    memory: str
    utilisation: float
    policy: str
    num_nodes: int
    hit_rate: float
    share_of_one_node: float
    imbalance: float
    busy: float
    wait_p50_s: float
    wait_p99_s: float
    cpu_s: float


def measure(trace: Trace, memory: str, utilisation: float) -> Iterator[Result]:
    """One node with all memory, then every policy over four."""
    size = memory_bytes(memory, trace)
    assert size is not None, "without a limit every policy hits alike"
    span_s = trace.prompts[-1].arrived_s - trace.prompts[0].arrived_s
    computed = trace.num_tokens - one_after_another(trace, size).num_tokens
    tokens_per_s = computed / span_s / utilisation
    one_node_rate = None
    for policy in ("one node", *POLICIES):
        started = time.process_time()
        num_nodes = 1 if policy == "one node" else NUM_NODES
        hour = Replay(trace, policy, _nodes(trace, size, num_nodes, tokens_per_s))
        hour.run()
        hit_rate = hour.num_cached_tokens / trace.num_tokens
        one_node_rate = hit_rate if one_node_rate is None else one_node_rate
        queued = list(hour.queued_token_s.values())
        waits_s = sorted(hour.waits_s)
        yield Result(
            trace=trace.name,
            num_requests=len(trace.prompts),
            memory=memory,
            utilisation=utilisation,
            policy=policy,
            num_nodes=num_nodes,
            hit_rate=round(hit_rate, 4),
            share_of_one_node=round(hit_rate / one_node_rate, 3),
            imbalance=round(max(queued) / statistics.mean(queued), 3),
            busy=round(hour.busy_s / span_s / num_nodes, 3),
            wait_p50_s=round(statistics.median(waits_s), 2),
            wait_p99_s=round(waits_s[int(0.99 * (len(waits_s) - 1))], 2),
            cpu_s=round(time.process_time() - started, 1),
        )


def one_after_another(trace: Trace, memory: int) -> Hits:
    """What one node hits that is never in a hurry."""
    manager = CacheManager(SPECS, pages_within(SPECS, trace, memory, RESUME_SHARE), MAX_REQUESTS)
    every = PrefillConfig().resume_every_tokens
    scheduler = make_scheduler(manager, resume_every_tokens=every)
    return replay(trace, manager, scheduler, f"{trace.name}, one after another")


def _nodes(trace: Trace, memory: int, num_nodes: int, tokens_per_s: float) -> list[Node]:
    """Nodes that share memory and rate."""
    pages = pages_within(SPECS, trace, memory // num_nodes, RESUME_SHARE)
    return [Node(f"node-{i}", pages, tokens_per_s / num_nodes) for i in range(num_nodes)]


def result_table(results: Sequence[Result]) -> Table:
    columns = (
        *("trace", "policy", "hit_rate", "share_of_one_node", "imbalance", "busy"),
        *("wait_p50_s", "wait_p99_s"),
    )
    table = Table(*(column.replace("_", " ") for column in columns))
    for result in results:
        table.add_row(*(str(getattr(result, column)) for column in columns))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--memory", default="quarter", help="of all nodes together")
    parser.add_argument("--utilisation", type=float, default=0.7)
    parser.add_argument("--limit", type=int, help="replay only so many requests")
    parser.add_argument("--csv", type=Path, default=RESULTS / "policy_replay.csv")
    given = parser.parse_args(arguments)
    console = Console()
    origin = provenance(_command(given))
    print_provenance(console, origin)
    traces = [read_trace(path, limit=given.limit) for path in given.trace]
    results = [r for t in traces for r in measure(t, given.memory, given.utilisation)]
    console.print(result_table(results))
    write_csv(given.csv, origin, [asdict(result) for result in results])
    ours = [result for result in results if result.policy == "cache_aware"]
    missed = [
        result
        for result in ours
        if result.share_of_one_node < MIN_SHARE_OF_ONE_NODE or result.imbalance >= MAX_IMBALANCE
    ]
    for result in missed:
        console.print(f"{result.trace}: cache_aware misses a goal")
    return 1 if missed else 0


def _command(given: argparse.Namespace) -> str:
    """The command, with traces by name alone."""
    parts = ["python -m sluice.benchmarks.policy_replay"]
    parts += [f"--trace {path.name}" for path in given.trace]
    parts += [f"--memory {given.memory} --utilisation {given.utilisation:g}"]
    return " ".join([*parts, *([f"--limit {given.limit}"] if given.limit else [])])


if __name__ == "__main__":
    sys.exit(main())
