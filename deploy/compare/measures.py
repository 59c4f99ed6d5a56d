"""What one prompt costs a deployment: times and transfers by its metrics, cache bytes by its pools.

The router's counters are read before and after a request, so the figures are its own and not this
client's; that needs a deployment that nobody else uses meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from sluice.cache.spec import PoolSpec
from sluice.deploy.common.http_client import RouterClient
from sluice.deploy.compare.prompts import Prompt
from sluice.engine.runner import role_specs
from sluice.model.registry import declare_pools
from sluice.protocol.config import SluiceConfig
from sluice.protocol.messages import SluiceError

FIRST_TOKEN = "sluice:time_to_first_token_seconds"
PER_TOKEN = "sluice:time_per_output_token_seconds"
TRANSFER_BYTES = "sluice:transfer_bytes_total"
TRANSFER_DESCRIPTORS = "sluice:transfer_descriptors_total"


@dataclass(frozen=True)
class PoolCost:
    """One request's share of one pool. Cache: pages on the decode node when the answer is whole."""

    pool: str
    cache_pages: int
    cache_bytes: int
    transfer_bytes: int
    transfer_descriptors: int


@dataclass(frozen=True)
class Measure:
    """One prompt on one deployment."""

    num_prompt_tokens: int
    num_output_tokens: int
    text: str
    ttft_s: float
    tpot_s: float
    pools: tuple[PoolCost, ...]

    @property
    def cache_bytes(self) -> int:
        return sum(pool.cache_bytes for pool in self.pools)

    @property
    def transfer_bytes(self) -> int:
        return sum(pool.transfer_bytes for pool in self.pools)

    @property
    def transfer_descriptors(self) -> int:
        return sum(pool.transfer_descriptors for pool in self.pools)


def decode_specs(config: SluiceConfig) -> tuple[PoolSpec, ...]:
    """The pools of the model in the layout that the config gives decode nodes."""
    model = config.model
    return role_specs(declare_pools(model.path, model.cache_path, model.dtype), config.decode)


def measure(
    router: RouterClient, prompt: Prompt, *, max_tokens: int, specs: Sequence[PoolSpec]
) -> Measure:
    """Generate exactly `max_tokens` (2 or more) at temperature 0.

    Raises SluiceError if other requests ran at the same time.
    """
    before = _samples(router.metrics())
    answer = router.complete(prompt.content, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    spent = _samples(router.metrics())
    spent.subtract(before)
    for name in (FIRST_TOKEN, PER_TOKEN):
        if (count := spent[f"{name}_count", ""]) != 1:
            raise SluiceError(
                f"{router.url} counted {count:.0f} requests while we sent one; compare "
                "deployments that nobody else uses"
            )
    usage = answer["usage"]
    return Measure(
        num_prompt_tokens=usage["prompt_tokens"],
        num_output_tokens=usage["completion_tokens"],
        text=answer["choices"][0]["text"],
        ttft_s=spent[f"{FIRST_TOKEN}_sum", ""],
        tpot_s=spent[f"{PER_TOKEN}_sum", ""],
        pools=tuple(_cost(spec, usage["total_tokens"], spent) for spec in specs),
    )


def _cost(spec: PoolSpec, num_tokens: int, spent: Counter[tuple[str, str]]) -> PoolCost:
    num_pages = len(spec.pages(num_tokens, num_tokens))
    return PoolCost(
        pool=spec.name,
        cache_pages=num_pages,
        cache_bytes=num_pages * spec.page_bytes,
        transfer_bytes=int(spent[TRANSFER_BYTES, spec.name]),
        transfer_descriptors=int(spent[TRANSFER_DESCRIPTORS, spec.name]),
    )


def _samples(metrics: str) -> Counter[tuple[str, str]]:
    """Every sample by name and pool, over all nodes."""
    totals: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            totals[sample.name, sample.labels.get("pool", "")] += sample.value  # type: ignore[assignment]
    return totals
