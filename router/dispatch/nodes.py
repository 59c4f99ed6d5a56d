"""Nodes: the views of all nodes the cluster has named, kept in step with it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from sluice.protocol.messages import DecodeClient, PrefillClient
from sluice.router.common.background import Background
from sluice.router.dispatch.routed_node import RoutedDecode, RoutedNode, RoutedPrefill


class MaxTokens(NamedTuple):
    """Longest request that any ready node of a role can ever hold; 0 without a ready node."""

    prefill: int
    decode: int


class Nodes:
    """Views by node id; a new incarnation of a node is a new view. The rest: see RoutedNode.

    on_change: called when a request that waits may have a node that it had not, or none any more.
    """

    def __init__(
        self,
        *,
        router_id: str,
        lease_s: float,
        shared: bool,
        background: Background,
        on_change: Callable[[], None],
    ) -> None:
        self._on_change = on_change
        self._common: dict[str, Any] = {
            "router_id": router_id,
            "lease_s": lease_s,
            "shared": shared,
            "background": background,
            "on_change": self._changed,
            "on_credit": on_change,
        }
        self._prefill: dict[str, RoutedPrefill] = {}
        self._decode: dict[str, RoutedDecode] = {}
        self._max_tokens: MaxTokens | None = None  # not known since nodes came or went

    def __iter__(self) -> Iterator[RoutedNode[Any]]:
        return itertools.chain(self._prefill.values(), self._decode.values())

    @property
    def prefill(self) -> list[RoutedPrefill]:
        return list(self._prefill.values())

    @property
    def decode(self) -> list[RoutedDecode]:
        return list(self._decode.values())

    def find(self, node_id: str) -> RoutedNode[Any] | None:
        return self._prefill.get(node_id) or self._decode.get(node_id)

    @property
    def max_tokens(self) -> MaxTokens:
        """The same object until nodes come or go."""
        if self._max_tokens is None:
            self._max_tokens = MaxTokens(
                max((node.max_tokens for node in self._prefill.values()), default=0),
                max((node.max_tokens for node in self._decode.values()), default=0),
            )
        return self._max_tokens

    @property
    def key_units(self) -> set[tuple[str, int]]:
        """Identities and units of tokens by which nodes know prefixes."""
        return {node.cached.key_unit for node in self}

    def update(
        self,
        prefill: Sequence[PrefillClient],
        decode: Sequence[DecodeClient],
        draining: Collection[str],
    ) -> None:
        """Make the views match the cluster; requests on a node that left fail over at once."""
        self._close_departed(self._prefill, prefill)
        self._close_departed(self._decode, decode)
        for prefill_client in prefill:
            if prefill_client.info.node_id not in self._prefill:
                view = RoutedPrefill(prefill_client, **self._common)
                self._prefill[view.node_id] = view
        for decode_client in decode:
            if decode_client.info.node_id not in self._decode:
                decode_view = RoutedDecode(decode_client, **self._common)
                self._decode[decode_view.node_id] = decode_view
        for node in self:
            node.draining = node.node_id in draining
        self._changed()

    async def refresh(self, limit_s: float) -> None:
        """Ask every live node for its gauges."""
        live = [node.refresh(limit_s) for node in self if node.lost_because is None]
        await asyncio.gather(*live)

    def close(self, reason: str) -> None:
        for node in self:
            node.close(reason)

    def _changed(self) -> None:
        self._max_tokens = None
        self._on_change()

    @staticmethod
    def _close_departed(
        views: dict[str, Any], clients: Sequence[PrefillClient] | Sequence[DecodeClient]
    ) -> None:
        named = {(client.info.node_id, client.info.incarnation) for client in clients}
        for node_id, view in list(views.items()):
            if (node_id, view.info.incarnation) not in named:
                del views[node_id]
                view.close("it left the cluster")
