"""What faults cost on nodes: the request at fault, nobody else, and no page for good."""

import random
import time

import pytest

from sluice.protocol.messages import NodeError, Refused, TransferFailed
from sluice.transfer.local_transport import LocalTransport


@pytest.fixture
def config(tiny_checkpoint, config_of):
    return config_of(tiny_checkpoint)


@pytest.fixture
def hasty_config(tiny_checkpoint, config_of):
    return config_of(tiny_checkpoint, transfer={"lease_s": 0.3})


def eventually(condition, timeout_s=10.0):
    """Wait until the condition holds; the nodes' loops make it so at their own pace."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def failures(status):
    """How many requests failed on the node, by reason."""
    return {
        labels["reason"]: value
        for family in status.metrics
        for name, labels, value in family.samples
        if name == "sluice:node_request_failures_total"
    }


class BrokenTransport(LocalTransport):
    """Refuses every post after the first `good` ones."""

    good = 0

    def post(self, peer, writes, notification):
        if self.good <= 0:
            raise TransferFailed("the cable is cut")
        self.good -= 1
        return super().post(peer, writes, notification)


class LosingTransport(LocalTransport):
    """Never learns what became of a write."""

    def poll(self, handle):
        raise TransferFailed("the connection was lost")


class DamagingTransport(LocalTransport):
    """Delivers notifications without the bytes, each after one that is no notification."""

    def post(self, peer, writes, notification):
        super().post(peer, [], b"garbage")
        return super().post(peer, [], notification)


class ModelThatTrips:
    """Raises when a batch holds the token 511."""

    def __init__(self, model):
        self._model = model
        self.specs, self.fingerprint = model.specs, model.fingerprint
        self.max_model_len, self.vocab_size = model.max_model_len, model.vocab_size
        self.replay_tokens, self.repeats = model.replay_tokens, False

    def forward(self, inputs, pools, *, all_logits=False):
        if (inputs.token_ids == 511).any():
            raise RuntimeError("tripped")
        return self._model.forward(inputs, pools, all_logits=all_logits)


def test_requests_batched_together_get_the_tokens_they_get_alone(
    config, start_local, single_of, make_request
):
    pair, single = start_local(config), single_of(config)
    requests = [
        make_request(n, vocab_size=511, seed=n, temperature=t, max_tokens=12)
        for n, t in ((5, 0.0), (60, 0.8), (33, 0.0), (100, 0.8))
    ]
    grants = [pair.reserve(request) for request in requests]
    firsts = [pair.prefill.run(r, g) for r, g in zip(requests, grants, strict=True)]
    tokens = {g.request_id: [f.result(30).token_id] for g, f in zip(grants, firsts, strict=True)}
    ended = 0
    while ended < len(grants):
        for chunk in pair.chunks.get(timeout=30):
            tokens[chunk.request_id] += chunk.token_ids
            ended += chunk.finish_reason is not None
    for request, grant in zip(requests, grants, strict=True):
        assert tokens[grant.request_id] == single.generate(request)[0], request.request_id


def test_a_full_decode_node_refuses_and_takes_the_next_after_a_release(
    config, start_local, make_request
):
    pair = start_local(config)
    grants = [pair.reserve(make_request(9, vocab_size=511, seed=s)) for s in range(4)]
    with pytest.raises(Refused, match=r"d: 4 requests are running .*try again"):
        pair.reserve(make_request(9, vocab_size=511, seed=9))
    pair.decode.release(grants[0].request_id, in_flight=False).result(5)
    pair.reserve(make_request(9, vocab_size=511, seed=9))


def test_aborts_at_random_moments_leave_nothing_behind(config, start_local, make_request):
    pair, rng = start_local(config), random.Random(3)
    for seed in range(60):
        request = make_request(rng.randrange(1, 300), vocab_size=511, seed=seed, max_tokens=30)
        grant = pair.reserve(request)
        pair.prefill.run(request, grant)
        time.sleep(rng.choice([0, 0.002, 0.01, 0.03]))
        pair.prefill.abort(grant.request_id).result(10)
        pair.decode.release(grant.request_id, in_flight=False).result(10)
    assert pair.used_pages() == 0
    pair.prefill.runner.manager.check()
    pair.decode.runner.manager.check()


def test_an_abort_ends_the_run_with_an_error(config, start_local, make_request):
    pair = start_local(config)
    request = make_request(1000, vocab_size=511, max_tokens=2)
    grant = pair.reserve(request)
    run = pair.prefill.run(request, grant)
    pair.prefill.abort(grant.request_id).result(10)
    with pytest.raises(NodeError, match="aborted"):
        run.result(10)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_post_that_raises_fails_the_run_at_once(config, start_local, make_request, good):
    pair = start_local(config, send_through=BrokenTransport)
    pair.prefill._sender._transport.good = good
    request = make_request(140, vocab_size=511)
    grant = pair.reserve(request)
    assert grant.lease_s > 20, "the failure must not wait for the lease"
    with pytest.raises(TransferFailed, match="the cable is cut"):
        pair.prefill.run(request, grant).result(10)
    pair.decode.release(grant.request_id, in_flight=False).result(10)
    assert pair.used_pages() == 0


def test_a_lost_write_fails_the_run_at_once_but_an_abort_waits_until_nothing_can_land(
    config, hasty_config, start_local, make_request
):
    for lease in (config, hasty_config):
        pair = start_local(lease, send_through=LosingTransport)
        request = make_request(50, vocab_size=511)
        grant = pair.reserve(request)
        with pytest.raises(TransferFailed, match="the connection was lost"):
            pair.prefill.run(request, grant).result(10)
        usage = pair.prefill.status("router").result(10).pools
        assert all(pages["used"] == 0 for pages in usage.values()), "nobody reads them any more"
        abort = pair.prefill.abort(request.request_id)
        if lease is config:
            pair.prefill.status("router").result(10)  # so that the abort has been taken
            assert not abort.done()
        else:
            abort.result(10)


def test_a_step_that_raises_fails_its_requests_and_the_node_goes_on(
    config, start_local, make_request
):
    pair = start_local(config, wrap=ModelThatTrips)
    bad = make_request(20, vocab_size=511)
    bad = type(bad)(bad.request_id, (*bad.prompt_token_ids, 511), bad.sampling)
    grant = pair.reserve(bad)
    with pytest.raises(NodeError, match="prefill step failed: tripped"):
        pair.prefill.run(bad, grant).result(10)
    assert failures(pair.statuses()[0]) == {"NodeError": 1}
    pair.decode.release(grant.request_id, in_flight=False).result(10)
    pair.generate(make_request(21, vocab_size=300))
    assert pair.used_pages() == 0


def test_a_grant_nobody_writes_to_is_void_and_its_pages_come_back_later(
    hasty_config, start_local, make_request
):
    pair = start_local(hasty_config)
    grant = pair.reserve(make_request(50, vocab_size=511))
    tokens, error = pair.finish(grant)
    assert tokens == [] and "lease" in error
    assert pair.used_pages() > 0, "a late write may still be on its way"
    eventually(lambda: pair.used_pages() == 0)


def test_a_held_grant_comes_back_as_soon_as_nothing_is_in_flight(config, start_local, make_request):
    pair = start_local(config)
    grant = pair.reserve(make_request(50, vocab_size=511))
    for _ in range(2):
        pair.decode.release(grant.request_id, in_flight=True).result(10)
        assert pair.used_pages() > 0
    pair.decode.release(grant.request_id, in_flight=False).result(10)
    assert pair.used_pages() == 0


def test_prefill_does_not_write_after_the_lease(hasty_config, start_local, make_request):
    pair = start_local(hasty_config)
    request = make_request(50, vocab_size=511)
    grant = pair.reserve(request)
    pair.finish(grant)
    before = {name: pool.tensor.clone() for name, pool in pair.decode.runner.pools.items()}
    slow = type(grant)(**{**vars(grant), "lease_s": 0.0})
    with pytest.raises(TransferFailed, match="lease"):
        pair.prefill.run(request, slow).result(10)
    for name, pool in pair.decode.runner.pools.items():
        assert pool.tensor.equal(before[name]), f"{name} was written"


def test_a_silent_router_loses_its_requests(hasty_config, start_local, make_request):
    pair = start_local(hasty_config)
    request = make_request(50, vocab_size=511, max_tokens=900)
    grant = pair.reserve(request)
    # On a machine that stood still for a lease the prefill finds the grant ended already.
    pair.prefill.run(request, grant).exception(10)
    _, error = pair.finish(grant)
    assert "without a sign of its router" in error
    eventually(lambda: pair.used_pages() == 0)


def test_damaged_transfers_and_dropped_notifications_show_in_the_metrics(
    tiny_checkpoint, config_of, start_local, make_request
):
    config = config_of(tiny_checkpoint, transfer={"checksum": "full"})
    pair = start_local(config, send_through=DamagingTransport)
    request = make_request(20, vocab_size=511)
    grant = pair.reserve(request)
    pair.prefill.run(request, grant).result(10)
    _, error = pair.finish(grant)
    assert "checksum" in error
    found = {
        (name, labels["reason"]): value
        for family in pair.statuses()[1].metrics
        for name, labels, value in family.samples
        if name.endswith("_total") and "reason" in labels
    }
    assert found == {
        ("sluice:notifications_dropped_total", "malformed"): 1,
        ("sluice:node_request_failures_total", "TransferFailed"): 1,
    }
