"""Checks the input file of a batch line by line before anything runs. Pure except for reading the file.

A line is {"custom_id": text, "method": "POST", "url": the batch's endpoint, "body": {"model": …, …}}
(https://platform.openai.com/docs/api-reference/batch/request-input). Apart from its model, a body is checked when the
line runs, as for any request: then one line fails and the others continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from appliance.controller.interfaces.errors import shown
from appliance.gateway.core.config import Limits
from train.data.lines import MARK
from train.shapes.foreign_files import foreign_file
from weights.format.foreign_json import is_deeper

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
CONVERSING = ("/v1/chat/completions", "/v1/responses")
"""Those that need the model's chat template."""
_MAX_CUSTOM_ID = 512
_EMBEDDINGS = "/v1/embeddings"
_MOST_INPUTS = 128
"""All vectors come in one answer, which is parsed and written in one go on the controller's loop: 2,048 vectors of
4,096 numbers are 170 MB."""
_MAX_ERRORS = 100
_MOST_SAID = 500  # characters
# In addition to lines with requests, so that a file of 8 GiB of line ends blocks nobody.
_MAX_BLANK_LINES = 100_000
_SKIPPED_BYTES = 1 << 20


class Line(NamedTuple):
    """A request, and its position in the input file in bytes."""

    custom_id: str
    offset: int
    size: int


@dataclass
class Lines:
    """The requests in file order; the one model they use; and the errors (at most 100 {"code", "line", "message",
    "param"}; lines count from 1)."""

    requests: list[Line] = field(default_factory=list)
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add_error(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        """Short, whatever it names: errors are kept with the batch and count towards nobody's limit."""
        short = message if len(message) <= _MOST_SAID else f"{message[:_MOST_SAID]}…"
        self.errors.append({"code": code, "line": line, "message": short, "param": param})


class BadLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


def read(path: Path, endpoint: str, max_lines: int, line_bytes: int) -> Lines:
    """Check the whole file. Raises OSError."""
    with open(path, "rb") as source:
        if foreign := foreign_file(source):
            what, command = foreign[0], foreign[1].replace("train.jsonl", "requests.jsonl")
            lines = Lines()
            lines.add_error("invalid_json_line", f"The file is {what}; expected JSON lines in UTF-8: {command}.", 1)
            return lines
        return check(_bounded(source, line_bytes), endpoint, max_lines, line_bytes)


def check(source: Iterable[bytes], endpoint: str, max_lines: int, line_bytes: int) -> Lines:
    lines, seen = Lines(), set[str]()
    for number, offset, raw in _numbered(source):
        if len(lines.errors) >= _MAX_ERRORS:
            break
        if number > max_lines + _MAX_BLANK_LINES:
            lines.add_error(
                "too_many_lines", f"The file has more than {_MAX_BLANK_LINES} lines without a request.", number
            )
            break
        if not raw.strip():
            continue
        if len(lines.requests) >= max_lines:
            lines.add_error("too_many_requests", f"The file holds more than {max_lines} requests.", number)
            break
        try:
            custom_id, model = _checked(raw, endpoint, line_bytes)
            if custom_id in seen:
                raise BadLine("duplicate_custom_id", f"The custom_id {shown(custom_id)} is used twice.", "custom_id")
            lines.model = lines.model or model
            if model != lines.model:
                raise BadLine(
                    "mismatched_model",
                    f"All requests of a batch ask one model: {shown(model)} was given after {shown(lines.model)}.",
                    "body.model",
                )
            seen.add(custom_id)
            lines.requests.append(Line(custom_id, offset, len(raw)))
        except BadLine as error:
            lines.add_error(error.code, str(error), number, error.param)
    if not lines.requests and not lines.errors:
        lines.add_error("empty_file", "The input file holds no requests.")
    return lines


def parse(raw: bytes) -> dict[str, Any]:
    """Parse a line that passed the check."""
    return orjson.loads(raw)


def _bounded(source: BinaryIO, line_bytes: int) -> Iterator[bytes]:
    """The lines, each read only far enough to detect that it is too long: a file may be one line of 8 GiB."""
    while raw := source.readline(line_bytes + 1):
        yield raw
        while raw and not raw.endswith(b"\n"):
            raw = source.readline(_SKIPPED_BYTES)


def _numbered(source: Iterable[bytes]) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and bytes of each line, without the marks of UTF-8 at its beginning: a file that was written on
    Windows begins with one, and of files that were joined each does."""
    offset = 0
    for number, raw in enumerate(source, 1):
        line = raw
        while line.startswith(MARK):
            line = line.removeprefix(MARK)
        yield number, offset + len(raw) - len(line), line
        offset += len(raw)


def _checked(raw: bytes, endpoint: str, line_bytes: int) -> tuple[str, str]:
    """(custom_id, model). Raises BadLine."""
    if len(raw) > line_bytes:
        raise BadLine("line_too_long", f"The line has more than {line_bytes} bytes.")
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadLine("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise BadLine("invalid_json_line", "This line is not a JSON object.")
    if is_deeper(data, Limits().json_depth + 1):
        # It can be parsed, but not be written again for an engine.
        raise BadLine("invalid_json_line", f"The body is nested deeper than {Limits().json_depth} levels.", "body")
    for name in ("custom_id", "method", "url", "body"):
        if name not in data:
            raise BadLine("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    custom_id, body = data["custom_id"], data["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= _MAX_CUSTOM_ID:
        raise BadLine(
            "invalid_custom_id",
            f"custom_id is {shown(custom_id)}; expected 1 to {_MAX_CUSTOM_ID} characters.",
            "custom_id",
        )
    if data["method"] != "POST":
        raise BadLine("invalid_method", f"method is {shown(data['method'])}; expected 'POST'.", "method")
    if data["url"] != endpoint:
        raise BadLine(
            "mismatched_endpoint", f"url is {shown(data['url'])}; the batch was created for {endpoint}.", "url"
        )
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body is not a JSON object.", "body")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise BadLine("missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model")
    if body.get("stream"):
        raise BadLine("unsupported_parameter", "Requests of a batch cannot stream.", "body.stream")
    if body.get("background"):
        raise BadLine("unsupported_parameter", "Requests of a batch are not in background.", "body.background")
    inputs = body.get("input")
    if endpoint == _EMBEDDINGS and isinstance(inputs, list) and len(inputs) > _MOST_INPUTS:
        if not isinstance(inputs[0], int):  # one input, as tokens
            raise BadLine(
                "too_many_inputs",
                f"The line has {len(inputs)} inputs; at most {_MOST_INPUTS} are taken in one. Write more lines.",
                "body.input",
            )
    return custom_id, body["model"]
