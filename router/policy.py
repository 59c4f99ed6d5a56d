"""Policy: which prefill node and which decode node a request goes to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from sluice.engine.protocol import GenerateRequest
from sluice.router.nodes import RoutedDecode, RoutedNode, RoutedPrefill

Node = TypeVar("Node", RoutedPrefill, RoutedDecode)


class Pair(NamedTuple):
    prefill: RoutedPrefill
    decode: RoutedDecode


def round_robin(node: RoutedNode[Any]) -> tuple[float, ...]:
    """The one picked longest ago."""
    return (node.last_picked,)


def least_loaded(node: RoutedNode[Any]) -> tuple[float, ...]:
    """The emptiest by its scarcest resource; between equals, the one picked longest ago."""
    return (node.ledger.load, node.last_picked)


RANKS: dict[str, Callable[[RoutedNode[Any]], tuple[float, ...]]] = {
    "round_robin": round_robin,
    "least_loaded": least_loaded,
}


class Policy:
    """Picks by one rank for each role. Holds no nodes; takes no credit."""

    def __init__(self, prefill_policy: str, decode_policy: str) -> None:
        self._prefill_rank = RANKS[prefill_policy]
        self._decode_rank = RANKS[decode_policy]
        self._picks = itertools.count(1)

    def pick(
        self,
        request: GenerateRequest,
        prefill: Sequence[RoutedPrefill],
        decode: Sequence[RoutedDecode],
        avoid: Collection[str] = (),
    ) -> Pair | None:
        """A pair that can start the request now, or None.

        avoid: ids of nodes on which the request failed; they are taken only if no other node
        could ever hold it.
        """
        first = self._best(request, _preferred(request, prefill, avoid), self._prefill_rank)
        second = self._best(request, _preferred(request, decode, avoid), self._decode_rank)
        if first is None or second is None:
            return None
        first.last_picked = second.last_picked = next(self._picks)
        return Pair(first, second)

    @staticmethod
    def _best(
        request: GenerateRequest,
        nodes: Sequence[Node],
        rank: Callable[[RoutedNode[Any]], tuple[float, ...]],
    ) -> Node | None:
        return min((node for node in nodes if node.can_start(request)), key=rank, default=None)


def _preferred(
    request: GenerateRequest, nodes: Sequence[Node], avoid: Collection[str]
) -> Sequence[Node]:
    others = [node for node in nodes if node.node_id not in avoid and node.could_hold(request)]
    return others or nodes
