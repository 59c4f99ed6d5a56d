"""The replay of a small trace: its hit rate is the ideal one, or what memory allows."""

import csv
import json
import random

import pytest

from sluice.benchmarks.trace_replay import Case, cases, main, memory_bytes, run
from sluice.benchmarks.traces import BLOCK_TOKENS, read_trace


@pytest.fixture
def trace_file(tmp_path):
    """Conversations of eight turns with one system prompt, in Mooncake's format."""
    rng, path = random.Random(1), tmp_path / "small_trace.jsonl"
    fresh = iter(range(1, 10_000))
    histories = [[0] for _ in range(12)]
    lines = []
    for turn in range(8):
        for number, history in enumerate(histories):
            new = [next(fresh) for _ in range(rng.randint(1, 3))]
            cut = rng.randrange(BLOCK_TOKENS)
            length = (len(history) + len(new)) * BLOCK_TOKENS - cut
            lines.append(
                {
                    "timestamp": turn * 1000 + number,
                    "input_length": length,
                    "output_length": 1,
                    "hash_ids": history + new,
                }
            )
            history += new[: len(new) - (cut > 0)]
    rng.shuffle(lines)
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_tokens_are_equal_where_block_ids_are_and_nowhere_else(trace_file):
    trace = read_trace(trace_file, scale=64)
    block_of = {}
    for prompt in trace.prompts:
        tokens = trace.token_ids(prompt)
        assert len(tokens) == prompt.num_tokens
        for place, token in enumerate(tokens):
            block = prompt.block_ids[place // trace.block_tokens]
            assert block_of.setdefault(token, (block, place)) == (block, place)


def test_with_unlimited_memory_the_hit_rate_is_close_to_the_ideal(trace_file):
    trace = read_trace(trace_file)
    result = run(trace, Case("unlimited", None, resume_every_tokens=BLOCK_TOKENS))
    ideal = result.ideal_block_hit_rate
    assert 0.98 * ideal <= result.block_hit_rate <= ideal


def test_with_less_memory_less_is_hit_and_never_more_than_the_ideal(trace_file):
    trace = read_trace(trace_file)
    size = memory_bytes("1/2", trace) + 2_000_000_000  # and what running requests need
    for case in cases(trace, [str(size)], sweep=False):
        result = run(trace, case)
        assert 0 <= result.block_hit_rate <= result.ideal_block_hit_rate, case.policy


def test_the_command_writes_a_line_for_each_policy_with_its_origin(trace_file, tmp_path):
    out = tmp_path / "out.csv"
    arguments = ["--trace", str(trace_file), "--memory", "4e9", "--limit", "20", "--csv", str(out)]
    assert main(arguments) == 0
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows][:2] == ["sluice", "fixed distance"]
    assert all(row["commit"] and row["machine"] and row["num_requests"] == "20" for row in rows)
    assert str(tmp_path) not in rows[0]["command"], "traces are named without their folder"


def test_a_line_that_is_no_request_is_refused_with_the_expectation(tmp_path):
    path = tmp_path / "broken.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "hash_ids": [1]}', encoding="utf-8")
    with pytest.raises(ValueError, match="600 tokens and 1 hash_ids, expected one for each 512"):
        read_trace(path)
