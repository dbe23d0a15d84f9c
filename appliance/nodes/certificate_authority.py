"""The box's own certificate authority: it says who is a node, to Ray and to the tunnels between nodes.

The box makes it when it first starts with a `node_address`. Its key never leaves the box. A node makes its own key and
asks for a certificate with a one-time token (appliance.nodes.enrolment); from then on both sides of every connection
between nodes show theirs. What we listen with refuses the certificate of a node that was removed
(runtime/network/removed_nodes.py); Ray's TLS knows no such list. Against that only a new authority helps: delete the
folder, start again, let the others join again.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime.network.removed_nodes import BACKDATED_S
from runtime.network.tunnel import NodeCertificate
from runtime.replace_file import replace_file

AUTHORITY_LIFE = timedelta(days=3650)
NODE_LIFE = timedelta(days=730)
CLOCKS_APART = timedelta(seconds=BACKDATED_S)
RENEW_BEFORE = timedelta(days=60)
"""A node that starts less than this before the end of its certificate gets another one; `status` says so from
then on."""


class Unfit(RuntimeError):
    """A certificate or a request for one does not fit; the message says why and what to do."""


class Credentials:
    """A node's key and certificate, and the authority's certificate: files in a folder of this user alone."""

    def __init__(self, folder: Path):
        self.folder, self.files = folder, NodeCertificate.below(folder)
        self._key: ec.EllipticCurvePrivateKey | None = None

    def new_request(self, name: str, address: str) -> bytes:
        """Makes a fresh key, which stays here; returns the request for its certificate. What lies in the folder stays
        in force until `keep`: the box may refuse."""
        key = self._key = ec.generate_private_key(ec.SECP256R1())
        request = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
        return _pem(request.add_extension(_addresses(address), False).sign(key, hashes.SHA256()))

    def keep(self, authority: bytes, certificate: bytes) -> None:
        """The key of the last request and its certificate are in force from now on. Raises Unfit if the certificate is
        not of that key or not by that authority."""
        issuer, mine = x509.load_pem_x509_certificate(authority), x509.load_pem_x509_certificate(certificate)
        try:
            mine.verify_directly_issued_by(issuer)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise Unfit("the box answered with a certificate that its authority has not signed") from error
        if self._key is None or mine.public_key() != self._key.public_key():
            raise Unfit("the box answered with a certificate of another key than ours")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self.files.key, _private_pem(self._key), durable=True)
        replace_file(self.files.authority, authority, durable=True)
        replace_file(self.files.certificate, certificate, durable=True)

    def fit(self, name: str, address: str, now: datetime | None = None) -> str:
        """Why this node cannot join with these credentials; "" if it can."""
        if not all(path.exists() for path in (self.files.authority, self.files.certificate, self.files.key)):
            return "this node has no certificate yet"
        mine = self._mine()
        key = serialization.load_pem_private_key(self.files.key.read_bytes(), None)
        if mine.public_key() != key.public_key():
            return "its certificate belongs to another key than the one next to it"
        if mine.not_valid_after_utc - (now or datetime.now(UTC)) < timedelta(0):
            return f"its certificate ended on {mine.not_valid_after_utc:%Y-%m-%d}"
        if mine.subject != _name(name):
            return f"its certificate is for {mine.subject.rfc4514_string().removeprefix('CN=')}, not for {name}"
        names = mine.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        if not set(_addresses(address)) <= set(names):
            return f"its certificate is not for the address {address}"
        return ""

    def ends_s(self) -> float:
        """Until when the certificate is good, in seconds since 1970."""
        return self._mine().not_valid_after_utc.timestamp()

    def fingerprint(self) -> str:
        return fingerprint(self._mine().public_bytes(serialization.Encoding.DER))

    def _mine(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.files.certificate.read_bytes())

    def server_context(self) -> ssl.SSLContext:
        """For a listener that anybody may connect to. Who shows a certificate has one of the box's authority; who shows
        none proves inside the connection who he is."""
        context = self.files.context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context


class Authority:
    """The authority itself, at home. `folder` also holds the credentials of the box, which is a node too."""

    def __init__(self, folder: Path):
        self.home, self._key = Credentials(folder), folder / "ca.key"

    def prepare(self, name: str, address: str) -> Credentials:
        """The credentials of the box itself for this address; makes the authority if there is none."""
        self.home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (self._key.exists() and self.home.files.authority.exists()):
            key, us = ec.generate_private_key(ec.SECP256R1()), _name("appliance authority")
            made = (
                _unsigned(us, us, key.public_key(), AUTHORITY_LIFE)
                .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
                .add_extension(_usage(signs=True), critical=True)
                .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
                .sign(key, hashes.SHA256())
            )
            replace_file(self.home.files.authority, _pem(made), durable=True)
            replace_file(self._key, _private_pem(key), durable=True)
            self.home.files.certificate.unlink(missing_ok=True)
        if self.home.fit(name, address, datetime.now(UTC) + RENEW_BEFORE):
            request = self.home.new_request(name, address)
            self.home.keep(self.home.files.authority.read_bytes(), self.sign(request, name, address))
        return self.home

    def sign(self, request_pem: bytes, name: str, address: str, may: Callable[[], None] = lambda: None) -> bytes:
        """A certificate of the request's key for this node; ignores whatever else the request asks for. may: as
        `RemovedNodes.give` has it. Raises Unfit, and what `may` raises."""
        try:
            request = x509.load_pem_x509_csr(request_pem)
        except ValueError as error:
            raise Unfit("the request for a certificate cannot be read") from error
        if not (request.is_signature_valid and isinstance(request.public_key(), ec.EllipticCurvePublicKey)):
            raise Unfit("the request for a certificate is not signed by its own key")
        issuer = x509.load_pem_x509_certificate(self.home.files.authority.read_bytes())
        key = serialization.load_pem_private_key(self._key.read_bytes(), None)
        both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
        given_s = self.home.files.removed.give(name, may)
        made = (
            _unsigned(_name(name), issuer.subject, request.public_key(), NODE_LIFE, given_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(both_ends, critical=False)
            .add_extension(_addresses(address), critical=False)
            .add_extension(signer, critical=False)
            .sign(key, hashes.SHA256())
        )
        return _pem(made)


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta, now_s: float | None = None
) -> x509.CertificateBuilder:
    now = datetime.now(UTC) if now_s is None else datetime.fromtimestamp(now_s, UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_APART)
        .not_valid_after(now + life)
    )


def fingerprint(certificate_der: bytes) -> str:
    return hashlib.sha256(certificate_der).hexdigest()


def _addresses(address: str) -> x509.SubjectAlternativeName:
    """The addresses that others connect to. Ray and the tunnels use numbers, also if a name was given."""
    try:
        return x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    except ValueError:
        pass
    try:
        numbers = {info[4][0] for info in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
        named = [x509.DNSName(address), *(x509.IPAddress(ipaddress.ip_address(number)) for number in sorted(numbers))]
        return x509.SubjectAlternativeName(named)
    except (OSError, ValueError) as error:
        raise Unfit(f"the address {address!r} of a node cannot be resolved ({error}); give its IP address") from error


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(made: x509.Certificate | x509.CertificateSigningRequest) -> bytes:
    return made.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
