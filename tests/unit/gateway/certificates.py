"""Certificates of tests: self-signed, for localhost."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def self_signed(
    folder: Path, *, days: float = 1.0, since_days: float = 30.0, number: int = 1, key_of_another: bool = False
) -> tuple[Path, Path]:
    """cert.pem and key.pem in `folder`, replaced as a renewal does it: each a new file under the old name."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(number)
        .not_valid_before(now - datetime.timedelta(days=since_days))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    shown = ec.generate_private_key(ec.SECP256R1()) if key_of_another else key
    _replace(folder / "cert.pem", cert.public_bytes(serialization.Encoding.PEM))
    _replace(
        folder / "key.pem",
        shown.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
    return folder / "cert.pem", folder / "key.pem"


def _replace(path: Path, data: bytes) -> None:
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)
