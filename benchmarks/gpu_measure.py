"""Measuring on a GPU: whether a kernel is right, how long it takes, and what the device can do."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from sluice.benchmarks.gpu_work import Result, Work

NUM_RUNS = 20
FLUSH_BYTES = 256 << 20  # written before each run: more than the last-level cache of any GPU
COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Checked:
    """A kernel's largest error, as a share of the largest true value, and whether it is right."""

    error: float
    correct: bool


@dataclass(frozen=True)
class Device:
    """What a device was measured to do: bytes a second copied, flops a second by number format."""

    copy_bytes_per_s: float
    flops_per_s: Mapping[str, float]

    def floor_s(self, work: Work) -> float:
        """The least time for the work: its bytes or its flops, whichever takes longer."""
        memory_s = work.num_bytes / self.copy_bytes_per_s
        return max(memory_s, work.flops / self.flops_per_s[work.rate])


def check(work: Work) -> Checked:
    """Run once, on poisoned memory, and compare with the truth."""
    with _poisoned():
        found = _tensors(work.run())
    errors = [_error(*pair, work) for pair in zip(found, _tensors(work.expected()), strict=True)]
    error = max(errors)
    return Checked(error, error <= work.tolerance)


def _error(found: Tensor, expected: Tensor, work: Work) -> float:
    """Infinite where something is not a number that should be, outside of the sample too."""
    if work.sample is not None:
        written = found[int(work.sample[0]) :]
        if written.is_floating_point() and written.isnan().any():
            return torch.inf
        found = found[work.sample]
    found, expected = found.double(), expected.double()
    difference = torch.where(found == expected, 0.0, (found - expected).abs())
    largest = expected.abs().max().clamp(min=1e-30)
    return float((difference.max() / largest).nan_to_num(nan=torch.inf))


def _tensors(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """New memory begins as NaN, or as a number that means nothing: what is not written shows."""

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: object, **kwargs: object) -> Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.uint8:
                return tensor.fill_(255)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**30))

        return made

    with (
        patch.object(torch, "empty", poison(torch.empty)),
        patch.object(torch, "empty_like", poison(torch.empty_like)),
        patch.object(Tensor, "new_empty", poison(Tensor.new_empty)),
    ):
        yield


def time_s(work: Work) -> float:
    """Median seconds of one run, the caches cold, without the time that Python takes to launch."""
    work.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work.run()
    return _median_s(graph.replay)


def _median_s(run: Callable[[], object]) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8)
    times_ms = []
    for _ in range(NUM_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return statistics.median(times_ms) / 1000


def measure_device() -> Device:
    """Copy and multiply large tensors."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source))
    flops = 2 * MATMUL_SIZE**3
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16)
    rates = {"bf16": flops / _median_s(lambda: a @ b)}
    one = torch.ones(())
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
    rates["fp8"] = flops / _median_s(
        lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    )
    return Device(2 * COPY_BYTES / copy_s, rates)
