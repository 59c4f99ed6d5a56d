"""A prefill node knows the decode nodes of the newest list, whatever order the lists come in."""

import dataclasses
import random

import pytest

from sluice.protocol.messages import IncompatiblePeers, NodeError, TransferFailed


@pytest.fixture
def pair(start_local, config_of, tiny_checkpoint):
    return start_local(config_of(tiny_checkpoint))


@pytest.fixture
def generate(pair, make_request):
    """Sends a request through the pair; raises what it fails with."""
    seeds = iter(range(100))

    def send():
        request = make_request(20, vocab_size=511, seed=next(seeds))
        grant = pair.reserve(request)
        try:
            pair.prefill.run(request, grant).result(30)
            return pair.finish(grant)
        finally:
            pair.decode.release(grant.grant_id, in_flight=False).result(30)

    return send


def meet(pair, version, *peers):
    return pair.prefill.meet(version, peers).result(30)


def test_who_is_not_on_the_list_is_dropped_and_who_is_on_it_again_is_met_again(pair, generate):
    assert meet(pair, 1, pair.decode.info) == {}
    generate()
    assert meet(pair, 2) == {}
    with pytest.raises(TransferFailed, match="not connected"):
        generate()
    assert meet(pair, 3, pair.decode.info) == {}
    generate()


def test_a_list_that_comes_late_changes_nothing(pair, generate):
    meet(pair, 2, pair.decode.info)
    with pytest.raises(NodeError, match="list 1 of peers came after list 2"):
        meet(pair, 1)
    generate()


def test_a_list_that_comes_twice_drops_nothing_that_is_under_way(pair, generate, make_request):
    meet(pair, 1, pair.decode.info)
    request = make_request(200, vocab_size=511, seed=200)
    grant = pair.reserve(request)
    running = pair.prefill.run(request, grant)
    for _ in range(5):
        assert meet(pair, 1, pair.decode.info) == {}
    running.result(30)
    assert pair.finish(grant)[1] is None


def test_a_peer_that_does_not_fit_is_named_and_the_others_are_met(pair, generate):
    misfit = dataclasses.replace(pair.decode.info, node_id="misfit", fingerprint="another model")
    failed = meet(pair, 1, misfit, pair.decode.info)
    assert failed.keys() == {"misfit"}
    assert isinstance(failed["misfit"], IncompatiblePeers)
    assert "fingerprint" in str(failed["misfit"])
    generate()


def test_in_any_order_the_newest_list_holds(pair, generate):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    lists = [(version, rng.choice([(), (pair.decode.info,)])) for version in range(1, 30)]
    newest = lists[-1][1]
    late = (1, () if newest else (pair.decode.info,))
    for version, peers in [*rng.sample(lists * 2, k=len(lists) * 2), late]:
        outcome = pair.prefill.meet(version, peers)
        assert isinstance(outcome.exception(30), NodeError | None)
    if newest:
        generate()
    else:
        with pytest.raises(TransferFailed):
            generate()
