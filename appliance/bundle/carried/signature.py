"""Reads public keys and signatures in minisign's format, so that minisign itself can check a bundle too.

https://jedisct1.github.io/minisign/: a public key is "Ed", an id of 8 bytes and the key; a signature "ED" (of the
BLAKE2b-512 of the message), the id and 64 bytes, then a comment with a signature over both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from pathlib import Path

from appliance.bundle.carried import ed25519
from appliance.bundle.carried.errors import BadSignature, Unusable

_UNTRUSTED, _TRUSTED = "untrusted comment: ", "trusted comment: "


@dataclass(frozen=True)
class PublicKey:
    key_id: bytes
    key: bytes

    @classmethod
    def read(cls, text: str) -> PublicKey:
        """Parses the text of a key file, or its one line that counts. Raises Unusable."""
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_UNTRUSTED)]
        data = _decoded(lines[0]) if lines else b""
        if len(lines) != 1 or len(data) != 42 or data[:2] != b"Ed":
            raise Unusable("this is not a public key of `appliance bundle keygen` or minisign")
        return cls(data[2:10], data[10:])

    @classmethod
    def given(cls, value: str) -> PublicKey:
        """Reads what a person gave: a file, or the key itself. Raises Unusable."""
        path = Path(value)
        try:
            return cls.read(path.read_text() if path.is_file() else value)
        except (OSError, UnicodeDecodeError, Unusable) as error:
            raise Unusable(f"{value} is not a public key, nor a file with one: {error}") from error

    @property
    def name(self) -> str:
        """Returns the key's id as minisign shows it."""
        return f"{int.from_bytes(self.key_id, 'little'):016X}"

    @property
    def line(self) -> str:
        return base64.b64encode(b"Ed" + self.key_id + self.key).decode()

    @property
    def text(self) -> str:
        """Returns the content of the key's file."""
        return f"{_UNTRUSTED}minisign public key {self.name}\n{self.line}\n"


@dataclass(frozen=True)
class Signature:
    key_id: bytes
    signature: bytes
    comment: str
    comment_signature: bytes

    @classmethod
    def read(cls, text: str) -> Signature:
        """Raises BadSignature."""
        lines = text.splitlines()
        if len(lines) < 4 or not lines[0].startswith(_UNTRUSTED) or not lines[2].startswith(_TRUSTED):
            raise BadSignature("the signature is not in minisign's format")
        data, over_comment = _decoded(lines[1]), _decoded(lines[3])
        if len(data) != 74 or data[:2] != b"ED" or len(over_comment) != 64:
            raise BadSignature("the signature is not one of minisign's, over a hash")
        return cls(data[2:10], data[10:], lines[2].removeprefix(_TRUSTED), over_comment)

    @property
    def text(self) -> str:
        data = base64.b64encode(b"ED" + self.key_id + self.signature).decode()
        over_comment = base64.b64encode(self.comment_signature).decode()
        signer = PublicKey(self.key_id, b"").name
        return f"{_UNTRUSTED}signature by {signer}\n{data}\n{_TRUSTED}{self.comment}\n{over_comment}\n"

    def check(self, message: bytes, key: PublicKey) -> None:
        """Raises BadSignature."""
        if self.key_id != key.key_id or not ed25519.verify(key.key, prehashed(message), self.signature):
            raise BadSignature(f"the signature is not that of {key.name} over this content")
        if not ed25519.verify(key.key, self.signature + self.comment.encode(), self.comment_signature):
            raise BadSignature("the comment of the signature was changed")


def prehashed(message: bytes) -> bytes:
    return hashlib.blake2b(message).digest()


def _decoded(line: str) -> bytes:
    try:
        return base64.b64decode(line.strip(), validate=True)
    except (binascii.Error, ValueError):
        return b""
