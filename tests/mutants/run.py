"""Planted changes: does a test fail when a line of the code is wrong?

    make mutants                                                every folder, its share of changes
    python tests/mutants/run.py --folders cache,transfer --number 40 --jobs 2
    python tests/mutants/run.py --reviewed                      those of reviewed.py instead

Each change is planted into a copy of the project, one at a time: a comparison turned or moved by
one, `and` for `or`, a `not` dropped, a sign, a number one too large, a statement left out. Then the
tests of that folder run until one fails. Which changes are drawn depends on the seed and the file,
so that a run can be repeated.

A change that no test notices is looked at: it is the same program (`equivalent`), something else
catches it (`second line`), both noted with the reason in survivors.csv, or it is `left`, and a test
is missing. Exit code 1 if any is left. The table goes to benchmarks/results/mutants.csv.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from reviewed import REVIEWED
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv

ROOT = Path(__file__).parents[2]
SURVIVORS = Path(__file__).with_name("survivors.csv")
LIMIT_S = 180.0
SKIPPED_CALLS = ("log", "logger", "log_event", "warnings", "print")
ROUTER, NODES = "tests/router", "tests/nodes"


@dataclass(frozen=True)
class Folder:
    """Where changes are planted, how many, and which tests have to notice."""

    sources: str
    number: int
    tests: tuple[str, ...]


FOLDERS = {
    "cache": Folder("cache/*.py", 40, ("tests/cache",)),
    "transfer": Folder("transfer/*.py", 40, ("tests/transfer",)),
    "engine": Folder(
        "engine/*.py",
        30,
        ("tests/engine", f"{NODES}/test_choice_options.py", f"{NODES}/test_pd_equals_single.py"),
    ),
    "prefill_node": Folder(
        "prefill_node/*.py",
        25,
        (
            f"{NODES}/test_prefix_reuse.py",
            f"{NODES}/test_node_faults.py",
            f"{NODES}/test_message_order.py",
            f"{NODES}/test_prompt_logprobs.py",
            f"{NODES}/test_observability.py",
        ),
    ),
    "decode_node": Folder(
        "decode_node/*.py",
        25,
        (
            f"{NODES}/test_local_prompts.py",
            f"{NODES}/test_grants.py",
            f"{NODES}/test_planner.py",
            f"{NODES}/test_node_faults.py",
            f"{NODES}/test_message_order.py",
            f"{NODES}/test_choice_options.py",
            f"{NODES}/test_prefix_reuse.py",
        ),
    ),
    "router/dispatch": Folder(
        "router/dispatch/*.py",
        30,
        tuple(
            f"{ROUTER}/test_{name}.py"
            for name in (
                *("queue", "policy", "capacity", "cancel", "faults", "breaker", "inbox"),
                *("held", "cached"),
            )
        ),
    ),
    "router/text": Folder(
        "router/text/**/*.py",
        30,
        tuple(
            f"{ROUTER}/test_{name}.py"
            for name in (
                *("text", "parser_v4", "parser_families", "calls_v4", "calls_families"),
                *("encoding_v4", "templates", "chat_v4", "chat_families", "checkpoint"),
            )
        ),
    ),
    "deploy": Folder(
        "deploy/controller/*.py",
        20,
        tuple(f"tests/deploy/test_{n}.py" for n in ("controller", "introductions", "placement")),
    ),
}
COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One planted change. text: the line it is in. source: the file's text with it."""

    folder: str
    file: str
    line: int
    text: str
    was: str
    became: str
    source: str


@dataclass(frozen=True)
class Outcome:
    """A line of the CSV."""

    folder: str
    file: str
    line: int
    text: str
    was: str
    became: str
    outcome: str
    seconds: float


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """What may be planted at the node: functions from a copy of it to what stands there then."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARED:
            yield lambda it: _with(it, ops=[COMPARED[type(operator)]()])
        case ast.BoolOp(op=ast.And()):
            yield lambda it: _with(it, op=ast.Or())
        case ast.BoolOp(op=ast.Or()):
            yield lambda it: _with(it, op=ast.And())
        case ast.UnaryOp(op=ast.Not()):
            yield lambda it: it.operand
        case ast.BinOp(op=operator) if type(operator) in COMPUTED and not _is_text(node):
            yield lambda it: _with(it, op=COMPUTED[type(operator)]())
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield lambda it: _with(it, value=value + 1)
        case ast.Constant(value=bool() as value):
            yield lambda it: _with(it, value=not value)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Expr(value=ast.Await()):
            if not _is_log(node):
                yield lambda it: ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _is_text(node: ast.BinOp) -> bool:
    """Joining texts or lists, or formatting: turned around it fails where it stands."""
    parts = (node.left, node.right)
    return any(isinstance(p, ast.JoinedStr | ast.List | ast.Tuple) for p in parts) or any(
        isinstance(p, ast.Constant) and isinstance(p.value, str) for p in parts
    )


def _is_log(node: ast.AST) -> bool:
    text = ast.unparse(node).removeprefix("await ")
    return text.split(".")[0].split("(")[0] in SKIPPED_CALLS


def places(tree: ast.Module) -> Iterator[tuple[list[tuple[str, int | None]], ast.AST]]:
    """Every node that is run, with the way to it: no annotations, messages, asserts, constants."""

    def walk(node: ast.AST, way: list[tuple[str, int | None]]) -> Iterator:
        yield way, node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "msg"):
                continue
            for index, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(item, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
                    continue
                if isinstance(item, ast.JoinedStr) or not isinstance(item, ast.AST):
                    continue
                if isinstance(item, ast.If) and "TYPE_CHECKING" in ast.unparse(item.test):
                    continue
                yield from walk(item, [*way, (name, index)])

    for way, node in walk(tree, []):
        in_function = any(name == "body" and i is not None for name, i in way[1:])
        if in_function and hasattr(node, "lineno"):
            yield way, node


def planted(tree: ast.Module, way: list, change: Callable[[ast.AST], ast.AST]) -> str:
    """The module's text with the change at the end of the way."""
    tree = copy.deepcopy(tree)
    parent = tree
    for name, index in way[:-1]:
        parent = getattr(parent, name) if index is None else getattr(parent, name)[index]
    name, index = way[-1]
    if index is None:
        setattr(parent, name, change(getattr(parent, name)))
    else:
        getattr(parent, name)[index] = change(getattr(parent, name)[index])
    return ast.unparse(ast.fix_missing_locations(tree))


