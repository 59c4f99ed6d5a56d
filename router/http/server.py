"""The HTTP server around a RouterService, inside an event loop that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import Iterator

import uvicorn

from sluice.protocol.messages import ConfigError
from sluice.router.http.app import create_app
from sluice.router.http.connection import Connection, Connections
from sluice.router.service import STOP_LIMIT_S, RouterService

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that may wait to be accepted
# What Linux holds for a client that does not read: by itself up to 4 MB, hundreds of answers ahead.
SEND_BUFFER_BYTES = 32 << 10


class RunningServer:
    """A server that takes requests. `port` is the actual one."""

    def __init__(
        self,
        service: RouterService,
        server: _Server,
        task: asyncio.Task[None],
        host: str,
        port: int,
    ) -> None:
        self.host = host
        self.port = port
        self._service = service
        self._server = server
        self._task = task

    @property
    def url(self) -> str:
        return self.url_at(self.host)

    def url_at(self, host: str) -> str:
        """The URL under another name or address of this machine."""
        scheme = "http" if self._service.config.router.tls_cert_file is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Refuse new requests, let running ones finish for `limit_s`, then close the port."""
        await self._service.stop(limit_s)
        self._server.should_exit = True
        await self._task

    def stop_listening(self) -> None:
        """Take no more connections; those there are go on. Others at the port get what comes."""
        for server in self._server.servers:
            server.close()

    async def wait_closed(self) -> None:
        """Return when the server has ended."""
        await asyncio.shield(self._task)


async def serve(service: RouterService, host: str, port: int) -> RunningServer:
    """Bind, start the service, and return once requests are taken. Port 0: any free one.

    Raises ConfigError if the address, the certificate or the chat template cannot be used.
    """
    listener = bind(host, port, shared=service.config.router.replicas > 1)
    if not service.api_keys and not _is_loopback(host):
        logger.warning(
            "event=open_to_the_network host=%s: anybody who reaches it can use it; "
            "set router.api_keys_file, or router.host to 127.0.0.1",
            host,
        )
    try:
        server = _Server(_config(service))
        await service.readers.warm()
    except BaseException:
        listener.close()
        await service.readers.close()
        raise
    await service.start()
    task = asyncio.create_task(server.serve(sockets=[listener]))
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    if task.done():
        task.result()
        raise ConfigError(f"router.port {port}: the server ended before it took requests")
    return RunningServer(service, server, task, host, listener.getsockname()[1])


def _config(service: RouterService) -> uvicorn.Config:
    router = service.config.router
    config = uvicorn.Config(
        create_app(service),
        http=functools.partial(Connection, shared=Connections()),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here depends on a client's address
        lifespan="off",
        timeout_keep_alive=router.keep_alive_s,
        timeout_graceful_shutdown=5,  # by then the service has ended all requests
        ssl_certfile=router.tls_cert_file,
        ssl_keyfile=router.tls_key_file,
    )
    try:
        config.load()
    except OSError as error:  # ssl's own errors are some, too
        raise ConfigError(
            f"router.tls_cert_file {router.tls_cert_file}, router.tls_key_file "
            f"{router.tls_key_file}: {error.strerror or error}; expected a certificate and its "
            "key in PEM format"
        ) from error
    return config


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket. Raises ConfigError naming the address and the way out.

    shared: other processes may listen there too; Linux gives each connection to one of them.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            listener.bind(address)
            listener.listen(BACKLOG)  # now, as two sockets can be bound to a port nobody listens on
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"router.host {host}, router.port {port}: {error.strerror or error}; choose another "
            "router.port, or 0 for any free one, and a router.host of this machine"
        ) from error
    listener.setblocking(False)
    return listener


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Server(uvicorn.Server):
    """uvicorn without signal handlers, which belong to the process that embeds it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
