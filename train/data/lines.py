"""Cuts a data file into its examples and parses each, in bounded memory.

A hostile file costs no more than a good one: lines are read with a limit, JSON arrays are cut into their elements
over a memory map, and every element is parsed alone (train.shapes.records).
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from train.shapes.foreign_files import foreign_file
from train.shapes.records import MAX_DEPTH, BadFile, BadRecord, loads

MAX_EXAMPLE_BYTES = 16 * 2**20
# In one record, also in its texts, some of which hold JSON that is parsed. Parsing holds up every other thread of the
# process: 16 MiB of "[]," do so for 3 s and take 570 MiB.
MAX_BRACKETS, MAX_COMMAS = 100_000, 1_000_000

# One match runs up to the next bracket outside a string. Possessive (Python 3.11): no backtracking, so the time is
# linear in what is scanned, whatever the bytes are.
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+([{}\[\]])', re.DOTALL)
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_FIRST = re.compile(rb"(?:\xef\xbb\xbf|[ \t\r\n])*+")
_ONE_EACH = "jq -c . FILE > train.jsonl"
_OF_A_TURN = ({"role", "from"}, {"content", "value", "tool_calls", "function_call"})
_TURNS = ("messages", "conversations", "conversation")
MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8. Files that were joined have one in their middle."""


class Example(NamedTuple):
    """One example of a file: the number of its line, where its bytes begin, and they; or why they cannot be read."""

    line: int
    offset: int
    raw: bytes | BadRecord


def parse(raw: bytes) -> Any:
    """The JSON value of one example; a conversation that is a bare list becomes a record. Raises BadRecord."""
    # Counting is cheap, parsing is not.
    brackets, commas = raw.count(b"{") + raw.count(b"["), raw.count(b",")
    for what, count, most in (("brackets", brackets, MAX_BRACKETS), ("commas", commas, MAX_COMMAS)):
        if count > most:
            raise BadRecord(f"has {count} {what}; the limit for one example is {most}")
    record = loads(raw)
    for key in _TURNS if isinstance(record, dict) else ():
        if isinstance(text := record.get(key), str) and text.lstrip().startswith("["):
            record[key] = loads(text.encode())  # as tables keep it
    return {"messages": record} if isinstance(record, list) and record and all(map(_is_turn, record)) else record


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and all(not names.isdisjoint(value) for names in _OF_A_TURN)


def examples(file: BinaryIO, limit: int = MAX_EXAMPLE_BYTES) -> Iterator[Example]:
    """Those of JSONL or of a JSON array; a BadRecord in place of what is too big, a BadFile in place of a file that is
    none of them."""
    try:
        if foreign := foreign_file(file):
            raise BadFile(f"the file is {foreign[0]}; expected one JSON object on each line: {foreign[1]}")
        array = _is_array(file, limit)
    except BadFile as bad:
        yield Example(1, 0, bad)
        return
    yield from _array_elements(file, limit) if array else _lines(file, limit)


def _is_array(file: BinaryIO, limit: int) -> bool:
    """Whether the file is one array of examples, and not a list of turns on each line. Raises BadFile for values over
    several lines."""
    if file.seek(0, 2) == 0:
        return False
    file.seek(0)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = _FIRST.match(data).end()
        if data[start : start + 1] == b"[":
            inner = _FIRST.match(data, start + 1).end()
            if not _is_turn(_value(data, inner, _element_end(data, inner, limit))):
                return True
        line_end = data.find(b"\n", start, start + limit)
        if line_end < 0 or _value(data, start, line_end) is not None:
            return False
        end = _element_end(data, start, limit)
        if isinstance(end, int) and end > line_end and _value(data, start, end) is not None:
            raise BadFile(f"the file has objects over several lines; expected one example on each: {_ONE_EACH}")
    return False


def _value(data: mmap.mmap, start: int, end: int | BadRecord) -> Any:
    """The object or list between these bytes; None if it is neither."""
    try:
        found = parse(data[start:end]) if isinstance(end, int) else None
    except BadRecord:
        return None
    return found if isinstance(found, (dict, list)) else None


def _lines(file: BinaryIO, limit: int) -> Iterator[Example]:
    number, end = 0, 0
    while raw := file.readline(limit + 1):
        number, start = number + 1, end
        end += len(raw)
        if len(raw) > limit and not raw.endswith(b"\n"):
            size = len(raw)
            while rest := file.readline(1 << 20):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            end = start + size
            yield Example(number, start, BadRecord(f"is {size} bytes long; the limit for one example is {limit}"))
            continue
        while raw.startswith(MARK):
            raw, start = raw[len(MARK) :], start + len(MARK)
        if raw.strip():
            yield Example(number, start, raw)


def _array_elements(file: BinaryIO, limit: int) -> Iterator[Example]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position, line, counted = data.find(b"[") + 1, 1, 0
        while True:
            found = _NOT_SPACE.search(data, position)
            if not found:
                yield Example(line, position, BadRecord("the file ends inside the JSON array; a closing ] is missing"))
                return
            start = found.start()
            line += _newlines(data, counted, start)
            counted = start
            first = data[start : start + 1]
            if first == b"]":
                if _NOT_SPACE.search(data, start + 1):
                    yield Example(line, start, BadRecord("there is text after the closing ] of the JSON array"))
                return
            if first not in (b"{", b"["):
                yield Example(line, start, BadRecord(f"array element starts with {first!r}; expected an object"))
                return
            end = _element_end(data, start, limit)
            if isinstance(end, BadRecord):
                yield Example(line, start, end)  # the end of the element is unknown, and so is what follows
                return
            yield Example(line, start, data[start:end])
            comma = _NOT_SPACE.search(data, end)
            position = end
            if comma and data[comma.start() : comma.start() + 1] == b",":
                position = comma.start() + 1


def _element_end(data: mmap.mmap, start: int, limit: int) -> int | BadRecord:
    depth, position, bound = 0, start, min(len(data), start + limit)
    while True:
        found = _TO_BRACKET.match(data, position, bound)
        if not found:
            size = f"is longer than {limit} bytes" if bound < len(data) else "is cut off by the end of the file"
            return BadRecord(f"array element {size}")
        position = found.end()
        depth += 1 if found[1] in b"{[" else -1
        if depth > MAX_DEPTH:
            return BadRecord(f"is nested deeper than {MAX_DEPTH} levels")
        if depth == 0:
            return position


def _newlines(data: mmap.mmap, start: int, end: int) -> int:
    return sum(data[at : min(end, at + (1 << 20))].count(b"\n") for at in range(start, end, 1 << 20))
