"""Which actors Ray has no place for, by what Ray itself says: no public call of it tells."""

from __future__ import annotations

from collections.abc import Mapping

from ray._private import state
from ray._private.worker import global_worker
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.core.generated.autoscaler_pb2 import NodeStatus

from sluice.deploy.cluster.placement import HostResources, what_is_missing


def why_unplaced(role: str, actor_id: str, demand: Mapping[str, float]) -> str:
    """What is missing for the actor, where, and the way out; empty unless Ray waits for a place.

    A process that has its place is not there at once: it is not in Ray's list of what is pending.
    Blocks for a round trip or two.
    """
    if state.actors(actor_id).get("Pid"):
        return ""
    cluster = get_cluster_resource_state(global_worker.gcs_client)
    pending = [each.request.resources_bundle for each in cluster.pending_resource_requests]
    if dict(demand) not in map(dict, pending):
        return ""
    hosts = [
        HostResources(
            host.node_ip_address, dict(host.total_resources), dict(host.available_resources)
        )
        for host in cluster.node_states
        if host.status != NodeStatus.DEAD
    ]
    return what_is_missing(role, demand, hosts)
