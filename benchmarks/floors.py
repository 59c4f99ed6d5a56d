"""Floors: the least time a machine can take for a step, from what must be read and multiplied."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from sluice.model.dense.model import DenseModel
from sluice.model.registry import Model
from sluice.model.v4.config import LayerType
from sluice.model.v4.hybrid import DeepseekV4
from sluice.model.v4.weights import MoeWeights

READ_BYTES = 256 << 20
MATMUL_SIZE = 1024
NUM_TRIALS = 8


@dataclass(frozen=True)
class Work:
    """What one step must do at least.

    read_bytes: weights and rows, each once. flops: of products with weights and with rows.
    """

    read_bytes: float
    flops: float


@dataclass(frozen=True)
class Floor:
    seconds: float
    bound: str


@dataclass(frozen=True)
class Rates:
    """What the machine did in this run."""

    read_bytes_per_s: float
    flops_per_s: dict[str, float]

    def floor(self, work: Work, dtype: str) -> Floor:
        reading = work.read_bytes / self.read_bytes_per_s
        multiplying = work.flops / self.flops_per_s[dtype]
        return Floor(max(reading, multiplying), "read" if reading > multiplying else "multiply")

    def row(self) -> dict[str, float]:
        rates = {f"{dtype}_gflops": flops / 1e9 for dtype, flops in self.flops_per_s.items()}
        rates |= {"read_gb_per_s": self.read_bytes_per_s / 1e9}
        return {name: round(rate, 1) for name, rate in rates.items()}

    def __str__(self) -> str:
        return ", ".join(f"{name} {rate}" for name, rate in self.row().items())


def measure_rates() -> Rates:
    """Reading of a large matrix in a product with one vector, and products of square matrices."""
    width = 1024
    matrix, vector = torch.randn(READ_BYTES // 4 // width, width), torch.randn(width)
    reading = _smallest(lambda: torch.mv(matrix, vector))
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype)
        rates[str(dtype).removeprefix("torch.")] = 2 * MATMUL_SIZE**3 / _smallest(_square(square))
    return Rates(READ_BYTES / reading, rates)


def _square(matrix: Tensor) -> Callable[[], Tensor]:
    return lambda: matrix @ matrix


def _smallest(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(NUM_TRIALS):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def work_of(model: Model, num_requests: int, num_tokens: int, num_computed: int) -> Work:
    """A step that computes `num_tokens` of each request after `num_computed`."""
    if isinstance(model, DeepseekV4):
        return _v4_work(model, num_requests, num_tokens, num_computed)
    assert isinstance(model, DenseModel), "floors are known for the models of this project"
    return _dense_work(model, num_requests, num_tokens, num_computed)


def _v4_work(model: DeepseekV4, num_requests: int, num_tokens: int, num_computed: int) -> Work:
    config, tokens = model.config, num_requests * num_tokens
    share = config.num_experts_per_token / config.num_experts
    read = flops = 0.0
    for layer in model.weights.layers:
        moe = layer.moe
        assert isinstance(moe.w13, Tensor) and isinstance(moe.w2, Tensor), "weights are plain"
        experts = _bytes(moe.w13) + _bytes(moe.w2)
        others = [t for t in _tensors(layer) if t.dim() == 2 and t.is_floating_point()]
        others += [layer.attention.wo_a]
        read += experts * (1 - (1 - share) ** tokens) + sum(map(_bytes, others))
        flops += 2 * tokens * (share * (moe.w13.numel() + moe.w2.numel()) + _numel(others))
    head = model.weights.head
    read, flops = read + _bytes(head), flops + 2 * num_requests * head.numel()
    rows = sum(_v4_rows(model, kind, num_computed + num_tokens) for kind in config.layer_types)
    if num_tokens == 1:  # of a prompt's rows only the matrices' part is counted
        read += num_requests * rows * model.weights.embed.element_size()
        flops += 2 * tokens * rows * config.num_heads
    return Work(read, flops)


def _v4_rows(model: DeepseekV4, kind: LayerType, num_tokens: int) -> float:
    """Numbers that a token of one layer reads from the pools."""
    config = model.config
    numbers = min(config.sliding_window, num_tokens) * config.head_dim
    if kind is LayerType.CSA:
        num_rows = num_tokens // config.csa_ratio
        numbers += num_rows * config.index_head_dim
        numbers += min(num_rows, config.index_topk) * config.head_dim
    elif kind is LayerType.HCA:
        numbers += num_tokens // config.hca_ratio * config.head_dim
    return numbers


def _dense_work(model: DenseModel, num_requests: int, num_tokens: int, num_computed: int) -> Work:
    config, tokens = model.config, num_requests * num_tokens
    matrices = [t for layer in model.weights.layers for t in _tensors(layer) if t.dim() == 2]
    head, size = model.weights.head, model.weights.embed.element_size()
    reach = num_computed + (num_tokens + 1) / 2  # rows that a token attends to, in the mean
    rows = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    groups = config.num_heads / config.num_kv_heads
    return Work(
        read_bytes=sum(map(_bytes, matrices))
        + _bytes(head)
        + num_requests * (num_computed + num_tokens) * rows * size,
        flops=2 * tokens * _numel(matrices)
        + 2 * num_requests * head.numel()
        + 2 * tokens * reach * rows * groups,
    )


def _tensors(weights: object) -> Iterator[Tensor]:
    """All tensors of a tree of dataclasses, routed experts aside."""
    assert is_dataclass(weights), "weights are dataclasses"
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, Tensor):
            if not (isinstance(weights, MoeWeights) and field.name in ("w13", "w2")):
                yield value
        elif value is not None:
            yield from _tensors(value)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _numel(tensors: list[Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)
