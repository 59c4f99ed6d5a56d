"""Decode steps: on buffers that never move, right after every change, and free of host syncs."""

import dataclasses
import random

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from sluice.cache.manager import CacheManager
from sluice.cache.pools import allocate_pools
from sluice.cache.spec import Block, Full, PoolSpec, Window, tables_of
from sluice.engine.batch import Chunk, build_inputs
from sluice.engine.graphs import DecodeSteps, StepBuffers, graph_rows
from sluice.engine.request import Request
from sluice.model.make_checkpoint import TINY, make_checkpoint
from sluice.model.registry import load_model
from sluice.protocol.messages import SamplingParams

MAX_REQUESTS, MAX_TOKENS = 8, 96
SPECS = (
    PoolSpec("rows", (0,), (1,), "float32", 4, 16, Full()),
    PoolSpec("window", (0,), (1,), "float32", 1, 4, Window(6)),
    PoolSpec("state", (0,), (1,), "float32", 1, 8, Block(4, overlap=1)),
)


class Lives:
    """Requests that join with prompts of any length, decode, and leave or are preempted."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        pages = {spec.table: 200 for spec in SPECS}
        self.manager = CacheManager(SPECS, pages, MAX_REQUESTS, prefix_cache=False)
        self.running = []
        self.started = 0

    def turn(self):
        """Some leave, some join; the chunks of the next step, never none."""
        for request in self.random.sample(self.running, len(self.running)):
            if len(request.token_ids) >= MAX_TOKENS or self.random.random() < 0.05:
                self.running.remove(request)
                self.manager.release(request.grant_id)
        while not self.running or (len(self.running) < MAX_REQUESTS and self.random.random() < 0.3):
            self.running.append(self._join())
        chunks = []
        for request in self.running:
            start = request.num_computed_tokens
            self.manager.extend(request.grant_id, start + 1)
            chunks.append(Chunk(request, start, start + 1))
        return chunks

    def done(self, chunks):
        for request, _, end in chunks:
            request.num_computed_tokens = end
            self.manager.expire(request.grant_id, end)
            request.token_ids.append(self.random.randrange(1000))

    def _join(self):
        self.started += 1
        ids = [self.random.randrange(1000) for _ in range(self.random.randint(2, 60))]
        name = f"r{self.started}"
        request = Request(name, name, len(ids), SamplingParams(1), ids)
        request.num_computed_tokens = request.history_tokens = len(ids) - 1
        self.manager.grant(name, num_tokens=len(ids) - 1, max_tokens=MAX_TOKENS)
        return request


class Addresses:
    """A model that only notes where its inputs and pools lie."""

    def __init__(self):
        self.repeats = False  # so that every step is seen
        self.seen = {}  # number of requests -> addresses

    def forward(self, inputs, pools):
        tensors = [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]
        maps = [*inputs.page_tables.values(), *inputs.first_pages.values()]
        flat = [t for t in tensors if isinstance(t, torch.Tensor)] + maps
        flat += [pool.tensor for pool in pools.values()]
        places = [(t.data_ptr(), t.stride()[:-1], t.dtype) for t in flat]
        self.seen.setdefault(inputs.num_requests, []).append(places)
        return torch.zeros(inputs.num_requests, 2)


def test_addresses_stay_over_a_thousand_steps():
    lives, model = Lives(1), Addresses()
    pools = allocate_pools(SPECS, lives.manager.num_pages)
    steps = DecodeSteps(model, pools, lives.manager, max_tokens=MAX_TOKENS, device="cpu")
    for _ in range(1000):
        chunks = lives.turn()
        steps.run(chunks)
        lives.done(chunks)
    assert lives.started > 100 and len(model.seen) == MAX_REQUESTS
    assert sum(map(len, model.seen.values())) == 1000
    for places in model.seen.values():
        assert all(place == places[0] for place in places)


@pytest.mark.parametrize("seed", range(3))
def test_buffers_say_what_a_batch_built_anew_says(seed):
    lives = Lives(seed)
    buffers = StepBuffers(lives.manager, max_tokens=MAX_TOKENS, device="cpu")
    for _ in range(400):
        chunks = lives.turn()
        buffers.fill(chunks)
        actual, expected = buffers.inputs(len(chunks)), build_inputs(chunks, lives.manager)
        for field in dataclasses.fields(actual):
            one, other = getattr(actual, field.name), getattr(expected, field.name)
            if isinstance(one, torch.Tensor):
                one, other = {None: one}, {None: other}
            for key in other:
                torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
        lives.done(chunks)


def test_rows_that_nobody_uses_are_null_pages():
    """A graph is padded with them, and writes to their pages."""
    lives = Lives(5)
    buffers = StepBuffers(lives.manager, max_tokens=MAX_TOKENS, device="cpu")
    for _ in range(200):
        chunks = lives.turn()
        buffers.fill(chunks)
        unused = buffers.inputs(MAX_REQUESTS)
        for pages in unused.page_tables.values():
            assert not pages[len(chunks) :].any()
        assert not unused.positions[len(chunks) :].any()
        lives.done(chunks)


def test_graphs_have_powers_of_two_up_to_all():
    assert [graph_rows(n, 12) for n in (1, 2, 3, 5, 8, 9, 12)] == [1, 2, 4, 8, 8, 12, 12]


@pytest.fixture
def fake_device(monkeypatch):
    """A mode in which tensors have shapes but no content to look at, and every path is a device's.

    Kernels are not launched. Whatever waits for numbers, such as `.item()`, `.tolist()` and
    `nonzero`, raises.
    """
    monkeypatch.setattr("sluice.kernels.launch.INTERPRETED", True)  # kernels run on CPU tensors
    monkeypatch.setattr(triton.runtime.JITFunction, "run", lambda *args, **kwargs: None)
    monkeypatch.setattr("sluice.model.v4.placement.EXACT_ON", ())
    return FakeTensorMode()


def faked(value):
    """A tree of dataclasses, dicts, tuples and tensors with every tensor a fake."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if isinstance(value, tuple):
        return tuple(faked(part) for part in value)
    if isinstance(value, dict):
        return {key: faked(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value):
        fields = {f.name: faked(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def decode_in(mode, model, num_rows, change=lambda inputs: inputs):
    """A decode step of the model; its pools, weights and inputs are fakes."""
    pages = dict.fromkeys(tables_of(model.specs), 20)
    manager = CacheManager(model.specs, pages, num_rows)
    inputs = StepBuffers(manager, max_tokens=model.max_model_len, device="cpu").inputs(num_rows)
    wide = {t: (num_rows, t.max_pages(1, model.max_model_len)) for t in manager.tables}
    with mode:
        same = type(model).__new__(type(model))
        vars(same).update({n: v if n == "specs" else faked(v) for n, v in vars(model).items()})
        tables = {table: torch.zeros(shape, dtype=torch.int64) for table, shape in wide.items()}
        inputs = dataclasses.replace(faked(inputs), page_tables=tables)
        return same.forward(change(inputs), allocate_pools(model.specs, pages))


@pytest.fixture(params=["hybrid", "native", "dense"])
def model(request, tmp_path):
    if request.param == "dense":
        shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": TINY.vocab_size}
        LlamaForCausalLM(LlamaConfig(**shape, **sizes)).save_pretrained(tmp_path)
        return load_model(tmp_path)
    make_checkpoint(tmp_path, config=TINY, seed=1)
    return load_model(tmp_path, cache_path=request.param)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_step_on_a_gpu_waits_for_no_number(fake_device, model, num_rows):
    logits = decode_in(fake_device, model, num_rows)
    assert logits.shape == (num_rows, TINY.vocab_size)


@pytest.mark.parametrize("model", ["hybrid", "native"], indirect=True)
def test_nor_does_a_step_that_mixes_prompts_with_decode(fake_device, model):
    def mixed(inputs):
        tokens = dict.fromkeys(("token_ids", "positions", "request_index"), torch.zeros(9).long())
        return dataclasses.replace(inputs, **tokens)

    assert decode_in(fake_device, model, 4, mixed).shape == (4, TINY.vocab_size)


@pytest.mark.parametrize("model", ["hybrid"], indirect=True)
@pytest.mark.parametrize(
    "wait", [lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x[x > 0]]
)
def test_a_step_that_looks_at_numbers_is_caught(fake_device, model, monkeypatch, wait):
    from sluice.model.v4 import attention

    def looking(x, *args):
        wait(x)
        return norm(x, *args)

    norm = attention.rms_norm
    monkeypatch.setattr(attention, "rms_norm", looking)
    with pytest.raises((DataDependentOutputException, RuntimeError)):
        decode_in(fake_device, model, 2)
