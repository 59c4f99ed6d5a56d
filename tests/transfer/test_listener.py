"""What a stranger sends to a node's UCX port: none of it reaches our code, or fails in it.

UCX itself ends the process at some packets (docs/security.md), which nobody but UCX can mend; that
is why the port is on loopback, or on the one interface that was chosen.
"""

import contextlib
import random
import socket
import subprocess
import sys
from pathlib import Path

HOST = Path(__file__).with_name("listener_host.py")
NUM_CONNECTIONS = 100
MAGIC = b"\x00\x00\x00\x00\xca\xfe\xba\xbe"


class Listener:
    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(HOST)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ports = [int(port) for port in self.process.stdout.readline().split()]

    def close(self):
        self.process.kill()
        return self.process.communicate()


def blob(rng, seen):
    """Noise, noise behind what UCX greeted us with, or a mutation of it."""
    noise = rng.randbytes(rng.choice([0, 1, 7, 8, 64, 1013, 9000]))
    kind = rng.randrange(3)
    if kind == 0 or not seen:
        return noise
    if kind == 1:
        return seen + noise
    changed = bytearray(seen + noise)
    for _ in range(rng.randrange(1, 9)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def test_nothing_that_a_stranger_sends_reaches_our_code():
    seed = random.randrange(1 << 32)
    print(f"seed={seed}")
    rng, listener, deaths = random.Random(seed), Listener(), 0
    assert listener.ports, "UCX listens on no port, so nothing is tested"
    seen = b""
    for _ in range(NUM_CONNECTIONS):
        with (
            contextlib.suppress(OSError),  # it closes what it does not like
            socket.create_connection(("127.0.0.1", rng.choice(listener.ports)), 2) as stream,
        ):
            stream.sendall(blob(rng, seen or MAGIC))
            stream.settimeout(0.01)
            seen = stream.recv(64) or seen
        if listener.process.poll() is not None:
            deaths += 1
            out, err = listener.close()
            assert listener.process.returncode < 0, f"our code ended it: {err[-2000:]}"
            assert "Traceback" not in err and "notified" not in out, err[-2000:]
            listener = Listener()
    out, err = listener.close()
    print(f"UCX ended the process {deaths} times in {NUM_CONNECTIONS} connections")
    assert "notified" not in out and "Traceback" not in err, (out, err[-2000:])
