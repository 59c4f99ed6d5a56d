"""What plants changes makes programs that differ in one place."""

from __future__ import annotations

import ast
import csv
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
spec = importlib.util.spec_from_file_location("mutants_run", Path(__file__).with_name("run.py"))
run = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = run
spec.loader.exec_module(run)

SOURCE = """
LIMIT = 5
def f(a: int = 3) -> int:
    log.info("never")
    assert a > 0, "not this"
    if a < 2 and not a:
        g(a)
        raise ValueError(f"{a + 1}")
    return a + 1
"""


def test_what_runs_is_changed_and_nothing_else():
    tree = ast.parse(SOURCE)
    found = [(way, node, c) for way, node in run.places(tree) for c in run.changes(node)]
    texts = [run.planted(tree, way, change) for way, _, change in found]
    whole = ast.unparse(tree)
    assert len(set(texts)) == len(texts) and whole not in texts
    planted = {
        line.strip() for text in texts for line in set(text.splitlines()) - set(whole.splitlines())
    }
    assert planted == {
        "if a <= 2 and (not a):",
        "if a < 3 and (not a):",
        "if a < 2 or not a:",
        "if a < 2 and a:",
        "pass",
        "return a - 1",
        "return a + 2",
    }


@pytest.mark.parametrize("folder", sorted(run.FOLDERS))
def test_the_same_changes_are_drawn_again(folder):
    mutants = run.drawn(folder, 5, seed=3)
    assert len(mutants) == 5 and mutants == run.drawn(folder, 5, seed=3)
    for mutant in mutants:
        assert mutant.was != mutant.became
        assert ast.parse(mutant.source) is not None
    for test in run.FOLDERS[folder].tests:
        assert (run.ROOT / test).exists(), test


def test_survivors_have_a_reason():
    with run.SURVIVORS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row["kind"] in ("equivalent", "second line") and len(row["reason"]) > 10, row
        lines = (run.ROOT / row["file"]).read_text(encoding="utf-8").splitlines()
        assert sum(line.strip() == row["text"] for line in lines) == 1, row


def test_what_a_review_planted_can_still_be_planted():
    assert len(run.reviewed()) == len(run.REVIEWED) > 20
    for mutant in run.reviewed():
        assert ast.parse(mutant.source) is not None
