"""Metrics: the router's own, and those of all nodes under one roof.

Names follow vLLM where it has them. Nodes send their numbers as plain data; here they get the
labels `node` and `role`. So do routers where there are several, with the label `router`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from sluice.protocol.messages import MetricFamily, RouterStatus
from sluice.router.dispatch.routed_node import RoutedNode
from sluice.router.recent import Recent

FIRST_TOKEN_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
PER_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0),
)
REQUEST_BUCKETS_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)


class RouterMetrics:
    """One registry for each router, so that several can live in one process."""

    def __init__(
        self,
        nodes: Callable[[], Iterable[RoutedNode[Any]]],
        num_waiting: Callable[[], int],
        num_running: Callable[[], int],
    ) -> None:
        self._nodes = nodes
        self._num_waiting = num_waiting
        self._num_running = num_running
        self.recent = Recent()
        self._registry = registry = CollectorRegistry()
        self.first_token_s = Histogram(
            "sluice:time_to_first_token_seconds",
            "Seconds from a request's arrival to its first output token.",
            buckets=FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.per_token_s = Histogram(
            "sluice:time_per_output_token_seconds",
            "Mean seconds per output token after the first, one value for each request.",
            buckets=PER_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.request_s = Histogram(
            "sluice:e2e_request_latency_seconds",
            "Seconds from a request's arrival to its last output token.",
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "sluice:prompt_tokens",
            "Prompt tokens of requests that got a first token.",
            registry=registry,
        )
        self.generation_tokens = Counter(
            "sluice:generation_tokens", "Output tokens handed to clients.", registry=registry
        )
        self.successes = Counter(
            "sluice:request_success",
            "Requests that ended as they should.",
            ["finished_reason"],
            registry=registry,
        )
        self.failures = Counter(
            "sluice:request_failure",
            "Requests that ended with an error, or because the client left (cancelled).",
            ["code"],
            registry=registry,
        )
        self.retries = Counter(
            "sluice:retries",
            "Attempts that failed on one pair of nodes and were repeated on another.",
            ["reason"],
            registry=registry,
        )
        self.canary_requests = Counter(
            "sluice:canary_requests",
            "Requests of the canary's share, by result: compared with ours (agreed, disagreed), "
            "answered to the client, failed on the canary, or not tried there (skipped).",
            ["result"],
            registry=registry,
        )

    def render(self, routers: Sequence[RouterStatus] = ()) -> bytes:
        """All metrics in Prometheus' text format.

        routers: all of them where there are several, told apart by the label `router`.
        """
        return generate_latest(_Merged(self._all_metrics(routers)))  # type: ignore[arg-type]

    def families(self) -> tuple[MetricFamily, ...]:
        """This router's own metrics as plain data."""
        return tuple(
            MetricFamily(
                metric.name,
                metric.type,
                metric.documentation,
                tuple((sample.name, sample.labels, sample.value) for sample in metric.samples),
            )
            for metric in self._own_metrics()
        )

    def _all_metrics(self, routers: Sequence[RouterStatus]) -> Iterator[Metric]:
        nodes = list(self._nodes())
        if not routers:
            yield from self._own_metrics()
        for router in routers:
            yield from _labelled(router.metrics, {"router": router.router_id})
        yield from _request_gauges(
            [
                (node.node_id, node.info.role.value, node.status.running, node.status.waiting)
                for node in nodes
                if node.status is not None
            ]
        )
        yield _pool_gauge(nodes)
        for node in nodes:
            if node.status is not None:
                own = {"node": node.node_id, "role": node.info.role.value}
                yield from _labelled(node.metrics, own)

    def _own_metrics(self) -> Iterator[Metric]:
        yield from self._registry.collect()
        yield from _request_gauges([("router", "router", self._num_running(), self._num_waiting())])


class _Merged:
    """Metrics of one name in one family, as the text format demands; no `_created` times."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for metric in metrics:
            family = self._families.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            family.samples += [s for s in metric.samples if not s.name.endswith("_created")]

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def _pool_gauge(nodes: list[RoutedNode[Any]]) -> Metric:
    gauge = GaugeMetricFamily(
        "sluice:pool_pages",
        "Pages of a pool that are free, used by requests, or cached for reuse.",
        labels=["node", "role", "pool", "state"],
    )
    for node in nodes:
        pools = node.status.pools if node.status is not None else {}
        for pool, pages in pools.items():
            for state, count in pages.items():
                gauge.add_metric([node.node_id, node.info.role.value, pool, state], count)
    return gauge


def _request_gauges(entries: Sequence[tuple[str, str, int, int]]) -> Iterator[Metric]:
    """entries: node, role, requests that run, requests that wait."""
    running = GaugeMetricFamily(
        "sluice:num_requests_running",
        "Requests in progress on a node; on the router, requests not yet answered.",
        labels=["node", "role"],
    )
    waiting = GaugeMetricFamily(
        "sluice:num_requests_waiting",
        "Requests that wait inside a node; on the router, those in its queue.",
        labels=["node", "role"],
    )
    for node, role, num_running, num_waiting in entries:
        running.add_metric([node, role], num_running)
        waiting.add_metric([node, role], num_waiting)
    yield running
    yield waiting


def _labelled(families: Iterable[MetricFamily], own: Mapping[str, str]) -> Iterator[Metric]:
    """What another process has told, with the labels that tell whose it is."""
    for family in families:
        metric = Metric(family.name, family.help, family.kind)
        for name, labels, value in family.samples:
            metric.add_sample(name, {**labels, **own}, value)
        yield metric
