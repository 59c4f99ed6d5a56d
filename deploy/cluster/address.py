"""Whether a Ray cluster answers at an address: Ray itself would try for minutes, in silence."""

from __future__ import annotations

import os
import re
import socket

from sluice.protocol.messages import ConfigError

ANSWER_S = 5.0
ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
AUTO = "auto"  # Ray looks for a cluster of this host

# The first words of HTTP/2, which gRPC speaks: the client's preface with empty settings, and the
# place in the server's first frame that says "settings".
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
FRAME_BYTES, KIND, SETTINGS = 9, 3, 4


def check_address(address: str) -> None:
    """Raises ConfigError, within seconds, unless something there may be a cluster's head."""
    if address == AUTO:
        return
    parts = ADDRESS.fullmatch(address)
    if parts is None or int(parts["port"]) > 65535:
        raise ConfigError(
            f"ray.address is {address!r}, expected HOST:PORT of a cluster's head, such as "
            "10.0.0.1:6379, or auto; leave it out for a Ray of our own on this machine"
        )
    try:
        _say_hello(parts["host"].strip("[]"), int(parts["port"]))
    except (OSError, UnicodeError) as error:  # the latter: a name that cannot be one
        raise ConfigError(
            f"ray.address {address!r}: no Ray cluster answers there ({error}); start one with "
            "`ray start --head --port PORT`, open the port, or leave ray.address out for a Ray of "
            "our own on this machine"
        ) from error


def _say_hello(host: str, port: int) -> None:
    with socket.create_connection((host, port), ANSWER_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") in ("1", "true", "True"):
            return  # then Ray's own words are hidden from us
        connection.sendall(HELLO)
        answer = b""
        while len(answer) < FRAME_BYTES:
            if not (more := connection.recv(FRAME_BYTES - len(answer))):
                raise OSError("it hung up")
            answer += more
    if answer[KIND] != SETTINGS:
        raise OSError("what listens there does not speak gRPC")
