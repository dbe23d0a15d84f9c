"""Cuts a data file into its examples and parses each, in bounded memory.

A hostile file costs no more than a good one: lines are read with a limit, JSON arrays are cut into their elements
over a memory map, and every element is parsed alone by orjson, which is strict UTF-8 and strict JSON, and refuses
nesting beyond 1024.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import orjson

from train.data.formats import BadRecord
from weights.format.foreign_json import is_deeper

MAX_EXAMPLE_BYTES = 16 * 2**20
MAX_DEPTH = 64
# In one record, also in its texts, some of which hold JSON that is parsed. Parsing holds up every other thread of the
# process: 16 MiB of "[]," do so for 3 s and take 570 MiB.
MAX_BRACKETS, MAX_COMMAS = 100_000, 1_000_000

# One match runs up to the next bracket outside a string. Possessive (Python 3.11): no backtracking, so the time is
# linear in what is scanned, whatever the bytes are.
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+([{}\[\]])', re.DOTALL)
_LETTERS_BEYOND_ASCII = re.compile(rb"[\x80-\xff]{4}")
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_MARK = b"\xef\xbb\xbf"


class Example(NamedTuple):
    """One example of a file: the number of its line, where its bytes begin, and they; or why they cannot be read."""

    line: int
    offset: int
    raw: bytes | BadRecord


def parse(raw: bytes) -> Any:
    """The JSON value of one example. Raises BadRecord with the reason."""
    # Counting is cheap, parsing is not.
    brackets, commas = raw.count(b"{") + raw.count(b"["), raw.count(b",")
    for what, count, most in (("brackets", brackets, MAX_BRACKETS), ("commas", commas, MAX_COMMAS)):
        if count > most:
            raise BadRecord(f"has {count} {what}; the limit for one example is {most}")
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRecord(_why_no_json(raw, error)) from error
    # Walking is not cheap either, but few records have enough brackets to be too deep.
    if brackets > MAX_DEPTH and is_deeper(record, MAX_DEPTH):
        raise BadRecord(f"is nested deeper than {MAX_DEPTH} levels")
    return record


def _why_no_json(raw: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as wrong:
        byte = f"byte {wrong.start + 1} is 0x{raw[wrong.start]:02x}"
        return f"is not UTF-8 ({byte}); save the file as UTF-8, or convert it: {_conversion(raw)}"
    if raw.lstrip()[:1] not in (b"{", b"[", b'"'):
        return "is not valid JSON: expected one example in braces on each line, not a table (CSV) or plain text"
    # Its own words name a line of the example, which is the first of many lines to who reads them.
    return f"is not valid JSON ({error.msg} at character {error.pos + 1})"


def _conversion(raw: bytes) -> str:
    """The command that makes UTF-8 of it. Chinese that is read as Latin-1 would be valid, and learnt, as other letters;
    no Western text has four letters with accents in a row."""
    if _LETTERS_BEYOND_ASCII.search(raw):
        try:
            raw.decode("gb18030")
        except UnicodeDecodeError:
            return "iconv -f ENCODING -t utf-8, with the encoding that it was saved in"
        return "iconv -f gb18030 -t utf-8, if it is Chinese; otherwise with the encoding that it was saved in"
    return "iconv -f latin1 -t utf-8"


def examples(file: BinaryIO, limit: int = MAX_EXAMPLE_BYTES) -> Iterator[Example]:
    """Those of JSONL or of a JSON array; a BadRecord in place of what is too big."""
    head = file.read(4096).removeprefix(_MARK)
    file.seek(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        yield Example(1, 0, BadRecord("the file is UTF-16; save it as UTF-8"))
    elif head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        yield Example(1, 0, BadRecord("the file is compressed; upload it unpacked"))
    elif head.lstrip().startswith(b"["):
        yield from _array_elements(file, limit)
    else:
        yield from _lines(file, limit)


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
        if number == 1 and raw.startswith(_MARK):
            raw, start = raw.removeprefix(_MARK), len(_MARK)
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
