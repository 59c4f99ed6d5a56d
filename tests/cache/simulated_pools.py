"""Pools whose rows are hashes of the tokens they stand for, to check a manager without a model.

A row is right if it is the hash of exactly the tokens it was computed from, so a page that was
shared, copied, reused or freed wrongly shows at the next read.
"""

from __future__ import annotations

from sluice.cache.manager import CacheManager, PageCopy
from sluice.cache.prefix_tree import Hit
from sluice.cache.spec import Block, Full, PoolSpec, Window

SPECS = (
    PoolSpec("fine", (0, 1), (2,), "float32", 2, 16, Full()),
    PoolSpec("coarse", (0, 1), (2,), "float32", 8, 8, Full()),
    PoolSpec("window", (0, 1), (2,), "float32", 1, 4, Window(10)),
    PoolSpec("state", (1,), (2,), "float32", 1, 4, Block(2, overlap=1)),
    PoolSpec("sums", (1,), (2,), "float32", 8, 8, Block(8)),
)


NUM_LAYERS = 2
WRONG = 0  # the row of a token whose window was not there
# A row of the last layer saw the window of the layer below, and is needed for the last window.
REPLAY_TOKENS = (NUM_LAYERS - 1) * 9 + 9


class SimulatedPools:
    """Rows by (pool, page, offset), written and read through the page tables of a manager."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self._rows: dict[tuple[str, int, int], int] = {}

    def copy(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            for spec in self.manager.specs:
                if spec.table == copy.table:
                    for offset in range(spec.rows_per_page):
                        row = self._rows.get((spec.name, copy.source, offset), 0)
                        self._rows[spec.name, copy.target, offset] = row

    def compute(
        self, holder: str, tokens: list[int], start: int, end: int, hit: Hit | None = None
    ) -> None:
        """Write what computing tokens [start, end) writes, beginning with a hit."""
        hit = hit or Hit()
        replayed = hit.history_tokens > hit.num_tokens
        right_from = hit.num_tokens + (NUM_LAYERS - 1) * 9 if replayed else 0
        for spec in self.manager.specs:
            first = max(start, hit.history_tokens) if spec.table.keeps_all else start
            for token in range(first, end):
                if _writes(spec, token):
                    row = _hash(tokens[: token + 1]) if token >= right_from else WRONG
                    self._rows[self._place(spec, holder, token)] = row

    def receive(self, holder: str, tokens: list[int], skip_tokens: int) -> None:
        """Write what a transfer of a computed prompt writes."""
        for spec in self.manager.specs:
            first = skip_tokens // spec.tokens_per_row if spec.table.keeps_all else 0
            for row in spec.live_rows(len(tokens)):
                if row >= first:
                    place = self._place(spec, holder, row * spec.tokens_per_row)
                    self._rows[place] = _expected(spec, tokens, row)

    def check_live(self, holder: str, tokens: list[int]) -> None:
        """Assert that every row live at `tokens` is there and right."""
        for spec in self.manager.specs:
            for row in spec.live_rows(len(tokens)):
                found = self._rows.get(self._place(spec, holder, row * spec.tokens_per_row))
                assert found == _expected(spec, tokens, row), (
                    f"pool {spec.name}: row {row} of {holder} is wrong at {len(tokens)} tokens"
                )

    def _place(self, spec: PoolSpec, holder: str, token: int) -> tuple[str, int, int]:
        page = self.manager.page_tables(holder)[spec.table].page(token // spec.tokens_per_page)
        return spec.name, page, token % spec.tokens_per_page // spec.tokens_per_row


def _writes(spec: PoolSpec, token: int) -> bool:
    """Whether computing this token writes the row it belongs to."""
    return not spec.table.keeps_all or (token + 1) % spec.tokens_per_row == 0


def _expected(spec: PoolSpec, tokens: list[int], row: int) -> int:
    """What the row is computed from: all tokens up to its end, or so far."""
    return _hash(tokens[: (row + 1) * spec.tokens_per_row])


def _hash(tokens: list[int]) -> int:
    return hash(tuple(tokens))
