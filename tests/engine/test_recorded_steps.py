"""Decode steps on a CPU that are recorded and replayed: the same logits, and nothing looked at."""

import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sluice.engine.batch import Chunk
from sluice.engine.request import Request
from sluice.engine.runner import Runner
from sluice.kernels import cpu
from sluice.kernels.capture import Capture, NotRepeatable
from sluice.model.make_checkpoint import TINY, make_checkpoint
from sluice.model.registry import load_model
from sluice.protocol.config import RoleConfig
from sluice.protocol.messages import SamplingParams

MAX_REQUESTS = 5
MAX_TOKENS = 200


class Lives:
    """Requests on two equal runners, of which one replays, that join, decode and leave."""

    def __init__(self, model, seed):
        self.random = random.Random(seed)
        role = RoleConfig(max_running_requests=MAX_REQUESTS, cache_bytes=16 << 20)
        sizes = {"max_step_tokens": MAX_TOKENS, "max_model_len": 2 * MAX_TOKENS}
        self.replaying, self.computing = (Runner(model, role, **sizes) for _ in range(2))
        self.computing.decode_steps._records = False
        self.running, self.started = [], 0

    def turn(self):
        """One step of each; returns the logits of both."""
        while self.running and self.random.random() < 0.1:
            request = self.running.pop(self.random.randrange(len(self.running)))
            for runner in (self.replaying, self.computing):
                runner.manager.release(request.grant_id)
        while not self.running or (len(self.running) < MAX_REQUESTS and self.random.random() < 0.2):
            self._join()
        logits = self._step([(r, len(r.token_ids) - 1) for r in self.running])
        for request, token in zip(self.running, logits[0].argmax(1).tolist(), strict=True):
            request.token_ids.append(token)
        return logits

    def _join(self):
        self.started += 1
        name, n = f"r{self.started}", self.random.randint(2, MAX_TOKENS)
        ids = [self.random.randrange(3, 500) for _ in range(n)]
        request = Request(name, name, n, SamplingParams(max_tokens=1), ids)
        for runner in (self.replaying, self.computing):
            runner.manager.grant(name, num_tokens=0, max_tokens=n + MAX_TOKENS)
        if n > 2:
            self._step([(request, 0)], all_but=1)
        self.running.append(request)

    def _step(self, starts, all_but=0):
        logits = []
        for runner in (self.replaying, self.computing):
            chunks = []
            for request, start in starts:
                end = len(request.token_ids) - all_but
                runner.manager.extend(request.grant_id, end)
                chunks.append(Chunk(request, start, end))
            logits.append(runner.step(chunks).clone())
            for request, _, end in chunks:
                runner.manager.expire(request.grant_id, end)
        return logits


@pytest.fixture(params=["hybrid", "dense"])
def model(request, tmp_path):
    if request.param == "dense":
        shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"hidden_size": 40, "intermediate_size": 48, "vocab_size": TINY.vocab_size}
        LlamaForCausalLM(LlamaConfig(**shape, **sizes)).save_pretrained(tmp_path)
        return load_model(tmp_path)
    make_checkpoint(tmp_path, config=TINY, seed=1)
    return load_model(tmp_path)


@pytest.mark.skipif(cpu._library() is None, reason="no C++ compiler: steps are not recorded")
@pytest.mark.parametrize("seed", range(2))
def test_replayed_steps_give_the_logits_of_computed_ones(model, seed):
    lives = Lives(model, seed)
    for _ in range(150):
        replayed, computed = lives.turn()
        torch.testing.assert_close(replayed, computed, rtol=1e-4, atol=1e-4)
    assert lives.started > 10
    assert lives.replaying.decode_steps.num_recorded >= 3, "the model's steps can be recorded"
    assert not lives.computing.decode_steps.num_recorded


@pytest.mark.parametrize(
    "look",
    [lambda x: x.tolist(), lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: int(x[0])],
)
def test_a_step_that_looks_at_numbers_is_not_recorded(look):
    x = torch.arange(3)
    with pytest.raises(NotRepeatable):
        Capture(lambda: (look(x), x + 1)[1])


def test_a_replay_reads_what_the_inputs_hold_then():
    x, rows = torch.arange(4.0), torch.zeros(4)

    def compute():
        rows[1:].add_(x[1:] * 2)
        return rows.sum(0, keepdim=True) + torch.ones(1)

    capture = Capture(compute)
    assert capture.result.item() == 13
    x += 1
    assert capture.replay().item() == 31
