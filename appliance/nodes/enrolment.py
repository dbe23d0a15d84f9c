"""How a machine becomes a node: it proves that it has a token of the box, and gets a certificate and Ray's token.

The token is a one-time token (`appliance node token`, good for 15 minutes) or a copy of the box's `ray.token`. Neither
travels. Both sides prove over TLS that they have it, and the proofs name the certificate of that very connection: a man
in the middle has another one, so no proof is of use to him. A one-time token also names the box's certificate, so that
a stranger in the box's place is not even greeted.

    node  {"id", "nonce"}                          id: of the one-time token, or "ray.token"
    box   {"nonce", "proof"}                       or {"error"}
    node  {"name", "address", "request", "proof"}  request: for a certificate of a key that stays on the node
    box   {"authority", "certificate", "ray_token"}

A node renews its certificate with the one it has. Both sides show theirs in the TLS handshake, which proves who they
are:

    node  {"id": "certificate", "request"}
    box   {"authority", "certificate"}             for the same name and address; or {"error"}
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.nodes.certificate_authority import Authority, Credentials, Unfit, fingerprint
from appliance.paths import BoxPaths
from runtime.network.newcomers import Newcomers, talk

log = logging.getLogger("appliance.nodes.enrolment")

TOKEN_LIFE_S = 900.0
TALK_TIMEOUT_S = 15.0
LINE_BYTES = 16384
TALKS_OF_ONE = 4
"""As many as one address may have open. `runtime.network.newcomers` bounds all together: who says nothing keeps no
other machine out."""
NODE_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_PREFIX, _ID_BYTES, _SECRET_BYTES = "join-", 8, 24
_SHARED, _RENEWAL = "ray.token", "certificate"
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # of a line that may say anything


class NotEnrolled(RuntimeError):
    """This machine did not become a node; the message says why and what to do."""


@dataclass(frozen=True)
class JoinToken:
    """A one-time token. `box` is the fingerprint of the certificate that the box shows."""

    id: str
    secret: bytes
    box: str

    def text(self) -> str:
        raw = bytes.fromhex(self.id) + self.secret + bytes.fromhex(self.box)
        return _PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> JoinToken:
        """Raises NotEnrolled."""
        try:
            raw = base64.urlsafe_b64decode(text.removeprefix(_PREFIX) + "==")
        except ValueError:
            raw = b""
        if not text.startswith(_PREFIX) or len(raw) != _ID_BYTES + _SECRET_BYTES + 32:
            raise NotEnrolled("this is not a token of `appliance node token`; copy the whole line that it prints")
        cut = _ID_BYTES + _SECRET_BYTES
        return cls(raw[:_ID_BYTES].hex(), raw[_ID_BYTES:cut], raw[cut:].hex())


class Tokens:
    """Tokens that were given out and not used yet. Each is a file with the key that is made from it."""

    def __init__(self, folder: Path):
        self._folder = folder

    def give(self, box: str, life_s: float = TOKEN_LIFE_S) -> JoinToken:
        token = JoinToken(secrets.token_hex(_ID_BYTES), secrets.token_bytes(_SECRET_BYTES), box)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        note = {"key": _key_of(token.secret).hex(), "until_s": time.time() + life_s}
        with os.fdopen(os.open(self._folder / token.id, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(note, file)
        return token

    def key(self, token_id: str) -> bytes | None:
        """The key of a token that is still valid; None otherwise."""
        if not re.fullmatch(f"[0-9a-f]{{{2 * _ID_BYTES}}}", token_id):
            return None
        try:
            note = json.loads((self._folder / token_id).read_text())
        except (FileNotFoundError, ValueError):
            return None
        if time.time() > note["until_s"]:
            self.take(token_id)
            return None
        return bytes.fromhex(note["key"])

    def take(self, token_id: str) -> bool:
        """Use the token up; False if somebody else was faster."""
        try:
            (self._folder / token_id).unlink()
        except FileNotFoundError:
            return False
        return True


class EnrolmentServer:
    """The box's side."""

    def __init__(self, authority: Authority, tokens: Tokens, ray_token: bytes):
        self._authority, self._tokens, self._ray_token = authority, tokens, ray_token
        self._newcomers: Newcomers | None = None
        self._talks: Counter[str] = Counter()  # by address

    async def start(self, address: str, port: int) -> int:
        """Listen; returns the port."""
        context = self._authority.home.server_context()
        self._newcomers = Newcomers(
            talk(self._serve, context=context, handshake_s=TALK_TIMEOUT_S, line_bytes=LINE_BYTES)
        )
        return (await self._newcomers.listen(address, port))[1]

    async def stop(self) -> None:
        if self._newcomers is not None:
            await self._newcomers.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = str((writer.get_extra_info("peername") or ("",))[0])
        self._talks[who] += 1
        try:
            if self._talks[who] > TALKS_OF_ONE:
                raise NotEnrolled("too many ask at once; try again")
            async with asyncio.timeout(TALK_TIMEOUT_S):
                await self._talk(reader, writer)
        except (NotEnrolled, Unfit, OSError, TimeoutError, *_UNREADABLE) as error:
            # A stranger may send anything. The answer says no more than that it was refused.
            log.warning("%s did not become a node: %s", writer.get_extra_info("peername"), error)
            if not writer.is_closing():
                writer.write(_line({"error": str(error) if isinstance(error, NotEnrolled | Unfit) else "unreadable"}))
        finally:
            self._talks -= Counter([who])
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        if hello["id"] == _RENEWAL:
            writer.write(_line(self._renewed(writer.get_extra_info("ssl_object").getpeercert(), str(hello["request"]))))
            await writer.drain()
            return
        token_id, theirs = str(hello["id"]), str(hello["nonce"])
        shared = token_id == _SHARED
        removed = self._authority.home.files.removed

        def check() -> None:
            if shared and removed.any():
                raise NotEnrolled(
                    "a node was removed from this box, and it had ray.token too: use a token of `appliance node token`"
                )

        check()
        key = _key_of(self._ray_token) if shared else self._tokens.key(token_id)
        if key is None:
            raise NotEnrolled("the token is unknown, used or too old; `appliance node token` on the box makes another")
        ours, here = secrets.token_hex(32), self._authority.home.fingerprint()
        writer.write(_line({"nonce": ours, "proof": _proof(key, "box", theirs, ours, here)}))
        ask = json.loads(await reader.readline())
        name, address, request = (str(ask[field]) for field in ("name", "address", "request"))
        proof = _proof(key, "node", theirs, ours, here, name, address, request)
        if not hmac.compare_digest(str(ask["proof"]).encode(), proof.encode()):
            raise NotEnrolled("the proof of the token is wrong")
        if not NODE_NAME.fullmatch(name) or name == "n0":
            raise NotEnrolled(f"{name!r} is not a name for a node")
        # Once more: between the lines of one who takes his time a node may be removed.
        certificate = self._authority.sign(request.encode(), name, address, check)
        if not shared and not self._tokens.take(token_id):
            raise NotEnrolled("the token was used just now by somebody else")
        removed.joined_anew(name)
        log.info("%s is a node now, at %s", name, address)
        writer.write(_line({**self._signed(certificate), "ray_token": self._ray_token.decode()}))
        await writer.drain()

    def _renewed(self, shown: Mapping[str, Any] | None, request: str) -> dict[str, str]:
        """Another certificate for who showed this one (as `getpeercert` gives it), for a key of his."""
        if not shown:
            raise NotEnrolled("a node renews a certificate over a connection that shows it")

        def check() -> None:
            if self._authority.home.files.removed.has(shown):
                raise NotEnrolled("this node was removed from the box")

        (name,) = (value for part in shown["subject"] for key, value in part if key == "commonName")
        # A node that gave a name has it first, and the numbers behind the name after it.
        addresses = sorted(shown["subjectAltName"], key=lambda one: one[0] != "DNS")
        certificate = self._authority.sign(request.encode(), name, addresses[0][1], check)
        log.info("%s has another certificate", name)
        return self._signed(certificate)

    def _signed(self, certificate: bytes) -> dict[str, str]:
        authority = self._authority.home.files.authority.read_text()
        return {"authority": authority, "certificate": certificate.decode()}


