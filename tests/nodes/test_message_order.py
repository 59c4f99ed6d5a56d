"""No order, doubling, delay or loss of messages changes an answer or leaves anything behind.

MESSAGE_EXAMPLES=10000 pytest -o timeout=0 tests/nodes/test_message_order.py     a million steps
"""

import os
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from sluice.decode_node.outbox import Outbox
from sluice.router.dispatch.reservation import CALL_LIMIT_S

sys.path.insert(0, str(Path(__file__).parent))

from message_world import LEASE_S, World
from sums_model import VOCAB

NUM_EXAMPLES = int(os.environ.get("MESSAGE_EXAMPLES", "100"))
STEPS = 100
PICK = st.integers(0, 10_000)


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def letter(world, start):
    [found] = [letter for letter in world.mail if letter.what.startswith(start)]
    return found


def prompt(seed, num_tokens=40):
    return [(seed * 31 + i * 7) % VOCAB for i in range(num_tokens)]


def counter(remote, name, **labels):
    """The value of one of the node's counters."""
    [value] = [
        value
        for family in remote.node.metrics.families()
        for sample, having, value in family.samples
        if sample == name and having == labels
    ]
    return value


def until(world, start):
    """Deliver everything in order until a letter of that kind waits; return it."""
    for _ in range(400):
        for waiting in list(world.mail):
            if waiting.what.startswith(start):
                return waiting
            world.deliver(waiting)
        world.pass_time(0.05)
    raise AssertionError(f"no {start!r} was sent")


def test_a_run_that_its_abort_has_overtaken_writes_nothing(world):
    world.begin("leaver", prompt(1), 8)
    run = until(world, "run leaver")
    world.cancel("leaver")
    world.deliver(letter(world, "abort"))
    world.pass_time(0.2)
    world.deliver(letter(world, "answer to abort"))
    world.deliver(letter(world, "release"))
    world.pass_time(0.2)
    world.begin("victim", prompt(2), 8)
    world.pass_time(0.2, calm=False)
    world.deliver(run)
    world.calm_down()
    world.check_answers()
    world.check_quiescent()
    assert "victim" in world.whole


def test_a_run_that_comes_after_its_time_is_refused(world):
    world.begin("late", prompt(1), 8)
    run = until(world, "run late")
    world.cancel("late")
    for number in range(8):  # until nobody remembers its abort
        world.begin(f"other{number}", prompt(2), 4)
        for _ in range(int(LEASE_S)):
            world.pass_time(0.5)
            for other in [m for m in world.mail if m is not run]:
                world.deliver(other)
    before = counter(world.prefills[0], "sluice:computed_tokens_total", kind="prefill")
    world.deliver(run)
    world.calm_down()
    world.check_quiescent()
    assert counter(world.prefills[0], "sluice:computed_tokens_total", kind="prefill") == before


def test_a_reserve_that_its_release_has_overtaken_takes_nothing(world):
    world.begin("leaver", prompt(1), 8)
    reserve = until(world, "reserve leaver")
    world.cancel("leaver")
    world.deliver(letter(world, "release"))
    world.pass_time(0.1)
    world.deliver(reserve)
    world.pass_time(0.1)
    assert sum(p["used"] for p in world.decodes[0].node.runner.manager.usage().values()) == 0


def test_a_lost_release_leaves_no_zombie(world):
    world.begin("leaver", prompt(1), 200)
    until(world, "tokens [('leaver")
    world.cancel("leaver")
    world.mail.remove(until(world, "release leaver"))
    world.pass_time(CALL_LIMIT_S + 1.5, calm=True)
    assert sum(p["used"] for p in world.decodes[0].node.runner.manager.usage().values()) == 0
    assert counter(world.decodes[0], "sluice:computed_tokens_total", kind="decode") < 180


def test_tokens_that_come_twice_count_once(world):
    world.begin("r", prompt(1), 8)
    world.deliver(until(world, "tokens [('r"), keep=True)
    world.calm_down()
    world.check_answers()
    assert "r" in world.whole


def test_of_two_streams_of_a_router_the_later_one_counts():
    outbox, first, second = Outbox(), [], []
    outbox.subscribe("router", second.append, 2)
    outbox.subscribe("router", first.append, 1)  # it was sent earlier, and took longer
    outbox.put("router", "chunk")
    outbox.flush()
    assert second == [["chunk"]] and first == [None]


