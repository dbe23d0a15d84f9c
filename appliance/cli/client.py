"""HTTP to one box, over its Unix socket or TCP."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from appliance.cli import output
from appliance.cli.errors import AuthFailed, BadUsage, CommandFailed, Conflict, Unreachable, of_answer

TIMEOUT_S, _UPLOAD_TIMEOUT_S = 60.0, 900.0  # covers one upload: the box reads the whole file before it answers
_RESUMES = 6  # their waits sum to a minute, in which a box may restart


def box_url(text: str) -> httpx.URL:
    """Return the URL as `http(s)://host[:port]`; `text` may end in `/v1`. Raises BadUsage."""
    try:
        url = httpx.URL(text if "//" in text else f"http://{text}")
        if url.scheme in ("http", "https") and url.host and url.path.rstrip("/") in ("", "/v1"):
            return url.copy_with(path="/")
    except httpx.InvalidURL:
        pass
    raise BadUsage(
        f"the box's URL is {text!r}; expected one such as http://127.0.0.1:8000, with or without /v1 behind it"
    )


class Client:
    """A client of one box. Methods raise errors of `appliance.cli.errors` with the box's own message."""

    def __init__(
        self,
        url: str = "http://box",
        api_key: str | None = None,
        *,
        socket_path: str | None = None,
        why_silent: Callable[[], str] = lambda: "",
    ):
        """socket_path: used instead of `url`. why_silent: returns why a box refuses connections now, "" if unknown."""
        known = box_url(url)
        self.address, self._why_silent = socket_path or str(known).rstrip("/"), why_silent
        self.is_local = socket_path is not None or known.host in ("127.0.0.1", "localhost", "::1")
        """Whether paths mean the same to the box as they do here."""
        self._http = httpx.Client(
            base_url=known,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            transport=httpx.HTTPTransport(
                uds=socket_path,
                verify=ssl.create_default_context() if known.scheme == "https" else False,
                trust_env=False,  # proxies from the environment would lead out of the box's network
            ),
        )

    def get(self, path: str, **query: Any) -> Any:
        return self.send("GET", path, query=query)

    def listed(self, path: str, most: int | None = None, **query: Any) -> Any:
        """Return a list with the rows of all pages, or the first `most` rows. Pages may be shorter than their limit."""
        query = {"limit": most, **query}
        answer = self.get(path, **query)
        while answer.get("has_more") and answer["data"] and (most is None or len(answer["data"]) < most):
            rows = answer["data"]
            if most is not None:
                query["limit"] = most - len(rows)
            answer = self.get(path, **query | {"after": rows[-1]["id"]})
            answer = {**answer, "data": [*rows, *answer["data"]], "first_id": rows[0]["id"]}
        return answer

    def post(self, path: str, body: Any = None) -> Any:
        return self.send("POST", path, body=body)

    def send(
        self, method: str, path: str, body: Any = None, query: Any = None, timeout_s: float = TIMEOUT_S, **more: Any
    ) -> Any:
        """Send a request and return the JSON of its answer, omitting `query` values that are None. more: for httpx."""
        params = {name: value for name, value in (query or {}).items() if value is not None}
        with self._answer(method, path, timeout_s, json=body, params=params or None, **more) as response:
            return _json(response.read())

    def stream_events(self, path: str, body: Any, timeout_s: float) -> Iterator[Any]:
        """Yield the `data:` objects of a server-sent event stream up to its `[DONE]`.

        Raises CommandFailed for an error event and for a stream that ends without `[DONE]`: an interrupted answer must
        not look like a short one.
        """
        with self._answer("POST", path, timeout_s, json=body) as response:
            rest = b""
            for piece in response.iter_bytes():
                *lines, rest = (rest + piece).split(b"\n")  # only at LF: JSON may contain other line separators
                for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
                    if data == b"[DONE]":
                        return
                    event = _json(data)
                    if event.get("error"):
                        raise CommandFailed(_error_fields(data)[0] or "the box ended the answer with an error")
                    yield event
        raise CommandFailed("the answer was cut off: the stream ended before it was complete")

    def upload(self, path: Path, purpose: str) -> Any:
        """Send a file to /v1/files without reading it into memory."""
        try:
            file = path.open("rb")
        except OSError as error:
            raise BadUsage(f"cannot read {path}: {error.strerror}") from error
        with file, output.progress("sending the file, which the box then checks"):
            form = {"data": {"purpose": purpose}, "files": {"file": (path.name, file, "application/octet-stream")}}
            return self.send("POST", "/v1/files", timeout_s=_UPLOAD_TIMEOUT_S, **form)

    def parts(self, path: str) -> Iterator[bytes]:
        """Yield the body of an answer as it arrives. An interrupted answer with an ETag is resumed; after `_RESUMES`
        failures in a row, the last error is raised."""
        tag, at, failures = None, 0, 0
        while True:
            resumed = {"range": f"bytes={at}-", "if-range": tag} if tag else {}
            try:
                with self._answer("GET", path, TIMEOUT_S, headers=resumed) as response:
                    if resumed and response.status_code != 206:
                        raise Conflict("the file changed during its download; download it again")
                    tag = response.headers.get("etag")
                    for part in response.iter_bytes():
                        at, failures = at + len(part), 0
                        yield part
                return
            except (CommandFailed, Unreachable):
                if tag is None or failures == _RESUMES:
                    raise
                time.sleep(2**failures - 1)
                failures += 1

    @contextmanager
    def _answer(self, method: str, path: str, timeout_s: float, **request: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, timeout=timeout_s, **request) as response:
                if response.status_code >= 400:
                    message, code = _error_fields(response.read())
                    text = message or f"the box answered {response.status_code} {response.reason_phrase}"
                    raise of_answer(response.status_code, text, code)
                yield response
        except httpx.TimeoutException as error:
            raise Unreachable(
                f"the box at {self.address} did not answer within {timeout_s:.0f} s: it is busy or hangs; `appliance "
                "status` shows its state, and the request may still be done"
            ) from error
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            if "peer closed connection without sending complete message body" in reason:
                raise CommandFailed(f"the answer was cut off ({reason}); ask again") from error
            if "Errno 13" in reason:
                raise AuthFailed(
                    f"{self.address} belongs to another user; reach the box with --url and an API key instead"
                ) from error
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                raise Unreachable(
                    f"the certificate of the box at {self.address} is not trusted: {reason}; SSL_CERT_FILE=FILE names "
                    "the certificate, or the authority, to trust"
                ) from error
            why = self._why_silent() or f"cannot reach the box at {self.address}: {reason}"
            raise Unreachable(why) from error


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise CommandFailed(f"the URL is not an appliance's: it answered {content[:80]!r}, expected JSON") from error


def _error_fields(content: bytes) -> tuple[str | None, str | None]:
    """Return message and code of OpenAI's error object, each None if missing."""
    try:
        error = json.loads(content)["error"]
        return error["message"], error.get("code")
    except (ValueError, TypeError, KeyError):
        return None, None
