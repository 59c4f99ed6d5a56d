"""Aborts at random moments under load: what goes on beside them never notices.

NODE_ABORTS=10000 pytest -o timeout=0 tests/nodes/test_aborts.py     for a long run
"""

import dataclasses
import os
import random
import time

import pytest

NUM_ABORTS = int(os.environ.get("NODE_ABORTS", "60"))
VICTIMS = 2  # aborted beside each request that is left to finish
LENGTHS = (1, 31, 48, 49, 96, 130, 200, 300)
MOMENTS_S = (0, 0, 0.001, 0.003, 0.01, 0.03)


class Local:
    """Both nodes in this process."""

    def __init__(self, pair):
        self.pair, self.reserve, self.finish = pair, pair.reserve, pair.finish

    def release(self, grant):
        self.pair.decode.release(grant.request_id, in_flight=False).result(10)


class OverNixl:
    """The decode node in a process of its own."""

    def __init__(self, pair):
        self.pair, self.reserve = pair, pair.decode.reserve

    def finish(self, grant):
        tokens, _ = self.pair.decode.finish(grant)
        self.pair.decode.release(grant.request_id)
        return tokens, None

    def release(self, grant):
        self.pair.decode.release(grant.request_id)


@pytest.fixture(params=["write", "read"])
def mode(request):
    return request.param


@pytest.fixture(params=["local", "nixl"])
def side(request, mode, tiny_checkpoint, config_of, start_local, start_pair):
    # Few pages, so that aborted requests' pages go straight to others.
    config = config_of(
        tiny_checkpoint,
        prefill={"cache_bytes": 3 << 20},
        decode={"cache_bytes": 3 << 20},
        transfer={"mode": mode},
    )
    return Local(start_local(config)) if request.param == "local" else OverNixl(start_pair(config))


def test_aborts_change_no_other_requests_tokens_and_leave_nothing(side, single_of, make_request):
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    rng = random.Random(seed)
    prompts = [make_request(n, vocab_size=511, seed=n, max_tokens=6) for n in LENGTHS]
    single = single_of(side.pair.config)
    expected = {request.request_id: single.generate(request)[0] for request in prompts}
    for number in range(NUM_ABORTS // VICTIMS):
        chosen = rng.choices(prompts, k=1 + VICTIMS)
        requests = [
            dataclasses.replace(r, request_id=f"{number}.{i}") for i, r in enumerate(chosen)
        ]
        order = rng.sample(range(1 + VICTIMS), 1 + VICTIMS)  # 0 is the one that stays
        grants = {i: side.reserve(requests[i]) for i in order}
        runs = {i: side.pair.prefill.run(requests[i], grants[i]) for i in order}
        for victim in range(1, 1 + VICTIMS):
            time.sleep(rng.choice(MOMENTS_S))
            side.pair.prefill.abort(requests[victim].request_id).result(30)
            side.release(grants[victim])
        first = runs[0].result(30)
        tokens, error = side.finish(grants[0])
        assert error is None, error
        assert [first.token_id, *tokens] == expected[chosen[0].request_id], f"round {number}"
    assert side.pair.used_pages() == 0