async def enrol(credentials: Credentials, box: tuple[str, int], token: str, name: str, address: str) -> bytes:
    """Become node `name` of the box that enrols at `box`: fills `credentials`, returns Ray's token.

    `token`: the text of a one-time token, or of the box's ray.token. Raises NotEnrolled, Unfit.
    """
    once = JoinToken.read(token) if token.startswith(_PREFIX) else None
    key = _key_of(token.encode() if once is None else once.secret)
    # TLS verifies nothing here, since the box's authority is not known yet. The box proves below who it is.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    async with _talking(box, context) as (reader, writer):
        there = fingerprint(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        if once is not None and there != once.box:
            raise NotEnrolled(f"{box[0]}:{box[1]} is not the box that gave out this token: its certificate differs")
        ours = secrets.token_hex(32)
        writer.write(_line({"id": _SHARED if once is None else once.id, "nonce": ours}))
        answer = _answer(await reader.readline())
        theirs = str(answer["nonce"])
        if not hmac.compare_digest(str(answer["proof"]).encode(), _proof(key, "box", ours, theirs, there).encode()):
            raise NotEnrolled(f"{box[0]}:{box[1]} does not know this token; somebody else may sit in its place")
        request = credentials.new_request(name, address).decode()
        proof = _proof(key, "node", ours, theirs, there, name, address, request)
        writer.write(_line({"name": name, "address": address, "request": request, "proof": proof}))
        answer = _answer(await reader.readline())
        credentials.keep(answer["authority"].encode(), answer["certificate"].encode())
        return answer["ray_token"].encode()


async def renew(credentials: Credentials, box: tuple[str, int], name: str, address: str) -> None:
    """Another key and certificate for the node that `credentials` are of, from the box that enrols at `box`. They stay
    as they are if it fails. Raises NotEnrolled, Unfit."""
    context = credentials.files.context(ssl.PROTOCOL_TLS_CLIENT)
    async with _talking(box, context) as (reader, writer):
        writer.write(_line({"id": _RENEWAL, "request": credentials.new_request(name, address).decode()}))
        answer = _answer(await reader.readline())
        credentials.keep(answer["authority"].encode(), answer["certificate"].encode())


@asynccontextmanager
async def _talking(
    box: tuple[str, int], context: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the box's enrolment that ends after this time. Raises NotEnrolled for what goes wrong on it."""
    writer = None
    try:
        async with asyncio.timeout(TALK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(*box, ssl=context, limit=LINE_BYTES)
            yield reader, writer
    except (OSError, TimeoutError, ValueError, KeyError) as error:
        raise NotEnrolled(
            f"the box did not answer as one at {box[0]}:{box[1]} ({type(error).__name__}: {error}); it enrols nodes "
            "at the port after node_port, where [box] node_address is set"
        ) from error
    finally:
        if writer is not None:
            writer.close()


def _answer(line: bytes) -> dict[str, Any]:
    answer = json.loads(line) if line else {"error": "it hung up"}
    if "error" in answer:
        raise NotEnrolled(f"the box refused: {answer['error']}")
    return answer


def _key_of(secret: bytes) -> bytes:
    """A key made from the secret, so that a proof made here is of no use elsewhere."""
    return hmac.new(secret, b"appliance enrolment 1", hashlib.sha256).digest()


def _proof(key: bytes, *parts: str) -> str:
    return hmac.new(key, json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a one-time token of the box on a data directory, or removes a node and prints the names that still have a
    certificate, a line each: what `appliance node` runs."""
    parser = argparse.ArgumentParser(prog="appliance.nodes.enrolment", description=main.__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--life-s", type=float, default=TOKEN_LIFE_S)
    parser.add_argument("--remove", metavar="NODE")
    options = parser.parse_args(argv)
    paths = BoxPaths.of(options.data_dir)
    credentials = Credentials(paths.certificates)
    if not credentials.files.certificate.exists():
        refused = f"no other machine can join the box on {paths.data_dir}"
        print(f"{refused}: set node_address in [box] of its appliance.toml, then restart it", file=sys.stderr)
        return 1
    if options.remove is not None:
        if not NODE_NAME.fullmatch(options.remove) or options.remove == "n0":
            print(f"{options.remove!r} is not a node that has joined; `appliance gpu list` shows them", file=sys.stderr)
            return 1
        removed = credentials.files.removed
        removed.remove(options.remove)
        print("\n".join(sorted(removed.certified() - {"n0"})))
        return 0
    print(Tokens(paths.join_tokens).give(credentials.fingerprint(), options.life_s).text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
