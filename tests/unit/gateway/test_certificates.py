"""The endpoint's certificate is taken up from its files while it runs, and said before it expires."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509

from appliance.gateway.core.errors import ConfigInvalid
from appliance.gateway.main import load_report
from appliance.gateway.server.certificates import Certificate
from appliance.gateway.server.state import gauges

from .certificates import self_signed
from .conftest import Start, request_bytes

DAY_S = 86400.0


async def _serial(port: int) -> int:
    """Of the certificate that a new connection is shown; it names no server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = x509.load_der_x509_certificate(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    writer.transport.abort()
    return shown.serial_number


async def test_a_new_pair_is_taken_up_and_old_connections_stay(start_box: Start, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("broken", ["another key", "gone", "half a file"])
async def test_a_broken_new_pair_is_said_and_the_old_one_stays(
    start_box: Start, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = self_signed(tmp_path, days=90, number=1)
    box = await start_box(tls_cert_path=str(cert), tls_key_path=str(key), sweep_s=1000.0)
    if broken == "another key":
        self_signed(tmp_path, number=2, key_of_another=True)
    elif broken == "gone":
        key.unlink()
    else:
        cert.write_bytes(cert.read_bytes()[:100])
    for _ in range(3):
        await box.gateway.sweep()
    assert await _serial(box.port) == 1
    (note,) = load_report(box.state)["notes"]
    assert "cannot be loaded, the old one stays" in note
    assert sum("cannot be loaded" in record.message for record in caplog.records) == 1, "once, not every two seconds"
    self_signed(tmp_path, days=90, number=3)
    await box.gateway.sweep()
    assert await _serial(box.port) == 3 and load_report(box.state)["notes"] == []


def test_a_pair_that_does_not_fit_ends_the_start(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, key_of_another=True)
    with pytest.raises(ConfigInvalid, match="cannot be used"):
        Certificate(str(cert), str(key))
