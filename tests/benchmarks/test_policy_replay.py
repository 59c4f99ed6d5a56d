"""The replay over several nodes: every prompt is computed, and affinity is worth its while."""

import csv
import json

import pytest

from sluice.benchmarks.policy_replay import POLICIES, main
from sluice.benchmarks.traces import BLOCK_TOKENS


@pytest.fixture
def trace_file(tmp_path):
    """Twelve conversations of six turns, in turn; a block of system prompt begins them all."""
    path, fresh = tmp_path / "small_trace.jsonl", iter(range(1, 1000))
    histories = [[0] for _ in range(12)]
    lines = []
    for turn in range(6):
        for number, history in enumerate(histories):
            history += [next(fresh) for _ in range(3)]
            lines.append(
                {
                    "timestamp": 1000 * (12 * turn + number),
                    "input_length": len(history) * BLOCK_TOKENS,
                    "hash_ids": list(history),
                }
            )
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_conversations_stay_where_their_history_is(trace_file, tmp_path):
    out = tmp_path / "out.csv"
    main(["--trace", str(trace_file), "--memory", "9e9", "--csv", str(out)])
    with out.open(encoding="utf-8") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["one node", *POLICIES]
    assert float(rows["cache_aware"]["share_of_one_node"]) > 0.9
    assert float(rows["round_robin"]["share_of_one_node"]) < 1
    assert all(row["num_requests"] == "72" and row["commit"] for row in rows.values())


def test_a_node_too_small_for_a_prompt_is_an_error_that_says_so(trace_file, tmp_path):
    with pytest.raises(ValueError, match="give more --memory"):
        main(["--trace", str(trace_file), "--memory", "2.77e9", "--csv", str(tmp_path / "out.csv")])
