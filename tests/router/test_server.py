"""The real server on a real port, with the official client and with clients that vanish."""

from __future__ import annotations

import asyncio
import socket
import subprocess

import httpx
import openai
import pytest

from sluice.deploy.common.http_client import RouterClient
from sluice.protocol.messages import ConfigError, Unavailable
from sluice.router.http.server import bind, serve
from sluice.router.openai import streaming


@pytest.fixture
async def server(world):
    server = await serve(world.service, "127.0.0.1", 0)
    yield server
    await server.stop(limit_s=0)


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as it:
        yield it


async def test_the_official_client_chats(world, client):
    messages = [{"role": "user", "content": "the cat"}]
    whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=20)
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=20, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


async def test_the_official_client_completes_and_lists_models(world, client):
    answer = await client.completions.create(model="tiny", prompt="the cat", max_tokens=8)
    assert answer.choices[0].text == world.expected()
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_the_official_client_understands_our_errors(client):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="a")


async def test_an_error_mid_stream_raises_in_the_official_client(world, client):
    world.decodes["decode-0"].gate.clear()
    stream = await client.completions.create(model="tiny", prompt="a", max_tokens=9, stream=True)
    stopping = asyncio.create_task(world.service.stop(limit_s=0))
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    await stopping


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_closed_connection_frees_everything(world, server, streamed):
    world.decodes["decode-0"].gate.clear()
    body = {"model": "tiny", "prompt": "a", "max_tokens": 99, "stream": streamed}
    async with httpx.AsyncClient(base_url=server.url) as http:
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        await world.until(lambda: bool(world.decodes["decode-0"].generating))
        request.cancel()
        await asyncio.wait({request})
    await world.until(world.quiescent)


async def test_a_client_that_reads_slowly_holds_bounded_memory(world, server):
    reader, writer = await asyncio.open_connection(server.host, server.port)
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    assert (await world.complete()).status_code == 200  # nobody else is held up
    data = await reader.readuntil(b"data: [DONE]")
    assert data.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_client_that_never_reads_costs_one_full_buffer_and_is_then_given_up(
    world, server, monkeypatch
):
    monkeypatch.setattr(streaming, "SEND_LIMIT_S", 0.5)
    [listener] = server._server.servers[0].sockets
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((server.host, server.port))
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 250, "stream": true, "logprobs": 20}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    unsent_bytes = []

    def given_up() -> bool:
        connections = server._server.server_state.connections
        unsent_bytes.extend(c.transport.get_write_buffer_size() for c in connections)
        return "release" in world.decodes["decode-0"].calls

    await world.until(given_up)
    await world.until(world.quiescent)
    assert 64 << 10 <= max(unsent_bytes) < 80 << 10  # of some 300 kB; asyncio stops at 64 kB
    client.close()


async def test_a_taken_port_is_a_config_error_with_the_way_out(world, server):
    with pytest.raises(ConfigError, match=rf"router.port {server.port}.*or 0"):
        await serve(world.service, "127.0.0.1", server.port)
    with pytest.raises(ConfigError, match=r"router.host no\.such\.host\.invalid"):
        bind("no.such.host.invalid", 0)


async def test_stopping_closes_the_port_after_running_streams(world):
    server = await serve(world.service, "127.0.0.1", 0)
    world.decodes["decode-0"].gate.clear()
    async with httpx.AsyncClient(base_url=server.url) as http:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 8}
        running = asyncio.create_task(http.post("/v1/completions", json=body))
        await world.until(lambda: bool(world.decodes["decode-0"].generating))
        stopping = asyncio.create_task(server.stop())
        await world.until(lambda: not world.service.ready)
        assert (await http.get("/ready")).status_code == 503
        world.decodes["decode-0"].gate.set()
        assert (await running).json()["choices"][0]["text"] == world.expected()
        await stopping
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", server.port))


async def test_binding_to_the_network_without_keys_warns(world, caplog):
    server = await serve(world.service, "0.0.0.0", 0)
    await server.stop(limit_s=0)
    assert "api_keys_file" in caplog.text


@pytest.fixture
def certificate(tmp_path):
    """Files of a self-signed certificate and its key."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=router.test", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_https_is_served_to_those_who_trust_the_certificate(make_world, certificate):
    cert, key = certificate
    world = await make_world(router={"tls_cert_file": str(cert), "tls_key_file": str(key)})
    server = await serve(world.service, "127.0.0.1", 0)
    assert server.url.startswith("https://")
    with RouterClient(server.url, certificate=cert) as router:
        assert await asyncio.to_thread(router.model) == "tiny"
    with RouterClient(server.url) as stranger, pytest.raises(Unavailable):
        await asyncio.to_thread(stranger.model)
    await server.stop(limit_s=0)


async def test_a_certificate_that_cannot_be_used_is_a_config_error(make_world, certificate):
    cert, _ = certificate
    world = await make_world(router={"tls_cert_file": str(cert), "tls_key_file": str(cert)})
    with pytest.raises(ConfigError, match="tls_key_file"):
        await serve(world.service, "127.0.0.1", 0)
