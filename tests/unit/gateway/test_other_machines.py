"""Engines on other machines: the gateway and the engine show each other certificates of the box's authority."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from appliance.gateway.server.state import Engines
from appliance.invitation import invite, prepare
from appliance.paths import BoxPaths
from runtime.network import private_socket, serve_machines

HOST = "127.0.0.1"


def box_in(folder: Path) -> BoxPaths:
    paths = BoxPaths.of(folder)
    folder.mkdir()
    paths.ray_token.write_text("token")
    prepare(paths, HOST, 6380)
    return paths


def show(monkeypatch: pytest.MonkeyPatch, paths: BoxPaths) -> None:
    for name, file in (("CA_CERT", "ca.pem"), ("SERVER_CERT", "node.pem"), ("SERVER_KEY", "node.key")):
        monkeypatch.setenv(f"RAY_TLS_{name}", str(paths.certificates / file))


async def answers(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of an engine on an invited machine; this process is the box."""
    home, away = box_in(tmp_path / "home"), BoxPaths.of(tmp_path / "away")
    away.data_dir.mkdir()
    invite(home, "n1", HOST).accept(away)
    show(monkeypatch, away)
    server = uvicorn.Server(uvicorn.Config(answers, http="httptools", lifespan="off", log_config=None))
    serving = asyncio.create_task(server._serve([private_socket(tmp_path / "engine.sock")]))
    while not server.started:
        await asyncio.sleep(0.001)
    url = await serve_machines(server, HOST)
    show(monkeypatch, home)
    yield url
    server.should_exit = True
    await serving


async def is_reached(address: str) -> bool:
    engines = Engines(60.0)
    try:
        (await engines.connect(address)).release()
        return await engines.is_alive(address)
    finally:
        await engines.close()


async def test_engine_on_another_machine_answers(engine: str) -> None:
    assert await is_reached(engine)


async def test_engine_of_another_box_or_without_listener_is_unreached(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, box_in(tmp_path / "another"))
    for address in (engine, f"https://{HOST}:1"):
        with pytest.raises(aiohttp.ClientConnectorError):
            await is_reached(address)


async def test_client_without_certificate_gets_no_answer(engine: str, tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=str(tmp_path / "home" / "ca" / "ca.pem"))
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        reader, writer = await asyncio.open_connection(HOST, int(engine.rpartition(":")[2]), ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nhost: engine\r\n\r\n")
        await reader.readexactly(1)
