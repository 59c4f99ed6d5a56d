"""`make demo`: a real deployment on this machine answers a question about a long text.

It starts one prefill node, one decode node and the router, asks for a code that stands far outside
the model's sliding window, compares the answer with what was hidden in the text, and shows what
crossed between the two nodes. Exit code 0 means that the answer was right.

The small model itself misses about three codes of a hundred, with any software that runs it; then
the demo says so and asks once more, about another text.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from sluice.deploy import detach, preflight, state
from sluice.deploy.http_client import RouterClient
from sluice.deploy.recall import RecallTask, recall_task
from sluice.deploy.reporting import EXIT_FAILED, reporting, stderr, stdout
from sluice.engine.config import load_config
from sluice.engine.protocol import ConfigError

CONFIG = Path(__file__).parent / "configs" / "local.yaml"
NAMESPACE = "sluice-demo"
WORDS_BEFORE, WORDS_AFTER = 200, 1000  # about 2,000 tokens in all
STOP_TIMEOUT_S = 60.0


@reporting
def main(*, keep: bool, seed: int, debug: bool) -> None:
    """Run the demo. Ends the process with code 0 only if the answer was right."""
    port = _port()
    arguments = [str(CONFIG), "--namespace", NAMESPACE, "--port", str(port)]
    stdout.print(f"[dim]$ sluice up {CONFIG} --namespace {NAMESPACE} --port {port} --detach[/]")
    with stderr.status("starting Ray, the router, one prefill and one decode node"):
        deployment = detach.start(NAMESPACE, arguments)
    stdout.print(f"ready at [bold]{deployment.url}[/]\n")
    try:
        right = _ask_until_right(deployment.url, seed)
        _show_next(deployment, keep)
    finally:
        if not keep:
            with stderr.status("ending the deployment (it stays with --keep)"):
                detach.stop(deployment, STOP_TIMEOUT_S)
    sys.exit(0 if right else EXIT_FAILED)


def _ask_until_right(url: str, seed: int) -> bool:
    """Ask, once more if the answer is wrong, and show what crossed; whether one was right."""
    with RouterClient(url) as router:
        right = _ask(router, seed)
        if not right:
            stdout.print("The model misses about three codes of a hundred; another text:\n")
            right = _ask(router, seed + 1)
        stdout.print(_traffic(router.metrics()))
    return right


def _ask(router: RouterClient, seed: int) -> bool:
    """Ask for a hidden code; whether the answer was right."""
    task = recall_task(random.Random(seed), words_before=WORDS_BEFORE, words_after=WORDS_AFTER)
    _describe(task, router.count_tokens(task.document), seed)
    completion, took_s = _stream_answer(router, task)
    right = task.is_right(completion)
    mark = "[bold green]right[/]" if right else "[bold red]wrong[/]"
    stdout.print(f"\n\nexpected  {task.fact}")
    stdout.print(f"got       {task.answer_start}{completion}  {mark} ({took_s:.1f} s)\n")
    return right


def _describe(task: RecallTask, num_tokens: int, seed: int) -> None:
    place = task.document.index(task.fact)
    excerpt = task.document[place - 100 : place + len(task.fact) + 60]
    stdout.print(
        f"A text of {num_tokens:,} tokens from Jane Austen's Persuasion, with the secret codes of\n"
        f"four people hidden in it (seed {seed}). The model sees the last 32 tokens raw; what\n"
        "came earlier reaches the decode node in compressed pools only.\n"
    )
    stdout.print(f"[dim]... {excerpt} ...[/]\n")
    stdout.print(f"[bold]user>[/] {task.question}")
    stdout.print(f"[bold]assistant>[/] [dim]{task.answer_start}[/]", end="")


def _stream_answer(router: RouterClient, task: RecallTask) -> tuple[str, float]:
    """Print the answer as it streams in; returns it with the seconds it took."""
    started = time.perf_counter()
    pieces = []
    for piece in router.stream_text(task.prompt, max_tokens=8, temperature=0):
        pieces.append(piece)
        stdout.print(f"[bold]{piece}[/]", end="")
    return "".join(pieces), time.perf_counter() - started


def _traffic(metrics: str) -> Table:
    """What the prefill node wrote into the decode node, by pool."""
    counts: dict[str, dict[str, float]] = defaultdict(dict)
    seconds = transfers = 0.0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.name.removeprefix("sluice:transfer_")
            if name in ("pages_total", "bytes_total", "descriptors_total"):
                pool = counts[sample.labels["pool"]]
                pool[name] = pool.get(name, 0) + sample.value
            elif name == "seconds_sum":
                seconds += sample.value
            elif name == "seconds_count":
                transfers += sample.value
    mean_ms = 1000 * seconds / max(1, transfers)
    table = Table(
        title="What crossed from prefill-0 to decode-0",
        caption=f"{transfers:.0f} transfers, one for each chunk of a prompt; mean {mean_ms:.1f} ms",
    )
    table.add_column("pool")
    for column in ("pages", "bytes", "descriptors"):
        table.add_column(column, justify="right")
    for name, pool in sorted(counts.items()):
        table.add_row(name, *_figures(pool))
    totals = {key: sum(p.get(key, 0) for p in counts.values()) for key in FIGURES}
    table.add_section()
    table.add_row("all", *_figures(totals))
    return table


FIGURES = ("pages_total", "bytes_total", "descriptors_total")


def _figures(pool: dict[str, float]) -> list[str]:
    return [f"{pool.get(key, 0):,.0f}" for key in FIGURES]


def _show_next(deployment: state.Deployment, keep: bool) -> None:
    option = f" --namespace {deployment.namespace}" if keep else ""
    stdout.print("\nNext:" if keep else f"\nNext: [bold]sluice up {CONFIG}[/], and then")
    for command in ("status", "chat", "scale decode 2", "down"):
        stdout.print(f"  sluice {command}{option}")
    stdout.print()


def _port() -> int:
    """The config's port, or any free one if it is taken."""
    router = load_config(CONFIG).router
    try:
        preflight.check_port(router.host, router.port)
    except ConfigError:
        return 0
    return router.port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sluice.deploy.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the deployment running")
    parser.add_argument("--seed", type=int, default=None, help="which text and which codes")
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    given = parser.parse_args()
    main(
        keep=given.keep,
        seed=random.randrange(10**6) if given.seed is None else given.seed,
        debug=given.debug,
    )
