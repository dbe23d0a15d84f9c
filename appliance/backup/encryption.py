"""Encrypts backups: only a holder of the key can read them, and nobody else can change them unnoticed.

Every object at the place (a chunk, a manifest) is sealed with AES-256-GCM under a nonce of its own and bound to its own
name, so an object that was altered, cut short or put in another's place is refused. Names of chunks are keyed too
(HMAC-SHA-256 instead of SHA-256), so nobody can ask the place whether it has a file that they know. The place still
shows how many chunks there are, how long they are and when they came, and the names of backups, which are times.
Whoever can delete at the place can delete backups.

The key that seals is random and belongs to the place. It lies there in `encryption.json`, sealed with the key in the
key file: 32 random bytes (`appliance backup keygen`), or a passphrase, which scrypt stretches. It is also bound to the
name of the place, so that whoever keeps two places of one key file cannot show one for the other.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from appliance.backup import manifest as manifests
from appliance.backup.errors import BackupDamaged, BackupError, WrongKey, WrongPlace
from weights.format.errors import ObjectDamaged
from weights.tiers.objects import Objects

HEADER = "encryption.json"
FORMAT = 1
HEADER_FORMAT, UNBOUND = 2, 1
"""Formats of `encryption.json`. Earlier releases did not bind it to the place's name."""
KEY_LINE = "appliance-backup-key-1 "
KEY_BYTES, NONCE_BYTES = 32, 12
LEAST_PASSPHRASE = 16
SCRYPT = {"n": 2**17, "r": 8, "p": 1}  # 128 MiB and a quarter of a second for each guess
MOST_SCRYPT = {"n": 2**20, "r": 32, "p": 16}  # the most that a place may ask of whoever opens it


