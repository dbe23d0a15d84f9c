"""The TLS certificate of the gateway, and mutual TLS between the gateway and engines on other machines."""

import asyncio
import datetime
import os
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.main import load_report
from appliance.gateway.server.certificates import Certificate
from appliance.gateway.server.state import Engines, gauges
from appliance.invitation import invite, prepare
from appliance.paths import BoxPaths
from runtime.network import private_socket, serve_machines

from .conftest import Start, request_bytes


def self_signed(folder: Path, *, days: int = 1, number: int = 1, key_of_another: bool = False) -> tuple[Path, Path]:
    """Write cert.pem and key.pem to `folder` as a renewal does: new files replace the old files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    shown = ec.generate_private_key(ec.SECP256R1()) if key_of_another else key
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    for file, data in (("cert.pem", cert.public_bytes(pem[0])), ("key.pem", shown.private_bytes(*pem))):
        (folder / "new").write_bytes(data)
        os.replace(folder / "new", folder / file)
    return folder / "cert.pem", folder / "key.pem"


DAY_S = 86400.0


async def _serial(port: int) -> int:
    """Connect without a server name; return the serial number of the gateway's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    writer.transport.abort()
    return shown.serial_number


async def test_renewed_certificate_is_loaded_and_connections_stay_open(start_box: Start, tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, days=5, number=1)
    box = await start_box(tls_cert_path=str(cert), tls_key_path=str(key), sweep_s=1000.0)
    trusting = ssl.create_default_context(cafile=str(cert))
    reader, writer = await asyncio.open_connection("127.0.0.1", box.port, ssl=trusting, server_hostname="localhost")
    assert await _serial(box.port) == 1
    assert load_report(box.state)["certificate_expires_s"] == pytest.approx(time.time() + 5 * DAY_S, abs=60)
    (note,) = load_report(box.state)["notes"]
    assert "expires in 5.0 days" in note and str(cert) in note
    self_signed(tmp_path, days=90, number=2)
    await box.gateway.sweep()
    assert await _serial(box.port) == 2
    assert load_report(box.state)["notes"] == []
    (shown,) = [family for family in gauges(box.state, True) if family.name == "appliance_tls_expiry_seconds"]
    assert shown.samples[0].value == pytest.approx(time.time() + 90 * DAY_S, abs=60)
    writer.write(request_bytes("GET", "/health"))
    assert b" 200 " in await asyncio.wait_for(reader.readline(), 60)
    writer.transport.abort()


@pytest.mark.parametrize("broken", ["another key", "empty", "half a file"])
async def test_broken_certificate_renewal_is_reported_and_old_certificate_stays(
    start_box: Start, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = self_signed(tmp_path, days=90, number=1)
    box = await start_box(tls_cert_path=str(cert), tls_key_path=str(key), sweep_s=1000.0)
    if broken == "another key":
        self_signed(tmp_path, number=2, key_of_another=True)
    else:
        cert.write_bytes(b"" if broken == "empty" else cert.read_bytes()[:100])
    for _ in range(3):
        await box.gateway.sweep()
    assert await _serial(box.port) == 1
    (note,) = load_report(box.state)["notes"]
    assert "cannot be loaded, the old one stays" in note
    assert sum("cannot be loaded" in record.message for record in caplog.records) == 1, "once, not every two seconds"
    self_signed(tmp_path, days=90, number=3)
    await box.gateway.sweep()
    assert await _serial(box.port) == 3 and load_report(box.state)["notes"] == []


def test_start_with_mismatched_certificate_and_key_fails(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, key_of_another=True)
    with pytest.raises(ConfigInvalid, match="cannot be used"):
        Certificate(str(cert), str(key))


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
    """Start an engine as on an invited machine; yield its URL. Requests of this process come from the box."""
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


async def test_remote_engine_answers_only_its_own_box(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await is_reached(engine)
    show(monkeypatch, box_in(tmp_path / "another"))
    for address in (engine, f"https://{HOST}:1"):
        with pytest.raises(aiohttp.ClientConnectorError):
            await is_reached(address)


async def test_remote_engine_rejects_client_without_certificate(engine: str, tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=str(tmp_path / "home" / "ca" / "ca.pem"))
    with pytest.raises((OSError, asyncio.IncompleteReadError)):
        reader, writer = await asyncio.open_connection(HOST, int(engine.rpartition(":")[2]), ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nhost: engine\r\n\r\n")
        await reader.readexactly(1)
