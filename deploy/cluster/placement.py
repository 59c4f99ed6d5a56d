"""Where processes go: on hosts that offer a role's resource, or wherever CPUs and GPUs are free.

A host of the cluster takes part in placement by role when it is started with one of the custom
resources `prefill`, `decode` or `router`, for example `ray start --resources '{"prefill": 2}'`.
The number says how many processes of the role the host takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.protocol.config import RoleConfig, SluiceConfig
from sluice.protocol.messages import ConfigError, Role

ROUTER = "router"
MAX_CALLS = 8192  # calls that run at once in one actor: far above any queue limit


@dataclass(frozen=True)
class HostResources:
    """What a host of the cluster offers, in Ray's names, and what of it is free."""

    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def lacks(self, demand: Mapping[str, float]) -> list[str]:
        """What is short of the demand, as `0 of 2 CPU free`."""
        return [
            f"{self.free.get(name, 0):g} of {self.total.get(name, 0):g} {name} free"
            for name, wanted in demand.items()
            if self.free.get(name, 0) < wanted
        ]


def node_options(role: Role, config: RoleConfig, cluster: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for an actor that runs a node. `cluster`: the cluster's total resources."""
    return {
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "resources": _role_resource(role, cluster),
        "max_concurrency": MAX_CALLS,
    }


def router_options(cluster: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for the router's actor."""
    return {
        "num_cpus": 1,
        "resources": _role_resource(ROUTER, cluster),
        "max_concurrency": MAX_CALLS,
    }


def demand_of(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that a process with these options needs of its host."""
    wanted = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options["resources"]}
    return {name: float(count) for name, count in wanted.items() if count}


def what_is_missing(role: str, demand: Mapping[str, float], hosts: Sequence[HostResources]) -> str:
    """Why no host has a place for the process, and the way out; empty if one has.

    Only hosts that offer the custom resources of the demand are named, if there are any.
    """
    lacking = {host.address: host.lacks(demand) for host in hosts}
    if not all(lacking.values()):
        return ""  # somebody has just left
    marks = [name for name in demand if name not in ("CPU", "GPU")]
    offering = [h.address for h in hosts if all(h.total.get(name, 0) for name in marks)]
    needs = " and ".join(f"{count:g} {name}" for name, count in demand.items())
    found = "; ".join(f"{host} has {', '.join(lacking[host])}" for host in offering or lacking)
    settings = [f"{role}.num_cpus", *([f"{role}.num_gpus"] if "GPU" in demand else [])]
    lower = "" if role == ROUTER else f", lower {' or '.join(settings)} in the config"
    offer = "".join(f" --resources '{{\"{name}\": N}}'" for name in marks)
    return (
        f"no host has room for it: it needs {needs}; {found or 'there is no host'}. Scale a role "
        f"down{lower}, or start Ray on a host with more: ray start --num-cpus N{offer} (Ray counts "
        "CPUs and does not bind them: N may be more than the host has)"
    )


def unplaced_roles(cluster: Mapping[str, float]) -> list[str]:
    """Roles that no host of the cluster offers a resource for."""
    return [role for role in (*Role, ROUTER) if role not in cluster]


def embedded_cpus(config: SluiceConfig, host_cpus: int) -> int:
    """Logical CPUs of a Ray of our own: enough for every node that scaling allows.

    On one machine the operating system shares the cores; Ray's count only must not be what keeps
    a node from starting.
    """
    roles = (config.prefill, config.decode)
    return (
        host_cpus
        + config.router.replicas
        + sum(role.max_replicas * role.num_cpus for role in roles)
    )


def check_gpus(config: SluiceConfig, cluster: Mapping[str, float]) -> None:
    """Raise ConfigError if the nodes to start with need more GPUs than there are."""
    roles = {Role.PREFILL: config.prefill, Role.DECODE: config.decode}
    needed = sum(role.replicas * role.num_gpus for role in roles.values())
    found = int(cluster.get("GPU", 0))
    if needed > found:
        parts = ", ".join(f"{n}: {r.replicas} x {r.num_gpus}" for n, r in roles.items())
        raise ConfigError(
            f"the nodes need {needed} GPU(s) ({parts}), this machine has {found}; "
            "lower replicas or num_gpus, or set device: cpu and num_gpus: 0"
        )


def _role_resource(role: str, cluster: Mapping[str, float]) -> dict[str, float]:
    return {str(role): 1.0} if role in cluster else {}
