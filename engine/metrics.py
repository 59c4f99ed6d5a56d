"""A node's own metrics, collected as plain data for the router to export.

Labels `node` and `role` are added by the router. One registry for each node, so that several
nodes can live in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sluice.cache.spec import PoolSpec
from sluice.protocol.messages import MetricFamily

STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class NodeMetrics:
    """Counters, gauges and histograms of one node."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.step_seconds = Histogram(
            "sluice:step_seconds",
            "Seconds that one step of the node's loop computed.",
            registry=registry,
            buckets=STEP_BUCKETS_S,
        )
        self.computed_tokens = Counter(
            "sluice:computed_tokens",
            "Tokens computed by the model, by kind of work (prefill or decode).",
            ["kind"],
            registry=registry,
        )
        self.grants = Gauge(
            "sluice:grants",
            "Grants by state: pending (pages not all here), running, held (waiting out a lease).",
            ["state"],
            registry=registry,
        )
        self.transfer_pages = Counter(
            "sluice:transfer_pages",
            "Pages of which rows were written to decode nodes.",
            ["pool"],
            registry=registry,
        )
        self.transfer_bytes = Counter(
            "sluice:transfer_bytes",
            "Bytes written to decode nodes.",
            ["pool"],
            registry=registry,
        )
        self.transfer_descriptors = Counter(
            "sluice:transfer_descriptors",
            "Contiguous runs of bytes posted to the transport.",
            ["pool"],
            registry=registry,
        )
        self.migrated_bytes = Counter(
            "sluice:pool_migrated_bytes",
            "Bytes of each pool that left (out) or arrived at (in) the node.",
            ["pool", "direction"],
            registry=registry,
        )
        self.transfer_seconds = Histogram(
            "sluice:transfer_seconds",
            "Seconds from posting one chunk's pages to their completion.",
            registry=registry,
            buckets=STEP_BUCKETS_S,
        )
        self.failed_requests = Counter(
            "sluice:node_request_failures",
            "Requests that failed on the node, by reason.",
            ["reason"],
            registry=registry,
        )
        self.cache_queries = Counter(
            "sluice:prefix_cache_queries",
            "Prompt tokens looked up in the node's prefix cache.",
            registry=registry,
        )
        self.cache_hits = Counter(
            "sluice:prefix_cache_hits",
            "Prompt tokens found there: not computed (prefill), not sent again (decode).",
            registry=registry,
        )
        self.reused_rows = Counter(
            "sluice:pool_reused_rows",
            "Rows of each pool that requests took from the prefix cache.",
            ["pool"],
            registry=registry,
        )
        self.dropped_notifications = Counter(
            "sluice:notifications_dropped",
            "Transfer notifications that a decode node ignored, by reason.",
            ["reason"],
            registry=registry,
        )

    def count_sent(self, pool: str, *, pages: int, num_bytes: int, descriptors: int) -> None:
        """Add what one transfer moved of a pool out of this node."""
        self.transfer_pages.labels(pool).inc(pages)
        self.transfer_bytes.labels(pool).inc(num_bytes)
        self.transfer_descriptors.labels(pool).inc(descriptors)
        self.migrated_bytes.labels(pool, "out").inc(num_bytes)

    def count_lookup(self, pools: Iterable[PoolSpec], num_tokens: int, hit_tokens: int) -> None:
        """Add one prompt of `num_tokens`; the first `hit_tokens` were in the cache of `pools`."""
        self.cache_queries.inc(num_tokens)
        self.cache_hits.inc(hit_tokens)
        for pool in pools:
            self.reused_rows.labels(pool.name).inc(len(pool.live_rows(hit_tokens)))

    def show_dropped(self, totals: Mapping[str, int]) -> None:
        """Show the receiver's own totals, by reason."""
        self.dropped_notifications.clear()
        for reason, total in totals.items():
            self.dropped_notifications.labels(reason).inc(total)

    def families(self) -> tuple[MetricFamily, ...]:
        """Everything collected so far, without prometheus' own types."""
        return tuple(
            MetricFamily(
                name=family.name,
                kind=family.type,
                help=family.documentation,
                samples=tuple((s.name, s.labels, s.value) for s in family.samples),
            )
            for family in self.registry.collect()
        )
