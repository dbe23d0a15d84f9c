"""Cuts a data file into its examples and parses each.

A hostile file costs no more than a good one: lines are read with a limit, each is parsed alone (train.data.records),
and the size of a JSON array, which is parsed whole, is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import orjson

from train.data.foreign_files import MARK, foreign_file
from train.data.records import BadFile, BadRecord, loads

MAX_EXAMPLE_BYTES, MAX_ARRAY_BYTES = 16 * 2**20, 256 * 2**20

_OF_A_TURN = ({"role", "from"}, {"content", "value", "tool_calls", "function_call"})
_TURNS = ("messages", "conversations", "conversation")


class Line(NamedTuple):
    """One example of a file: the number of its line, or of the element of an array, and its bytes; or why they cannot
    be read."""

    line: int
    raw: bytes | BadRecord


def parse(raw: bytes) -> Any:
    """The JSON value of one example; a conversation that is a bare list becomes a record. Raises BadRecord."""
    record = loads(raw)
    for key in _TURNS if isinstance(record, dict) else ():
        if isinstance(text := record.get(key), str) and text.lstrip().startswith("["):
            record[key] = loads(text.encode())  # as tables keep it
    return {"messages": record} if _is_conversation(record) else record


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_turn, value))


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and all(not names.isdisjoint(value) for names in _OF_A_TURN)


def examples(file: BinaryIO, limit: int = MAX_EXAMPLE_BYTES) -> Iterator[Line]:
    """Those of JSONL or of a JSON array; a BadRecord in place of what is too big, a BadFile in place of a file that is
    none of them."""
    try:
        file.seek(0)
        if foreign := foreign_file(file):
            raise BadFile(f"the file is {foreign[0]}; expected one JSON object on each line: {foreign[1]}")
        array = _array(file, limit)
    except BadRecord as bad:
        yield Line(1, BadFile(str(bad)))
        return
    for number, element in enumerate(array or (), 1):
        raw = orjson.dumps(element)
        yield Line(number, raw if len(raw) <= limit else _too_long(len(raw), limit))
    if array is None:
        file.seek(0)
        yield from _lines(file, limit)


def _array(file: BinaryIO, limit: int) -> list[Any] | None:
    """The elements of a file that is one JSON array; None of lines. Raises BadRecord for an array that cannot be read
    and for values over several lines."""
    first = b""
    while not first and (line := file.readline(limit + 1)):
        first = _bare(line)
    try:
        value = parse(first)
    except BadRecord:
        size = file.seek(0, 2)
        file.seek(0)
        if first.startswith(b"{") and _goes_on(_bare(file.read(limit))):
            raise BadFile(
                "the file has objects over several lines; expected one example on each: jq -c . FILE > train.jsonl"
            ) from None
        if not first.startswith(b"["):
            return None
        if size > MAX_ARRAY_BYTES:
            raise BadFile(
                f"the file is a JSON array of {size} bytes; the limit for one is {MAX_ARRAY_BYTES}, without one for "
                "lines: jq -c '.[]' FILE > train.jsonl"
            ) from None
        value = loads(_bare(file.read()))
    if not isinstance(value, list) or any(map(_bare, file)):  # several lists are lines
        return None
    return [value] if _is_conversation(value) else value


def _goes_on(text: bytes) -> bool:
    """Whether the JSON value that a text begins with has more than one line."""
    try:
        _, end = json.JSONDecoder().raw_decode(found := text.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return "\n" in found[:end]


def _bare(raw: bytes) -> bytes:
    raw = raw.strip()
    while raw.startswith(MARK):
        raw = raw[len(MARK) :].strip()
    return raw


def _too_long(size: int, limit: int) -> BadRecord:
    return BadRecord(f"is {size} bytes long; the limit for one example is {limit}")


def _lines(file: BinaryIO, limit: int) -> Iterator[Line]:
    number = 0
    while raw := file.readline(limit + 1):
        number += 1
        if len(raw) > limit and not raw.endswith(b"\n"):
            size = len(raw)
            while rest := file.readline(1 << 20):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield Line(number, _too_long(size, limit))
            continue
        if raw := _bare(raw):
            yield Line(number, raw)
