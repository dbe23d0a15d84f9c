"""Makes keys and signatures in minisign's format. A key has no passphrase: keep it where releases are made, offline."""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.bundle.carried.errors import Refused, Unusable
from appliance.bundle.carried.signature import PublicKey, Signature, prehashed

_OPEN = b"Ed" + b"\0\0" + b"B2" + bytes(32 + 8 + 8)  # no key derivation, as there is no passphrase: `minisign -G -W`
_NO_CHECKSUM = bytes(32)  # a checksum would only detect a wrong passphrase


@dataclass(frozen=True)
class SecretKey:
    key_id: bytes
    seed: bytes

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.key_id, self._key.public_key().public_bytes_raw())

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.seed)

    @classmethod
    def read(cls, path: Path) -> SecretKey:
        """Raises Unusable."""
        try:
            lines = path.read_text().splitlines()
            data = base64.b64decode(lines[1], validate=True)
        except (OSError, UnicodeDecodeError, IndexError, binascii.Error) as error:
            raise Unusable(f"{path} is not a secret key of `appliance bundle keygen` or minisign: {error}") from error
        if len(data) != 158 or data[:2] != b"Ed":
            raise Unusable(f"{path} is not a secret key of `appliance bundle keygen` or minisign")
        if data[2:4] != b"\0\0":
            raise Unusable(f"{path} has a passphrase, which cannot be asked for here; `minisign -C -W` takes it away")
        found = cls(data[54:62], data[62:94])
        if found.public.key != data[94:126]:
            raise Unusable(f"{path} is damaged: its halves do not belong together")
        return found

    def write(self, path: Path) -> None:
        """Writes two new files: PATH, of mode 0600, and PATH.pub. Raises Refused if one of them exists."""
        public = public_path(path)
        for one in (path, public):
            if one.exists():
                raise Refused(f"{one} exists; a key is never written over")
        data = base64.b64encode(_OPEN + self.key_id + self.seed + self.public.key + _NO_CHECKSUM).decode()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"untrusted comment: minisign secret key {self.public.name}\n{data}\n")
        public.write_text(self.public.text)

    def sign(self, message: bytes, comment: str) -> Signature:
        """comment: one line, signed too."""
        signature = self._key.sign(prehashed(message))
        return Signature(self.key_id, signature, comment, self._key.sign(signature + comment.encode()))


def new_key() -> SecretKey:
    return SecretKey(secrets.token_bytes(8), Ed25519PrivateKey.generate().private_bytes_raw())


def public_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")
