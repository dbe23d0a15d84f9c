"""Lets other machines join the box: keeps a certificate authority, invitations and a list of removed nodes.

An invitation has everything that one machine needs: the address of Ray's head, Ray's token, and a certificate with its
key. Anyone who has the invitation can join as that machine. Ray and the engines require a certificate of the authority
on both sides of every connection between machines, but do not check the list of removed nodes.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from appliance.paths import BoxPaths
from scheduler.devices.discovery import HOME_NODE
from weights.format.names import replace_file

LIFE, CLOCKS_APART = timedelta(days=3650), timedelta(days=1)
NODE_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")


class InvitationError(RuntimeError):
    """A machine cannot be invited or cannot join; the message has the reason and what to do."""


@dataclass(frozen=True)
class Invitation:
    """An invitation. head: HOST:PORT of Ray's head. address: of the invited machine. Other fields: PEM."""

    head: str
    name: str
    address: str
    ray_token: str
    authority: str
    certificate: str
    key: str

    @classmethod
    def read(cls, file: Path) -> Invitation:
        """Read an invitation file. Raises InvitationError."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvitationError(f"{file} is not an invitation of `appliance node invite` ({error})") from error

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    def accept(self, paths: BoxPaths) -> None:
        """Write the token and the certificate to the files that Ray reads."""
        replace_file(paths.ray_token, self.ray_token.encode())
        _keep(paths.certificates, self.authority, self.certificate, self.key)


def prepare(paths: BoxPaths, address: str, port: int) -> None:
    """Issue the box's own certificate; create the box's authority first if there is none. Call it on the box before Ray
    starts. Raises InvitationError."""
    folder = paths.certificates
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / "ca.key").exists():
        authority, key = _certificate("appliance authority", x509.BasicConstraints(ca=True, path_length=0), None)
        replace_file(folder / "ca.pem", authority.encode(), durable=True)
        replace_file(folder / "ca.key", key.encode(), durable=True)
    _keep(folder, (folder / "ca.pem").read_text(), *_certificate(HOME_NODE, _addresses(address), folder))
    replace_file(folder / "head", (f"[{address}]:{port}" if ":" in address else f"{address}:{port}").encode())


def invite(paths: BoxPaths, name: str, address: str) -> Invitation:
    """Create an invitation for a machine. Raises InvitationError."""
    folder = _check(paths, name)
    certificate, key = _certificate(name, _addresses(address), folder)
    _write_removed(paths, removed(paths) - {name})
    head, authority = (folder / "head").read_text(), (folder / "ca.pem").read_text()
    return Invitation(head, name, address, paths.ray_token.read_text(), authority, certificate, key)


def remove(paths: BoxPaths, name: str) -> None:
    """Remove a node: until it is invited again, the box ends the node's Ray when it joins. Raises InvitationError."""
    _check(paths, name)
    _write_removed(paths, removed(paths) | {name})


def removed(paths: BoxPaths) -> frozenset[str]:
    """Return the names of the removed nodes."""
    file = paths.certificates / "removed"
    return frozenset(file.read_text().split()) if file.exists() else frozenset()


def _write_removed(paths: BoxPaths, names: frozenset[str]) -> None:
    replace_file(paths.certificates / "removed", "\n".join(sorted(names)).encode(), durable=True)


def _check(paths: BoxPaths, name: str) -> Path:
    """Check the node's name and return the authority's folder. Raises InvitationError."""
    if not NODE_NAME.fullmatch(name) or name == HOME_NODE:
        raise InvitationError(
            f"the node's name is {name!r}; expected lower-case letters, digits and dashes; {HOME_NODE} is the box"
        )
    if not (paths.certificates / "head").exists():
        raise InvitationError(
            f"no other machine can join the box on {paths.data_dir}: set node_address in [box] of its appliance.toml, "
            "then restart it"
        )
    return paths.certificates


def _certificate(name: str, extension: x509.ExtensionType, authority: Path | None) -> tuple[str, str]:
    """Create a certificate and its key, as PEM. authority: folder of the signing authority; None: self-signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), datetime.now(UTC)
    issuer, signer = subject, key
    if authority is not None:
        issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes()).subject
        signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)  # type: ignore[assignment]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + LIFE)
        .add_extension(extension, critical=authority is None)
        .sign(signer, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return certificate.public_bytes(pem).decode(), private.decode()


def _addresses(address: str) -> x509.SubjectAlternativeName:
    """Return the names in a certificate: IP addresses too, because Ray connects to them even if given a host name."""
    try:
        numbers = {info[4][0] for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
        named = [] if address in numbers else [x509.DNSName(address)]
        return x509.SubjectAlternativeName(
            [*named, *(x509.IPAddress(ipaddress.ip_address(n)) for n in sorted(numbers))]
        )
    except (OSError, ValueError) as error:
        raise InvitationError(f"the address {address!r} of a node cannot be resolved ({error}); give its IP") from error


def _keep(folder: Path, authority: str, certificate: str, key: str) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in (("ca.pem", authority), ("node.pem", certificate), ("node.key", key)):
        replace_file(folder / name, content.encode())
