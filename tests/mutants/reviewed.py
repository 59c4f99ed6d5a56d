"""Changes that a review planted and that no test noticed then: file, text, what it becomes.

`make mutants ARGS=--reviewed` plants each of them; the tests of its folder must notice.
"""

from __future__ import annotations

REVIEWED = (
    # Resume points among replayed tokens, whose window and state are not right yet.
    ("prefill_node", "prefill_node/scheduler.py",
     "if wanted and end >= request.history_tokens:", "if wanted:"),
    # A second sender's chunks complete the grant.
    ("transfer", "transfer/incoming.py",
     "if self.sender not in (None, sender):", "if False:"),
    # A drained node does not wait for what runs on it.
    ("deploy", "deploy/controller/controller.py",
     "await asyncio.gather(*(router.wait_idle(node.node_id) for router in self._routers))", "pass"),
    # Pages are held for less than what may still arrive.
    ("decode_node", "decode_node/grants.py",
     "until = max(now, stream.deadline) + 2 * self.lease_s", "until = now + 2 * self.lease_s"),
    ("decode_node", "decode_node/grants.py",
     "until=now + 3 * self.lease_s", "until=now + self.lease_s"),
    # A lease is renewed from a write's completion, not from when it was posted.
    ("transfer", "transfer/outgoing.py",
     "self.deadline = max(self.deadline, post.posted_at + self.grant.lease_s)",
     "self.deadline = max(self.deadline, now + self.grant.lease_s)"),
    # Shared pages stay used for ever where there is no room for the others.
    ("cache", "cache/manager.py",
     "            self._unuse(held)\n            raise", "            raise"),
    # Arrivals do not renew the lease of what they belong to.
    ("decode_node", "decode_node/node.py",
     ("        stream.deadline = self._clock() + self._grants.lease_s\n"
      "        if arrival.error is not None:"),
     "        if arrival.error is not None:"),
    # A request that was cancelled after it was paired keeps its credit.
    ("router/dispatch", "router/dispatch/queue.py",
     "            self._return_credit(waiter)\n            self.wake()", "            self.wake()"),
    # Draining nodes take new requests.
    ("router/dispatch", "router/dispatch/routed_node.py",
     "return self.lost_because is None and not self.draining", "return self.lost_because is None"),
    # A stream that outgrows its promise does not show.
    ("router/dispatch", "router/dispatch/ledger.py", "if num_tokens > promised:", "if False:"),
    # A page expires one token late.
    ("cache", "cache/spec.py",
     "return self.retention.expires_at((logical_page + 1) * self.tokens_per_page - 1)",
     "return self.retention.expires_at((logical_page + 1) * self.tokens_per_page)"),
    # Nodes that failed a request get it again.
    ("router/dispatch", "router/dispatch/reservation.py",
     "ticket.avoid = {node.node_id for node in pair.nodes}", "ticket.avoid = set()"),
    # A preemption counts against the node.
    ("router/dispatch", "router/dispatch/routed_node.py",
     "except (Refused, Preempted, ChoiceFailed, NodeLost):",
     "except (Refused, ChoiceFailed, NodeLost):"),
    # The budget of prompt tokens is never used up.
    ("decode_node", "decode_node/planner.py", "budget -= chunk.num_tokens", "pass"),
    # A request that its first token has finished is sent all the same.
    ("prefill_node", "prefill_node/node.py",
     "if job.error is None and (job.outcome is None or job.outcome.finish_reason is None):",
     "if job.error is None:"),
    # Failures are not counted.
    ("prefill_node", "prefill_node/node.py",
     "self.metrics.failed_requests.labels(type(error).__name__).inc()", "pass"),
    # min_p of 1 leaves no token.
    ("engine", "engine/sampler.py",
     "weights < _numbers([p.min_p for p in params], logits)[:, None]",
     "weights <= _numbers([p.min_p for p in params], logits)[:, None]"),
    # History that is used is given up as if it were not.
    ("cache", "cache/prefix_tree.py", "self._touch(units[-1] if units else None)", "pass"),
    # Spare resume points go last.
    ("cache", "cache/prefix_tree.py",
     "elif resumes := self._spares or self._resumes:",
     "elif resumes := self._resumes or self._spares:"),
    # A grant that can never be takes the whole cache with it.
    ("cache", "cache/manager.py",
     "if allocator.num_free + allocator.num_cached < num_pages:", "if False:"),
    # Scaling to the very limit is refused.
    ("deploy", "deploy/controller/controller.py",
     "if not limits.min_replicas <= replicas <= limits.max_replicas:",
     "if not limits.min_replicas <= replicas < limits.max_replicas:"),
)  # fmt: skip
