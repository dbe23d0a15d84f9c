"""Reads the items of a run from where its source says, and checks them: a request or a file."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from appliance.controller.context.tasks import TaskFailed
from appliance.controller.evals import requests
from appliance.controller.evals.requests import Jsonl, Sampled
from appliance.controller.grading.given import MAX_DEPTH
from appliance.controller.http.strict_body import meant
from train.data.lines import MARK
from weights.format.foreign_json import is_deeper

_CHUNK, _CHUNK_BYTES = 200, 512 << 10
_LOOKED_AT_BYTES = 8 << 20
"""How much of a file is checked before its run is made, while the caller waits: half a second at most."""
_Measured = tuple[dict[str, Any], int]
"""An entry, and its bytes as JSON."""
Entries = Generator[tuple[int, dict[str, Any], bytes], None, None]
"""Each with its line's number, and its text."""
Chunks = Generator[list[_Measured], None, None]


def read_request(source: requests.FileContent) -> Entries:
    """Entries of a request. Raises TaskFailed."""
    for number, given in enumerate(source.content, 1):
        entry = given.model_dump()
        text = json.dumps(entry).encode()
        _check_text(number, text)
        yield number, entry, text


def read_file(path: Path) -> Entries:
    """Entries of a JSONL file. Raises TaskFailed."""
    number = 0
    try:
        with open(path, "rb") as source:
            while line := source.readline(requests.MAX_ENTRY_BYTES + 1):
                number += 1
                if number > 2 * requests.MAX_ITEMS:
                    raise TaskFailed("invalid_data", f"The file has more than {2 * requests.MAX_ITEMS} lines.")
                line = line.removeprefix(MARK)
                if line.strip():
                    _check_text(number, line)
                    yield number, _entry(number, line), line
    except OSError as error:
        raise TaskFailed("file_unreadable", f"The file could not be read: {error}") from None


def check_items(
    files_dir: Path, criteria: list[dict[str, Any]], source: Jsonl | Sampled, param: str = "data_source"
) -> None:
    """Checks the fields that are read from items, if all items are at hand. A large file, and one whose lines are not
    items, is left to the run. Raises InvalidGrader."""
    names = requests.names_of(criteria, source, param)
    if source.source.type == "file_content":
        requests.check_items(names, (entry.item for entry in source.source.content))
    elif source.source.type == "file_id":
        path = files_dir / str(getattr(source.source, "id", ""))
        try:
            if path.stat().st_size <= _LOOKED_AT_BYTES:
                requests.check_items(names, (entry["item"] for _, entry, _ in read_file(path)))
        except (TaskFailed, OSError):
            return


def in_chunks(entries: Entries) -> Chunks:
    """Items that are checked and stored in one go. Raises TaskFailed."""
    chunk: list[_Measured] = []
    count, size = 0, 0
    for number, entry, text in entries:
        if is_deeper(entry, MAX_DEPTH):
            raise TaskFailed("invalid_data", f"Line {number} is nested deeper than {MAX_DEPTH} levels.")
        if (count := count + 1) > requests.MAX_ITEMS:
            raise TaskFailed("invalid_data", f"The file has more than {requests.MAX_ITEMS} items.")
        if chunk and (len(chunk) == _CHUNK or size + len(text) > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        size += len(text)
        chunk.append((entry, len(text)))
    if not chunk:
        raise TaskFailed("invalid_data", "The file has no items.")
    yield chunk


def _check_text(number: int, text: bytes) -> None:
    """Raises TaskFailed for an entry that is too long."""
    if len(text) > requests.MAX_ENTRY_BYTES:
        raise TaskFailed("invalid_data", f"Line {number} is longer than {requests.MAX_ENTRY_BYTES} bytes.")


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