def drawn(folder: str, number: int, seed: int) -> list[Mutant]:
    """So many changes in the folder's files, in proportion to their lengths."""
    found = []
    for path in sorted(ROOT.glob(FOLDERS[folder].sources)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for way, node in places(tree):
            found += [(path, tree, way, node, change) for change in changes(node)]
    rng = random.Random(f"{folder} {seed}")
    mutants = []
    for path, tree, way, node, change in rng.sample(found, min(number, len(found))):
        source = planted(tree, way, change)
        became = ast.unparse(change(copy.deepcopy(node)))
        file, was = str(path.relative_to(ROOT)), ast.unparse(node)
        text = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1].strip()
        mutants.append(Mutant(folder, file, node.lineno, text, was[:80], became[:80], source))
    return mutants


def reviewed() -> list[Mutant]:
    """The changes that a review had planted."""
    mutants = []
    for folder, file, was, became in REVIEWED:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert text.count(was) == 1, f"{file}: {was!r} stands there {text.count(was)} times"
        line = text[: text.index(was)].count("\n") + 1
        source = text.replace(was, became)
        here, was = text.splitlines()[line - 1].strip(), " ".join(was.split())
        mutants.append(Mutant(folder, file, line, here, was, became.strip(), source))
    return mutants


def tried(mutant: Mutant, copy_of: Path) -> Outcome:
    """Plant it into the copy, run the tests, and put the file back."""
    path, begun = copy_of / mutant.file, time.monotonic()
    whole = path.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += FOLDERS[mutant.folder].tests
    env = {**os.environ, "PYTHONPATH": str(copy_of.parent), "OMP_NUM_THREADS": "1"}
    try:
        path.write_text(mutant.source, encoding="utf-8")
        done = subprocess.run(
            command, cwd=copy_of, env=env, capture_output=True, timeout=LIMIT_S, check=False
        )
        outcome = "survived" if done.returncode == 0 else "killed"
    except subprocess.TimeoutExpired:
        outcome = "killed"
    finally:
        path.write_text(whole, encoding="utf-8")
    if outcome == "survived":
        key = mutant.file, mutant.text, mutant.was, mutant.became
        outcome = known_survivors().get(key, "left")
    planted = {name: value for name, value in asdict(mutant).items() if name != "source"}
    return Outcome(**planted, outcome=outcome, seconds=round(time.monotonic() - begun, 1))


def known_survivors() -> dict[tuple[str, str, str, str], str]:
    """What was looked at, in its line: `equivalent` or `second line`."""
    with SURVIVORS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(r["file"], r["text"], r["was"], r["became"]): r["kind"] for r in rows}


def run(mutants: list[Mutant], jobs: int) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copy_of = Path(folder, str(number), "sluice")
            shutil.copytree(ROOT, copy_of, ignore=shutil.ignore_patterns(".*", "build"))
            copies.put(copy_of)

        def in_a_copy(mutant: Mutant) -> Outcome:
            copy_of = copies.get()
            try:
                return tried(mutant, copy_of)
            finally:
                copies.put(copy_of)

        with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(mutants), unit="change") as bar:
            outcomes = []
            for outcome in pool.map(in_a_copy, mutants):
                outcomes.append(outcome)
                bar.update()
                if outcome.outcome == "left":
                    bar.write(f"{outcome.file}:{outcome.line}: {outcome.was}  ->  {outcome.became}")
            return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folders", default=",".join(FOLDERS), help="names, with commas")
    parser.add_argument("--number", type=int, help="changes in each folder, instead of its share")
    parser.add_argument("--reviewed", action="store_true", help="those of reviewed.py instead")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=RESULTS / "mutants.csv")
    given = parser.parse_args()
    origin = provenance(" ".join(["tests/mutants/run.py", *sys.argv[1:]]))
    print_provenance(console := Console(), origin)
    folders = given.folders.split(",")
    if given.reviewed:
        mutants = reviewed()
    else:
        numbers = {name: given.number or FOLDERS[name].number for name in folders}
        mutants = [m for name in folders for m in drawn(name, numbers[name], given.seed)]
    outcomes = run(mutants, given.jobs)
    write_csv(given.csv, origin, [asdict(outcome) for outcome in outcomes])
    kinds = ("killed", "equivalent", "second line", "left")
    table = Table("folder", "planted", *kinds)
    for name in folders:
        counts = Counter(o.outcome for o in outcomes if o.folder == name)
        table.add_row(name, str(counts.total()), *(str(counts[kind]) for kind in kinds))
    console.print(table)
    return int(any(outcome.outcome == "left" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
