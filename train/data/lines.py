"""Cuts a data file into its examples and parses each.

A hostile file costs no more than a good one: lines are read with a limit, each is parsed alone (train.data.records),
and the size of a JSON array, which is parsed whole, is bounded. A file of another kind is named, with the one command
that makes JSON lines of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import orjson

from train.data.records import BadFile, BadRecord, loads

MAX_EXAMPLE_BYTES, MAX_ARRAY_BYTES = 16 * 2**20, 256 * 2**20

_HEAD, _TAIL = 4096, 1 << 16
MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8. Files that were joined have one in their middle."""


_PANDAS = (
    "python3 -c \"import pandas as pd; pd.{}.to_json('train.jsonl', orient='records', lines=True, force_ascii=False)\""
)
_UTF8 = "save it as UTF-8: iconv -f {} -t utf-8 FILE > train.jsonl"
_DATASETS = "python3 -c \"import datasets; datasets.Dataset.from_file('FILE').to_json('train.jsonl')\""
_SQLITE = "sqlite3 -json FILE 'select * from TABLE' | jq -c '.[]' > train.jsonl"
_WRITE = "write its examples as JSON lines, one object on each"
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (rb"\xff\xfe\0\0|\0\0\xfe\xff", "UTF-32", _UTF8.format("utf-32")),
    (rb"\xff\xfe|\xfe\xff", "UTF-16", _UTF8.format("utf-16")),
    (rb"[\[{\r\n \"]\0", "UTF-16", _UTF8.format("utf-16le")),
    (rb"\0[\[{\r\n \"]", "UTF-16", _UTF8.format("utf-16be")),
    (rb"PAR1", "a Parquet table", _PANDAS.format("read_parquet('FILE')")),
    (rb"ARROW1", "an Arrow (Feather) table", _PANDAS.format("read_feather('FILE')")),
    (rb"\xff\xff\xff\xff", "an Arrow stream, as datasets keeps its tables", _DATASETS),
    (rb"SQLite format 3\0", "a SQLite database", _SQLITE),
    (rb"\xd0\xcf\x11\xe0|PK\x03\x04(?=.*xl/workbook)", "a sheet of Excel", _PANDAS.format("read_excel('FILE')")),
    (rb"PK\x03\x04(?=.*word/document)|%PDF", "a document", _WRITE),
    (rb"PK\x03\x04(?=.*/data\.pkl)|\x80[\x02-\x05]|\x93NUMPY", "a file of Python's", _WRITE),
    (rb"PK\x03\x04", "a ZIP archive", "unzip -p FILE > train.jsonl"),
    (rb"\x1f\x8b", "compressed with gzip", "gzip -dc FILE > train.jsonl"),
    (rb"\xfd7zXZ\0", "compressed with xz", "xz -dc FILE > train.jsonl"),
    (rb"BZh", "compressed with bzip2", "bzip2 -dc FILE > train.jsonl"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", "zstd -dc FILE > train.jsonl"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x -so FILE > train.jsonl"),
    (rb".{257}ustar", "a tar archive", "tar -xOf FILE > train.jsonl"),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the data itself", "git lfs pull"),
    (rb"(?i)\s*<(?:!doctype|html|\?xml|[a-z]+[ >])", "a page of HTML or XML, not data", "download the data itself"),
)
_DELIMITERS = ((b"\t", "TSV", ", sep='\\t'"), (b",", "CSV", ""), (b";", "CSV", ", sep=';'"))
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
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and all(not names.isdisjoint(turn) for names in _OF_A_TURN) for turn in value)
    )


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


# -- other kinds of files ----------------------------------------------------------------------------------------------


def foreign_file(file: BinaryIO) -> tuple[str, str] | None:
    """What a file is that cannot be JSON lines or a JSON array, and the command that converts it; None for all others.
    Leaves the file at its beginning."""
    head = file.read(_HEAD)
    file.seek(max(0, file.seek(0, 2) - _TAIL))
    names = head + file.read()  # those in a ZIP archive, most of which stand at its end
    file.seek(0)
    for begins, what, command in _BEGINNINGS:
        if re.match(begins, names, re.DOTALL):
            return what, command
    text = head.removeprefix(MARK).lstrip()
    return None if text[:1] in (b"{", b"[") else _table(text.split(b"\n"))


def _table(lines: list[bytes]) -> tuple[str, str] | None:
    """A table of text: its first two lines have the same delimiter, the first without braces."""
    first, second = lines[0], lines[1] if len(lines) > 1 else b""
    for delimiter, name, option in _DELIMITERS:
        if delimiter in first and delimiter in second and b"{" not in first:
            return f"a table ({name})", _PANDAS.format(f"read_csv('FILE'{option})")
    return None
