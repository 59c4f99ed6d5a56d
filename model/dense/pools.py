"""The one cache pool of a dense model, and its only name: `kv`, key and value of every token."""

from __future__ import annotations

from sluice.cache.spec import Full, PoolSpec
from sluice.model.dense.config import DenseConfig

KV = "kv"
PAGE_TOKENS = 64  # as large as the window pages of hybrid models: 64 rows a copy


def declare_dense(config: DenseConfig, *, dtype: str = "float32") -> tuple[PoolSpec, ...]:
    """A row is [2, num_kv_heads, head_dim]: a token's rotated keys, then its values."""
    row_shape = (2, config.num_kv_heads, config.head_dim)
    layers = tuple(range(config.num_layers))
    return (
        PoolSpec(
            KV, layers, row_shape, dtype, 1, PAGE_TOKENS, Full(), choices=("float32", "bfloat16")
        ),
    )
