"""Checks the input file of a batch line by line before anything runs. Pure except for reading the file.

A line is {"custom_id": text, "method": "POST", "url": the batch's endpoint, "body": {"model": …, …}}
(https://platform.openai.com/docs/api-reference/batch/request-input). Apart from its model, a body is checked when the
line runs, as for any request: then one line fails and the others continue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from appliance.controller.context.tasks import TaskFailed
from appliance.controller.http.error_handlers import message_of
from appliance.controller.interfaces.errors import shown
from appliance.gateway.core.config import Limits
from train.data.lines import MARK, foreign_file
from weights.format.foreign_json import is_deeper

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
CONVERSING = ("/v1/chat/completions", "/v1/responses")
"""Those whose answers a client may have stored."""
_MAX_ERRORS = 100


class Line(NamedTuple):
    """A request, and its position in the input file in bytes."""

    custom_id: str
    offset: int
    size: int


@dataclass
class Lines:
    """The requests by custom_id, in file order; the one model they use; and the errors (at most 100 {"code", "line",
    "message", "param"}; lines count from 1)."""

    requests: dict[str, Line] = field(default_factory=dict)
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add_error(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        self.errors.append({"code": code, "line": line, "message": message, "param": param})


def read(path: Path, endpoint: str, max_lines: int, line_bytes: int) -> Lines:
    """Check the file, up to a line that is too long: a file may be one line of 8 GiB. Raises OSError."""
    lines, offset = Lines(), 0
    with open(path, "rb") as source:
        if foreign := foreign_file(source):
            what, command = foreign[0], foreign[1].replace("train.jsonl", "requests.jsonl")
            lines.add_error("invalid_json_line", f"The file is {what}; expected JSON lines in UTF-8: {command}.", 1)
            return lines
        for number, raw in enumerate(iter(partial(source.readline, line_bytes + 1), b""), 1):
            if len(raw) > line_bytes:
                lines.add_error("line_too_long", f"The line has more than {line_bytes} bytes.", number)
                return lines
            if raw.removeprefix(MARK).strip():
                if len(lines.requests) == max_lines:
                    lines.add_error("too_many_requests", f"The file holds more than {max_lines} requests.", number)
                    return lines
                try:
                    custom_id, lines.model = _checked(raw, endpoint, lines)
                    lines.requests[custom_id] = Line(custom_id, offset, len(raw))
                except TaskFailed as error:
                    lines.add_error(error.code, str(error), number, error.param)
                if len(lines.errors) >= _MAX_ERRORS:
                    return lines
            offset += len(raw)
    if not lines.requests and not lines.errors:
        lines.add_error("empty_file", "The input file holds no requests.")
    return lines


def parse(raw: bytes) -> Any:
    """A line. On Windows files begin with a mark of UTF-8, and so do the parts of files that were joined."""
    return orjson.loads(raw.removeprefix(MARK))


class _Request(BaseModel):
    model_config = ConfigDict(strict=True)

    custom_id: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def _checked(raw: bytes, endpoint: str, before: Lines) -> tuple[str, str]:
    """(custom_id, model). Raises TaskFailed."""
    try:
        data = parse(raw)
        if is_deeper(data, Limits().json_depth + 1):
            # It can be parsed, but neither be shown nor written again for an engine.
            raise TaskFailed("invalid_json_line", f"It is nested deeper than {Limits().json_depth} levels.", "body")
        line = _Request.model_validate(data)
    except orjson.JSONDecodeError as error:
        raise TaskFailed("invalid_json_line", f"This line is not parseable as valid JSON: {error}.") from error
    except ValidationError as error:
        if not isinstance(data, dict):
            raise TaskFailed("invalid_json_line", "This line is not a JSON object.") from error
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"]))
        message, code = message_of(param, dict(first))
        raise TaskFailed(code, message, param) from error
    if line.url != endpoint:
        message = f"url is {shown(line.url)}; the batch was created for {endpoint}."
        raise TaskFailed("mismatched_endpoint", message, "url")
    model = line.body.get("model")
    if not isinstance(model, str) or not model:
        raise TaskFailed("missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model")
    for name in ("stream", "background"):
        if line.body.get(name):
            raise TaskFailed("unsupported_parameter", f"Requests of a batch have no `{name}`.", f"body.{name}")
    if line.custom_id in before.requests:
        raise TaskFailed("duplicate_custom_id", f"The custom_id {shown(line.custom_id)} is used twice.", "custom_id")
    if before.model not in (None, model):
        message = f"All requests of a batch ask one model: {shown(model)} was given after {shown(before.model)}."
        raise TaskFailed("mismatched_model", message, "body.model")
    return line.custom_id, model