@dataclass(frozen=True, slots=True)
class KeyFile:
    """`secret`: the bytes of a key, or the text of a passphrase. Messages name the file and never show its content."""

    path: Path
    secret: bytes
    is_passphrase: bool

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Raises BackupError."""
        try:
            found, lines = path.stat(), path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BackupError(f"the key file {path} cannot be read: {error}") from error
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise BackupError(f"the key file {path} can be read by others; `chmod 600 {path}`")
        given = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if len(given) != 1:
            raise BackupError(
                f"the key file {path} has {len(given)} lines besides comments; expected one, with a key of "
                "`appliance backup keygen` or a passphrase"
            )
        if not given[0].startswith(KEY_LINE):
            if len(given[0]) < LEAST_PASSPHRASE:
                raise BackupError(
                    f"the passphrase in {path} has {len(given[0])} characters; at least {LEAST_PASSPHRASE} are needed, "
                    "such as five random words"
                )
            return cls(path, given[0].encode(), True)
        try:
            secret = base64.b64decode(given[0].removeprefix(KEY_LINE), validate=True)
        except ValueError as error:
            raise BackupError(f"the key in {path} is damaged") from error
        if len(secret) != KEY_BYTES:
            raise BackupError(f"the key in {path} is damaged: it has {len(secret)} bytes instead of {KEY_BYTES}")
        return cls(path, secret, False)


def make_key(path: Path) -> None:
    """Writes a new key to a new file of mode 0600. Raises BackupError if the file exists."""
    line = KEY_LINE + base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise BackupError(f"{path} exists; a key is never written over") from error
    except OSError as error:
        raise BackupError(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(handle, "w") as file:
        file.write(
            f"# Without this key the backups that were encrypted with it are lost. Keep a copy elsewhere.\n{line}\n"
        )
        file.flush()
        os.fsync(handle)


class Encrypted:
    """The objects of a place as a holder of the key sees them. Implements `weights.tiers.objects.Objects`."""

    def __init__(self, objects: Objects, key: bytes):
        self._objects, self.where = objects, objects.where
        self._seals = AESGCM(_derived(key, b"appliance backup: objects"))
        self._names = _derived(key, b"appliance backup: names of chunks")

    def digest(self, data: bytes) -> str:
        """The name of a chunk, which nobody can make without the key."""
        return hmac.digest(self._names, data, "sha256").hex()

    def put(self, key: str, data: bytes) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._objects.put(key, nonce + self._seals.encrypt(nonce, data, _bound(key)))

    def get(self, key: str) -> bytes:
        """Raises ObjectDamaged if the object is missing or was altered."""
        sealed = self._objects.get(key)
        try:
            return self._seals.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _bound(key))
        except (InvalidTag, ValueError) as error:
            raise ObjectDamaged("it is not what was written", path=Path(self.where) / key) from error

    def size(self, key: str) -> int | None:
        return self._objects.size(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._objects.list(prefix)

    def delete(self, key: str) -> None:
        self._objects.delete(key)

    def sweep(self) -> None:
        self._objects.sweep()


def chunk_digest(objects: Objects, data: bytes) -> str:
    """The name of a chunk at this place: its SHA-256, or a keyed sum where the place is encrypted."""
    return objects.digest(data) if isinstance(objects, Encrypted) else hashlib.sha256(data).hexdigest()


def opened(objects: Objects, key_file: Path | None, *, make: bool) -> Objects:
    """Opens the place in the form to use: encrypted if it is so already, or if `make` writes its first backup and a key
    is named.

    Raises WrongKey if the key is another or is missing, WrongPlace, BackupError if the place has backups of the other
    sort, BackupDamaged, TierUnavailable."""
    header = _header(objects)
    if header is None:
        if key_file is None:
            return objects
        if manifests.names(objects):
            raise BackupError(
                f"{objects.where} has backups that are not encrypted (or has lost its {HEADER}): name another place "
                "for encrypted ones, or no key"
            )
        if not make:
            # There is no key, and the caller says so. Whatever the place shows after all is not what was sealed.
            return Encrypted(objects, secrets.token_bytes(KEY_BYTES))
        key = secrets.token_bytes(KEY_BYTES)
        objects.put(HEADER, _sealed(KeyFile.read(key_file), key, _name_of(objects)))
        return Encrypted(objects, key)
    if key_file is None:
        raise WrongKey(
            f"the backups at {objects.where} are encrypted: name the key file (--key-file, or key_file in [backup])"
        )
    name = _name_of(objects)
    if header["format"] != UNBOUND and header["place"] != name:
        raise WrongPlace(
            f"the backups at {objects.where} were made at a place called {header['place'][:80]!r}: whoever "
            f"keeps it shows another one than {name!r}. If you have moved them, call the place so again"
        )
    return Encrypted(objects, _unsealed(KeyFile.read(key_file), header, objects.where))


def _name_of(objects: Objects) -> str:
    """The last part of its path: a mount has another path on another machine, but the folder in it has the same
    name."""
    return objects.where.rstrip("/").rpartition("/")[2]


def _header(objects: Objects) -> dict[str, Any] | None:
    if objects.size(HEADER) is None:
        return None
    try:
        header = json.loads(objects.get(HEADER))
        if header["format"] not in (HEADER_FORMAT, UNBOUND):
            raise BackupDamaged(f"the backups at {objects.where} are of a newer release; restore them with that one")
        if header["format"] != UNBOUND and not isinstance(header["place"], str):
            raise TypeError("no name of a place")
        return header
    except (ObjectDamaged, ValueError, KeyError, TypeError) as error:
        raise BackupDamaged(f"{HEADER} at {objects.where} is damaged, and no backup there can be read") from error


def _sealed(key_file: KeyFile, key: bytes, place: str) -> bytes:
    nonce, salt = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(16)
    header: dict[str, Any] = {
        "format": HEADER_FORMAT,
        "place": place,
        "kdf": "scrypt" if key_file.is_passphrase else "key",
        "salt": salt.hex(),
    }
    if key_file.is_passphrase:
        header |= SCRYPT
    sealed = nonce + AESGCM(_stretched(key_file, header)).encrypt(nonce, key, _header_bound(header))
    return json.dumps({**header, "key": base64.b64encode(sealed).decode()}).encode()


def _unsealed(key_file: KeyFile, header: dict[str, Any], where: str) -> bytes:
    is_passphrase = header.get("kdf") == "scrypt"
    if is_passphrase != key_file.is_passphrase:
        kinds = ("a key", "a passphrase")
        raise WrongKey(
            f"{key_file.path} has {kinds[key_file.is_passphrase]}, and the backups at {where} were encrypted with "
            f"{kinds[is_passphrase]}"
        )
    try:
        sealed = base64.b64decode(header["key"], validate=True)
        return AESGCM(_stretched(key_file, header)).decrypt(
            sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _header_bound(header)
        )
    except InvalidTag as error:
        raise WrongKey(
            f"the {'passphrase' if is_passphrase else 'key'} in {key_file.path} is not the one that the backups at "
            f"{where} were encrypted with"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BackupDamaged(f"{HEADER} at {where} is damaged, and no backup there can be read") from error


def _stretched(key_file: KeyFile, header: dict[str, Any]) -> bytes:
    """Returns the key that seals the place's key. Raises ValueError, KeyError, TypeError."""
    salt = bytes.fromhex(header["salt"])
    if not key_file.is_passphrase:
        return _derived(key_file.secret, b"appliance backup: the key of a place", salt)
    cost = {name: int(header[name]) for name in SCRYPT}
    if any(cost[name] > most for name, most in MOST_SCRYPT.items()):
        raise ValueError("a place may not ask for that much")
    return Scrypt(salt=salt, length=KEY_BYTES, **cost).derive(key_file.secret)


def _derived(key: bytes, purpose: bytes, salt: bytes | None = None) -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=purpose).derive(key)


def _header_bound(header: dict[str, Any]) -> bytes:
    return HEADER.encode() if header["format"] == UNBOUND else f"{HEADER} of {header['place']}".encode()


def _bound(key: str) -> bytes:
    return f"appliance backup {FORMAT}: {key}".encode()
