"""What crossed between the nodes, as the router's metrics tell it."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

COLUMNS = {"pages": "pages_total", "bytes": "bytes_total", "descriptors": "descriptors_total"}


def traffic_table(metrics: str) -> Table:
    """Pages, bytes and descriptors of each pool that prefill wrote into decode, and the time.

    All pools of a chunk go as one transfer, so the time belongs to the transfer, not to a pool.
    """
    counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    seconds = transfers = 0.0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            name = sample.name.removeprefix("sluice:transfer_")
            if name in COLUMNS.values():
                counts[sample.labels["pool"]][name] += sample.value
            elif name == "seconds_sum":
                seconds += sample.value
            elif name == "seconds_count":
                transfers += sample.value
    mean_ms = 1000 * seconds / max(1, transfers)
    table = Table(
        title="What crossed from prefill-0 to decode-0",
        caption=f"{transfers:.0f} transfers, one for each chunk of a prompt; mean {mean_ms:.1f} ms",
    )
    table.add_column("pool")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name, pool in sorted(counts.items()):
        table.add_row(name, *(f"{pool[key]:,.0f}" for key in COLUMNS.values()))
    totals = [sum(pool[key] for pool in counts.values()) for key in COLUMNS.values()]
    table.add_section()
    table.add_row("all", *(f"{total:,.0f}" for total in totals))
    return table
