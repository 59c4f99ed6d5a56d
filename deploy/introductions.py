"""Introductions: every prefill node must know every decode node before requests use the pair."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from sluice.deploy.node_record import NodeRecord
from sluice.engine.protocol import NodeInfo, NodeLost, Role, SluiceError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0  # an introduction is one round trip; longer means a frozen process


async def introduce(node: NodeRecord, info: NodeInfo, others: Iterable[NodeRecord]) -> None:
    """Connect a started node with all ready nodes of the other role.

    Raises IncompatiblePeers if a pair has no mapping: the newcomer is at fault, pairs that work
    go on. A known node that does not answer is declared lost, and the newcomer goes on.
    """
    for other in others:
        if other.role is node.role or other.info is None or not other.counts:
            continue
        if node.role is Role.PREFILL:
            await _connect(node, other.info)
            continue
        try:
            await _connect(other, info)
        except NodeLost as error:
            other.declare_lost(str(error))


async def farewell(decode: NodeRecord, others: Iterable[NodeRecord]) -> None:
    """Let all prefill nodes forget a decode node that is gone."""
    for other in others:
        if other.role is Role.PREFILL and other.serving:
            try:
                await asyncio.wait_for(other.handle.disconnect(decode.node_id), CONNECT_TIMEOUT_S)
            except (SluiceError, TimeoutError) as error:  # its own watch sees whether it is gone
                log.warning(
                    "event=disconnect_failed node=%s peer=%s reason=%s",
                    other.node_id,
                    decode.node_id,
                    error,
                )


async def _connect(prefill: NodeRecord, decode: NodeInfo) -> None:
    try:
        await asyncio.wait_for(prefill.handle.connect(decode), CONNECT_TIMEOUT_S)
    except TimeoutError:
        raise NodeLost(
            f"{prefill.node_id} did not take up {decode.node_id} within {CONNECT_TIMEOUT_S:g} s"
        ) from None
