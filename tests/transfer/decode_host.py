"""A decode side of its own process: does what the test tells it through a connection.

Run as a script: address and key of the connection come on stdin, the first message is the specs.
"""

import ast
import sys
from multiprocessing.connection import Client

import torch

from sluice.cache.pools import allocate_pools
from sluice.cache.spec import tables_of
from sluice.protocol.messages import NodeInfo, Role
from sluice.transfer.nixl_transport import NixlTransport
from sluice.transfer.receiver import Receiver


def open_receiver(name, specs, num_pages):
    """Zeroed pools, their receiver over NIXL, and the node's info."""
    counts = dict.fromkeys(tables_of(specs), num_pages)
    pools = allocate_pools(specs, counts)
    transport = NixlTransport(name, "UCX", {})
    receiver = Receiver(transport, pools)
    info = NodeInfo(
        node_id="decode",
        incarnation=name,
        role=Role.DECODE,
        host="here",
        fingerprint="toy",
        specs=specs,
        max_model_len=1000,
        max_running_requests=4,
        max_batch_tokens=64,
        num_pages=counts,
        agent=transport.address(),
    )
    return pools, receiver, info


def raw(pool):
    """The pool's bytes as an array with the tensor's shape, last dimension in bytes."""
    return pool.tensor.view(torch.uint8).numpy().copy()


def main():
    torch.set_num_threads(1)
    address, key = ast.literal_eval(sys.stdin.readline())
    with Client(address, authkey=key) as connection:
        pools, receiver, info = open_receiver(*connection.recv())
        connection.send(info)
        while True:
            # Polling also moves UCX forward, so it never waits for the test for long.
            for arrival in receiver.poll():
                if arrival.first_token is not None or arrival.error:
                    connection.send((arrival, {name: raw(pool) for name, pool in pools.items()}))
            if connection.poll(0.001):
                receiver.expect(connection.recv())
                connection.send("expected")


if __name__ == "__main__":
    main()
