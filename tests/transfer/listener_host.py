"""A transport in a process of its own, whose port is told: python listener_host.py"""

import sys
import time

import psutil
import torch

from sluice.cache.pools import allocate_pools
from sluice.cache.spec import Full, PoolSpec
from sluice.transfer.nixl_transport import NixlTransport

SPEC = PoolSpec("all", (0,), (4,), "float32", 1, 8, Full())


def main():
    torch.set_num_threads(1)
    transport = NixlTransport("host", "UCX", {"engine_config": "TLS=tcp,NET_DEVICES=lo"})
    transport.register(allocate_pools((SPEC,), {SPEC.table: 4}))
    listening = [c.laddr.port for c in psutil.Process().net_connections() if c.status == "LISTEN"]
    print(*listening, flush=True)
    while not sys.stdin.closed:
        for sender, message in transport.notifications():
            print("notified", sender, message, flush=True)
        time.sleep(0.001)


if __name__ == "__main__":
    main()
