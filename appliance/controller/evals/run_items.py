"""Reads the items of a run from where its source says, and checks them: a request or a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from appliance.controller.context.tasks import TaskFailed
from appliance.controller.evals import requests
from appliance.controller.grading.given import MAX_DEPTH
from appliance.controller.http.strict_body import meant
from train.data.lines import MARK
from weights.format.foreign_json import is_deeper


def entries(source: requests.FileContent | Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Entries of a request or of a JSONL file, each with its bytes as JSON. Raises TaskFailed."""
    count = 0
    for number, line in enumerate(_lines(source), 1):
        if number > 2 * requests.MAX_ITEMS:
            raise TaskFailed("invalid_data", f"The file has more than {2 * requests.MAX_ITEMS} lines.")
        text = line.removeprefix(MARK)
        if not text.strip():
            continue
        if len(text) > requests.MAX_ENTRY_BYTES:
            raise TaskFailed("invalid_data", f"Line {number} is longer than {requests.MAX_ENTRY_BYTES} bytes.")
        entry = _entry(number, text)
        if is_deeper(entry, MAX_DEPTH):
            raise TaskFailed("invalid_data", f"Line {number} is nested deeper than {MAX_DEPTH} levels.")
        if (count := count + 1) > requests.MAX_ITEMS:
            raise TaskFailed("invalid_data", f"The file has more than {requests.MAX_ITEMS} items.")
        yield entry, len(text)
    if not count:
        raise TaskFailed("invalid_data", "The file has no items.")


def _lines(source: requests.FileContent | Path) -> Iterator[bytes]:
    if isinstance(source, requests.FileContent):
        yield from (json.dumps(given.model_dump()).encode() for given in source.content)
        return
    try:
        with open(source, "rb") as file:
            while line := file.readline(requests.MAX_ENTRY_BYTES + 1):
                yield line
    except OSError as error:
        raise TaskFailed("file_unreadable", f"The file could not be read: {error}") from None


def _entry(number: int, line: bytes) -> dict[str, Any]:
    """Raises TaskFailed."""
    try:
        # The parser of requests reads it: pydantic's accepts NaN, and integers that no engine takes.
        return requests.Entry.model_validate(orjson.loads(line)).model_dump()
    except orjson.JSONDecodeError as error:
        raise TaskFailed("invalid_data", f"Line {number} is not JSON: {error}.") from None
    except ValidationError as error:
        first = meant(error.errors(include_url=False, include_input=False))
        where = ".".join(map(str, first["loc"])) or "the line"
        raise TaskFailed(
            "invalid_data", f'Line {number} is not {{"item": {{...}}, "sample": {{...}}}}: {where}: {first["msg"]}.'
        ) from None