@pytest.mark.parametrize("kind", ["reserve", "answer to reserve", "run", "answer to run", "tokens"])
def test_what_waits_for_a_lost_message_goes_on(world, kind):
    world.begin("r", prompt(1), 8)
    found = until(world, f"{kind} [('r" if kind == "tokens" else f"{kind} r.")
    world.mail.remove(found)
    world.calm_down()
    world.check_answers()
    world.check_quiescent()
    assert "r" in world.whole, world.errors


def test_the_last_tokens_of_an_answer_are_missed_when_they_are_lost(world):
    world.begin("r", prompt(1), 3)
    until(world, "tokens [('r.1', 1)")
    world.mail.remove(until(world, "tokens [('r.1', 1)"))
    world.mail.remove(until(world, "tokens [('r.1', 2)"))
    world.calm_down()
    world.check_answers()
    assert "r" in world.whole, world.errors


def test_prefill_computes_no_further_for_a_router_that_has_fallen_silent(world):
    world.begin("r", prompt(1, 230), 8)  # ten chunks
    world.deliver(until(world, "run r"))
    prefill = world.prefills[0]
    for node in world.nodes:
        node.frozen = True
    for _ in range(10):
        prefill.node.turn_here()
        world.pass_time(LEASE_S / 4)
        for sent in list(world.mail):  # writes arrive, but nothing of the router does
            if sent.what.startswith("write"):
                world.deliver(sent)
        world.mail.clear()
    assert counter(prefill, "sluice:computed_tokens_total", kind="prefill") < 8 * 24
    assert prefill.node.runner.manager.usage()["all"]["used"] == 0


class Messages(RuleBasedStateMachine):
    """Requests come and go, nodes freeze, and the mail does what it likes.

    No rule has a precondition: what is in the mail hangs a little on the real time that the queue
    takes, so that the same choices may find it empty.
    """

    @initialize(num_prefill=st.integers(1, 2), num_decode=st.integers(1, 2))
    def start(self, num_prefill, num_decode):
        self.world = World(num_prefill, num_decode)

    @rule(
        seed=st.integers(0, 3), num_tokens=st.integers(1, 90), output=st.integers(1, 12),
        local=st.booleans(),
    )  # fmt: skip
    def request(self, seed, num_tokens, output, local):
        if len(self.world.tasks) == 12:
            return
        name = f"r{len(self.world.tasks)}"
        self.world.begin(name, prompt(seed, num_tokens), output, local=local)

    @rule(which=PICK)
    def client_leaves(self, which):
        if self.world.tasks:
            self.world.cancel(f"r{which % len(self.world.tasks)}")

    @rule(which=PICK)
    def deliver_any(self, which):
        if self.world.mail:
            self.world.deliver(self.world.mail[which % len(self.world.mail)])

    @rule()
    def deliver_oldest(self):
        if self.world.mail:
            self.world.deliver(self.world.mail[0])

    @rule(which=PICK)
    def deliver_and_keep(self, which):
        if self.world.mail:
            self.world.deliver(self.world.mail[which % len(self.world.mail)], keep=True)

    @rule(which=PICK)
    def lose(self, which):
        if self.world.mail:
            self.world.mail.pop(which % len(self.world.mail))

    @rule(which=PICK)
    def turn(self, which):
        node = self.world.nodes[which % len(self.world.nodes)]
        if not node.frozen:
            self.world.turn(node)

    @rule(which=PICK)
    def freeze_or_thaw(self, which):
        node = self.world.nodes[which % len(self.world.nodes)]
        node.frozen = not node.frozen

    @rule(which=PICK)
    def fail_a_write(self, which):
        self.world.prefills[which % len(self.world.prefills)].transport.fail()

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.0, LEASE_S]))
    def wait(self, seconds):
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([0.1, 0.5]))
    def all_is_well(self, seconds):
        self.world.pass_time(seconds, calm=True)

    def teardown(self):
        if hasattr(self, "world"):
            try:
                self.world.calm_down()
                self.world.check_answers()
                self.world.check_quiescent()
            finally:
                self.world.close()


TestMessages = Messages.TestCase
TestMessages.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
