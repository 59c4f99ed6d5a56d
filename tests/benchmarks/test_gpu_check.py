"""The GPU check runs from a bare checkout, and what it checks can fail."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sluice.benchmarks.gpu_measure import Device, check
from sluice.benchmarks.gpu_work import Work

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
NOT_THERE = ("ray", "nixl", "pydantic", "transformers", "rich", "yaml", "typer", "safetensors")
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({NOT_THERE}))  # importing any of them fails
sys.argv = [{str(SCRIPT)!r}, *sys.argv[1:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_bare(*arguments):
    """The script's exit code and output, from a folder where nothing is, without our package."""
    command = [sys.executable, "-c", BARE, *arguments]
    return subprocess.run(command, cwd="/", env={}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_what_to_do():
    done = run_bare()
    assert done.returncode == 2
    assert "no GPU" in done.stdout and "--interpret" in done.stdout


def test_every_kernel_is_right_in_the_interpreter():
    done = run_bare("--interpret")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" yes") > 30 and " NO" not in done.stdout


def work(run, *, tolerance=1e-3, sample=None):
    truth = torch.arange(1.0, 7.0, dtype=torch.float64).view(3, 2)
    expected = truth if sample is None else truth[sample]
    return Work("k", "w", run, lambda: expected, tolerance, num_bytes=1000, flops=10, sample=sample)


def test_errors_are_shares_of_the_largest_true_value():
    found = torch.arange(1.0, 7.0).view(3, 2)
    assert check(work(lambda: found)).correct
    found[0, 0] += 0.3
    assert check(work(lambda: found)).error == pytest.approx(0.05)
    assert not check(work(lambda: found)).correct


@pytest.mark.parametrize("sample", [None, torch.tensor([0, 1])])
def test_memory_that_is_not_written_shows(sample):
    def run():
        result = torch.empty(3, 2)
        result[:2] = torch.arange(1.0, 5.0).view(2, 2)
        return result

    assert check(work(run, sample=sample)).error == torch.inf


def test_the_floor_is_what_takes_longer():
    device = Device(copy_bytes_per_s=1e3, flops_per_s={"bf16": 1.0})
    assert device.floor_s(work(None)) == 10.0
    assert Device(1e3, {"bf16": 1e9}).floor_s(work(None)) == 1.0
