"""HTTP to one box, over its Unix socket or TCP. It uses the standard library only, so that a command starts at once."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlencode, urlsplit

from appliance.cli.errors import AuthFailed, BadUsage, CommandFailed, Unreachable, of_answer

TIMEOUT_S = 60.0
WORK_TIMEOUT_S = 900.0  # of an answer that the box works for: it reads a whole file line by line
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Address:
    """Where a box answers: `socket_path`, or `host` and `port`. `secure`: with TLS. `verified`: check its
    certificate."""

    host: str = "box"
    port: int = 0
    secure: bool = False
    socket_path: str | None = None
    verified: bool = True

    @classmethod
    def of_url(cls, url: str) -> Address:
        """The address in `http(s)://host[:port]`, with or without `/v1` behind it. Raises BadUsage."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise BadUsage(f"the box's URL is {url!r}; expected something like http://127.0.0.1:8000")
        if parts.path.rstrip("/") not in ("", "/v1"):
            raise BadUsage(f"the box's URL is {url!r}; expected no path behind the port other than /v1")
        secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if secure else 80), secure)

    @classmethod
    def of_own(cls, url: str) -> Address:
        """The address of the box on this machine. Its certificate is not checked on loopback: it names the box, and
        nobody else can stand in there."""
        address = cls.of_url(url)
        return replace(address, verified=not address.is_local)

    @property
    def is_local(self) -> bool:
        """Whether paths mean the same to the box as they do here."""
        return self.socket_path is not None or self.host in ("127.0.0.1", "localhost", "::1")

    def __str__(self) -> str:
        if self.socket_path is not None:
            return self.socket_path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float):
        super().__init__("box", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """One box. Every method raises the errors of `appliance.cli.errors`, with the box's own message."""

    def __init__(self, address: Address, api_key: str | None = None, why_silent: Callable[[], str] | None = None):
        """why_silent: says what a box does that takes no connection, "" if that is not known."""
        self.address = address
        self._api_key, self._why_silent = api_key, why_silent

    def get(self, path: str, **query: Any) -> Any:
        return self.send("GET", path, query=query)

    def listed(self, path: str, most: int | None = None, **query: Any) -> Any:
        """A list with the rows of all its pages, or the first `most` of them: a page may end before its limit."""
        found = self.get(path, limit=most, **query)
        while found.get("has_more") and found["data"] and (most is None or len(found["data"]) < most):
            rows = found["data"]
            left = None if most is None else most - len(rows)
            found = self.get(path, limit=left, after=rows[-1]["id"], **query)
            found = {**found, "data": [*rows, *found["data"]], "first_id": rows[0]["id"]}
        return found

    def post(self, path: str, body: Any = None, **query: Any) -> Any:
        return self.send("POST", path, body=body, query=query)

    def delete(self, path: str) -> Any:
        return self.send("DELETE", path)

    def send(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON of the answer. `query` values that are None are left out."""
        content = None if body is None else json.dumps(body).encode()
        sent = {"content-type": "application/json"} if body is not None else {}
        with self._answer(method, _target(path, query), content, sent | dict(headers or {}), timeout_s) as response:
            return _json(response.read())

    def stream_events(self, path: str, body: Any, timeout_s: float) -> Iterator[Any]:
        """The `data:` objects of a server-sent event stream, up to its `[DONE]`.

        Raises CommandFailed for an error event and for a stream that ends without `[DONE]`: nobody may take an answer
        that was cut off for a short one.
        """
        content = json.dumps(body).encode()
        with self._answer("POST", path, content, {"content-type": "application/json"}, timeout_s) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _json(data)
                if isinstance(event, dict) and event.get("error"):
                    raise CommandFailed(_error_fields(event)[0] or "the box ended the answer with an error")
                yield event
        raise CommandFailed("the answer was cut off: the stream ended before it was complete")

    def upload(self, path: Path, purpose: str, on_bytes: Callable[[int], None]) -> Any:
        """Send a file to /v1/files without reading it into memory; `on_bytes` gets the size of each piece."""
        if not path.name.isprintable():
            raise BadUsage(f"the name of {path!s:.100} contains control characters; rename the file")
        boundary = secrets.token_hex(16)
        filename = path.name.replace("\\", "\\\\").replace('"', '\\"')
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{filename}"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        end = f"\r\n--{boundary}--\r\n".encode()

        def body(file: BinaryIO) -> Iterator[bytes]:
            yield head
            while piece := file.read(_CHUNK_BYTES):
                on_bytes(len(piece))
                yield piece
            yield end

        try:
            file = open(path, "rb")
        except OSError as error:
            raise BadUsage(f"cannot read {path}: {error.strerror}") from error
        with file:
            headers = {
                "content-type": f"multipart/form-data; boundary={boundary}",
                "content-length": str(len(head) + os.fstat(file.fileno()).st_size + len(end)),
            }
            with self._answer("POST", "/v1/files", body(file), headers, WORK_TIMEOUT_S) as response:
                return _json(response.read())

    def download(self, path: str, out: BinaryIO) -> int:
        """Copy the body of an answer to `out`; returns its bytes. Raises CommandFailed for one that was cut off."""
        done = 0
        with self._answer("GET", path, None, {}, TIMEOUT_S) as response:
            while piece := response.read(_CHUNK_BYTES):
                out.write(piece)
                done += len(piece)
            if response.length:  # read in pieces, Python takes the end of a connection for that of a body
                raise CommandFailed(f"the answer was cut off: {response.length:,} bytes are missing; ask again")
        return done

    @contextmanager
    def _answer(
        self, method: str, target: str, content: Any, headers: dict[str, str], timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection(timeout_s)
        if self._api_key:
            headers = headers | {"authorization": f"Bearer {self._api_key}"}
        try:
            try:
                connection.request(method, target, body=content, headers=headers)
            except (BrokenPipeError, ConnectionResetError):
                # A box that refuses an upload closes before it has read all of it; its answer has the reason.
                if connection.sock is None:
                    raise
            response = connection.getresponse()
            if response.status >= 400:
                message, code = _error_fields(_json_or_none(response.read()))
                text = message or f"the box answered {response.status} {response.reason}"
                raise of_answer(response.status, text, code)
            yield response
        except PermissionError as error:
            text = f"{self.address} belongs to another user; reach the box with --url and an API key instead"
            raise AuthFailed(text) from error
        except TimeoutError as error:
            raise Unreachable(
                f"the box at {self.address} did not answer within {timeout_s:.0f} s: it is busy or hangs; `appliance "
                "status` shows what it does, and what was asked may still be done"
            ) from error
        except ssl.SSLCertVerificationError as error:
            raise Unreachable(
                f"the certificate of the box at {self.address} is not trusted: {error.verify_message}; "
                "SSL_CERT_FILE=FILE names the certificate, or the authority, to trust"
            ) from error
        except (http.client.HTTPException, OSError) as error:
            if self._why_silent is not None and (doing := self._why_silent()):
                raise Unreachable(doing) from error
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unreachable(f"cannot reach the box at {self.address}: {reason}") from error
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.address.socket_path is not None:
            return _SocketConnection(self.address.socket_path, timeout_s)
        if self.address.secure:
            context = ssl.create_default_context()
            if not self.address.verified:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return http.client.HTTPSConnection(self.address.host, self.address.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.address.host, self.address.port, timeout=timeout_s)


def _target(path: str, query: Mapping[str, Any] | None) -> str:
    given = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in (query or {}).items()
        if value is not None
    }
    return f"{path}?{urlencode(given)}" if given else path


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise CommandFailed(f"this is not an appliance: it answered {content[:80]!r}, expected JSON") from error


def _json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None


def _error_fields(answer: Any) -> tuple[str | None, str | None]:
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        message, code = error.get("message"), error.get("code")
        return (message if isinstance(message, str) else None), (code if isinstance(code, str) else None)
    return (error if isinstance(error, str) else None), None
