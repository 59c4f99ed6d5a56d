"""Which network interface a node's pages come in by: one, so that no other has a listener.

UCX would listen on all of them, and has no key: whoever reaches its port can end the node. So it is
told the interface that holds this host's address in Ray; for a Ray of our own, loopback. Through
shared memory pages go as before. On a cluster a host with RDMA devices keeps UCX's own choice, as
naming an interface would turn them off; `transfer.interface` names either kind.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from sluice.deploy.cluster.environment import LOOPBACK
from sluice.protocol.config import SluiceConfig, TransferConfig
from sluice.protocol.messages import ConfigError

log = logging.getLogger(__name__)

ENGINE_CONFIG, DEVICES, DEVICE_LIST = "engine_config", "NET_DEVICES", "device_list"
RDMA = Path("/sys/class/infiniband")


def bound(config: SluiceConfig, node_id: str, host: str) -> SluiceConfig:
    """The config with UCX bound to one interface of this host, whose address in Ray is `host`.

    What `transfer.backend_params` says of devices stays. Raises ConfigError.
    """
    transfer = config.transfer
    if transfer.backend != "UCX" or _says_devices(transfer):
        return config
    interface = transfer.interface or _own_interface(host)
    log.info("event=transfer_interface node=%s interface=%s", node_id, interface or "all")
    if interface is None:
        return config
    check_interface(interface)
    return config.model_copy(update={"transfer": _with_devices(transfer, interface)})


def _own_interface(host: str) -> str | None:
    """None: UCX shall choose."""
    is_choice = host != LOOPBACK and _rdma_devices()
    return None if is_choice else interface_of(host)


def check_interface(interface: str) -> None:
    """Raises ConfigError if this host has no interface or RDMA port of this name."""
    known = [*psutil.net_if_addrs(), *_rdma_devices()]
    if interface not in known:
        raise ConfigError(
            f"transfer.interface is {interface!r}, which this host ({socket.gethostname()}) does "
            f"not have; it has {', '.join(known)}"
        )


def interface_of(host: str) -> str:
    """The interface that holds this address. Raises ConfigError if none does."""
    addresses = set(_addresses(host))
    for name, held in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] in addresses for entry in held):
            return name
    raise ConfigError(
        f"no interface of this host has the address that Ray knows it by, {host}; set "
        f"transfer.interface to one of {', '.join(psutil.net_if_addrs())}"
    )


def _addresses(host: str) -> Iterator[str]:
    try:
        for *_, address in socket.getaddrinfo(host, None):
            yield str(address[0]).partition("%")[0]
    except OSError:  # a name that nobody knows has no address
        return


def _says_devices(transfer: TransferConfig) -> bool:
    params = transfer.backend_params
    setting = re.compile(rf"(^|,)\s*{DEVICES}=")
    return DEVICE_LIST in params or bool(setting.search(params.get(ENGINE_CONFIG, "")))


def _with_devices(transfer: TransferConfig, interface: str) -> TransferConfig:
    settings = [f"{DEVICES}={interface}", transfer.backend_params.get(ENGINE_CONFIG, "")]
    params = transfer.backend_params | {ENGINE_CONFIG: ",".join(filter(None, settings))}
    return transfer.model_copy(update={"backend_params": params})


def _rdma_devices() -> list[str]:
    """Ports as UCX names them, such as mlx5_0:1."""
    return sorted(f"{port.parents[1].name}:{port.name}" for port in RDMA.glob("*/ports/*"))
