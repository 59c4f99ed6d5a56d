"""Both sides over TCP in a network namespace of their own, whose link goes down and comes back.

Run as a script under `unshare -n`; prints as JSON what became of the requests before, while
and after the link was down, and the longest call of the sender meanwhile.
"""

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path

from sluice.protocol.messages import Role, TransferFailed
from sluice.transfer.nixl_transport import NixlTransport

sys.path.insert(0, str(Path(__file__).parent))
import conftest as toy

LEASE_S = 3.0
DOWN_S = 5.0


def over_tcp(name):
    name, settings = f"{name}.{uuid.uuid4().hex[:8]}", {"engine_config": "TLS=tcp"}
    return NixlTransport(name, "UCX", settings, max_silence_s=LEASE_S)


def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


class Pair:
    """A sender and a receiver, and how long the sender's calls took at most."""

    def __init__(self, mode):
        self.source = toy.Side(Role.PREFILL, toy.SPECS, over_tcp("p"), 1, mode=mode)
        self.target = toy.Side(Role.DECODE, toy.SPECS, over_tcp("d"), 2)
        self.source.end.connect(self.source.info, self.target.info)
        self.number, self.longest_s = 0, 0.0

    def request(self, patience_s):
        """What becomes of one: its first token, or why it failed."""
        self.number += 1
        grant = self.target.grant(20, f"g{self.number}", self.number, lease_s=LEASE_S)
        self.target.end.expect(grant)
        until = time.monotonic() + patience_s
        try:
            self.timed(lambda: toy.deliver(self.source, grant, [20], token=42))
            while time.monotonic() < until:
                for item in (*self.timed(self.source.end.poll), *self.target.end.poll()):
                    if item.grant_id == grant.grant_id:
                        if item.error is not None:
                            return str(item.error)
                        if getattr(item, "first_token", None) is not None:
                            return item.first_token
        except TransferFailed as error:
            return str(error)
        return f"nothing within {patience_s} s"

    def timed(self, call):
        started = time.monotonic()
        try:
            return call()
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - started)


def main(mode):
    link("up")
    pair = Pair(mode)
    before = [pair.request(10) for _ in range(2)]
    link("down")
    meanwhile, up_at = [], time.monotonic() + DOWN_S
    while time.monotonic() < up_at:
        meanwhile.append(pair.request(up_at - time.monotonic()))
    link("up")
    after = [pair.request(10) for _ in range(3)]
    outcome = [before, meanwhile[:5], after, pair.longest_s]
    print(f"\nresult: {json.dumps(outcome)}", flush=True)
    pair.source.end.close()
    pair.target.end.close()


if __name__ == "__main__":
    main(sys.argv[1])
