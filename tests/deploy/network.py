"""Several hosts on one machine: network namespaces on a hub that can be slow, lossy and unplugged.

    host a  eth0 ──┐
    host b  eth0 ──┼── Hub
    host c  eth0 ──┘

The hub is a thread of this process that carries Ethernet frames between TAP devices: delay and
loss need no `tc`, whose netem many kernels lack, and begin and end where a test says. Needs root,
iproute2 and /dev/net/tun.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000  # few frames, for a hub that is made of Python
LOOK_EVERY_S = 0.1  # whether the hub has been closed


def why_unavailable():
    """What this machine lacks for such hosts; empty if nothing."""
    if shutil.which("ip") is None:
        return "no command `ip` (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        Host("try", "10.77.0.1").close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespace with a TAP device: {getattr(error, 'stderr', '') or error}"
    return ""


class Host:
    """A network namespace with one interface, and the processes in it."""

    def __init__(self, name, address):
        self.address = address
        self.unplugged = False  # its cable: frames from and to it vanish
        self._num_bytes = 0  # that it has given to its cable
        self._alarm = None  # (num_bytes, what to do then)
        self._namespace = f"sluice-{os.getpid()}-{name}"
        device = f"sl{os.getpid()}{name}"
        self.tap = _open_tap(device)  # first: without it there is nothing to clean up
        ip("netns", "add", self._namespace)
        ip("link", "set", device, "netns", self._namespace, "name", "eth0")
        self.ip("link", "set", "lo", "up")
        self.ip("link", "set", "eth0", "mtu", str(MTU), "up")
        self.ip("address", "add", f"{address}/24", "dev", "eth0")

    def ip(self, *arguments):
        return ip("-n", self._namespace, *arguments)

    def run(self, *command, env):
        """Run a command on the host to its end; returns its output."""
        command = ["ip", "netns", "exec", self._namespace, *map(str, command)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def threads(self, max_workers):
        """An executor whose sockets are on this host."""
        return ThreadPoolExecutor(max_workers, initializer=self._enter)

    def received_bytes(self):
        """Bytes that have come through the interface."""
        [link] = json.loads(self.ip("-json", "-statistics", "link", "show", "dev", "eth0"))
        return link["stats64"]["rx"]["bytes"]

    def after(self, num_bytes, act):
        """Call `act` on the hub's thread once the host has sent so many more bytes."""
        self._alarm = (self._num_bytes + num_bytes, act)

    def count(self, num_bytes):
        """The host has sent so many more bytes."""
        self._num_bytes += num_bytes
        if self._alarm and self._num_bytes >= self._alarm[0]:
            (_, act), self._alarm = self._alarm, None
            act()

    def signal(self, number):
        """Send a signal to every process; returns how many there were."""
        pids = ip("netns", "pids", self._namespace).split()
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(pids)

    def freeze(self):
        self.signal(signal.SIGSTOP)

    def thaw(self):
        self.signal(signal.SIGCONT)

    def close(self):
        """End every process, then the host."""
        while self.signal(signal.SIGKILL):
            time.sleep(LOOK_EVERY_S)
        ip("netns", "del", self._namespace)
        os.close(self.tap)

    def _enter(self):
        """Move the calling thread onto the host."""
        with Path("/run/netns", self._namespace).open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            moved = libc.setns(namespace.fileno(), CLONE_NEWNET)
            assert moved == 0, os.strerror(ctypes.get_errno())


class Hub:
    """Carries every frame to all other hosts. `delay_s` and `loss` may change at any time."""

    def __init__(self, *hosts):
        self.delay_s = 0.0  # each way
        self.loss = 0.0  # share of the frames that vanish
        self._hosts = {host.tap: host for host in hosts}
        self._random = random.Random(1)
        self._waiting = []  # heap of (due, number, host, frame)
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self):
        self._closed.set()
        self._thread.join()

    def _carry(self):
        while not self._closed.is_set():
            ready, _, _ = select.select(list(self._hosts), [], [], self._patience_s())
            for tap in ready:
                self._take(self._hosts[tap], os.read(tap, 65536))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(self._waiting)
                if not host.unplugged:
                    os.write(host.tap, frame)

    def _take(self, source, frame):
        source.count(len(frame))
        if source.unplugged or self._random.random() < self.loss:
            return
        due = time.monotonic() + self.delay_s
        for host in self._hosts.values():
            if host is not source:
                heapq.heappush(self._waiting, (due, next(self._numbers), host, frame))

    def _patience_s(self):
        if not self._waiting:
            return LOOK_EVERY_S
        return min(LOOK_EVERY_S, max(0.0, self._waiting[0][0] - time.monotonic()))


def _open_tap(device):
    """Make an interface; the descriptor returned is the other end of its cable."""
    tap = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def ip(*arguments):
    """Run `ip`; returns what it prints. Raises CalledProcessError."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout
