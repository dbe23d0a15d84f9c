"""Splits a data file into its examples, parses each example, and reports errors by line of the file.

A hostile file costs no more than a good one: lines have a limit and are parsed one by one, and a JSON array, which is
parsed whole, has a limit too. For a file in another format, the error has a command that converts it to JSON lines.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import orjson

from weights.format.foreign_json import is_exceeding

Record = dict[str, Any]
Refuses = Mapping[str, tuple[Callable[[Any], bool], str]]
MAX_DEPTH = 64
MAX_EXAMPLE_BYTES, MAX_ARRAY_BYTES = 16 * 2**20, 256 * 2**20

MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8. Joined files have it in their middle too."""
_PANDAS = (
    "python3 -c \"import pandas as pd; pd.{}.to_json('train.jsonl', orient='records', lines=True, force_ascii=False)\""
)
_UTF8 = "save it as UTF-8: iconv -f {} -t utf-8 FILE > train.jsonl"
_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (rb"\xff\xfe|\xfe\xff", "UTF-16", _UTF8.format("utf-16")),
    (rb"[\[{\r\n \"]\0", "UTF-16", _UTF8.format("utf-16le")),
    (rb"\0[\[{\r\n \"]", "UTF-16", _UTF8.format("utf-16be")),
    (rb"PAR1", "a Parquet table", _PANDAS.format("read_parquet('FILE')")),
    (rb"\xd0\xcf\x11\xe0|PK\x03\x04(?=.*xl/)", "a sheet of Excel", _PANDAS.format("read_excel('FILE')")),
    (rb"PK\x03\x04", "a ZIP archive", "unzip -p FILE > train.jsonl"),
    (rb"\x1f\x8b", "compressed with gzip", "gzip -dc FILE > train.jsonl"),
    (rb"\xfd7zXZ\0", "compressed with xz", "xz -dc FILE > train.jsonl"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", "zstd -dc FILE > train.jsonl"),
    (rb"version https://git-lfs", "a pointer of Git LFS, not the data itself", "git lfs pull"),
    (rb"(?i)\s*<(?:!doctype|html|\?xml|[a-z]+[ >])", "a page of HTML or XML, not data", "download the data itself"),
)
_DELIMITERS = ((b"\t", "TSV", ", sep='\\t'"), (b",", "CSV", ""), (b";", "CSV", ", sep=';'"))
_OF_A_TURN = ({"role", "from"}, {"content", "value", "tool_calls", "function_call"})
_TURNS = ("messages", "conversations", "conversation")

# A string, or a bare NaN outside strings. Possessive repetitions keep the time linear in the text.
_STRING_OR_NAN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|\bNaN\b', re.DOTALL)
_ESCAPED_COLON = re.compile(rb"\\u003a", re.IGNORECASE)
_PYTHON = re.compile(r"'|None\b|True\b|False\b")
_PYTHON_TO_JSON = (
    'python3 -c "import ast, json, sys; [print(json.dumps(ast.literal_eval(l))) for l in sys.stdin]"'
    " < FILE > train.jsonl"
)


class BadRecord(Exception):
    """One record cannot be used; reports show the reason with its line number."""


class NoAnswer(BadRecord):
    """The text of an answer or a document is empty."""


class BadFile(BadRecord):
    """The whole file cannot be used; reading stops here."""


# -- files -------------------------------------------------------------------------------------------------------------


Line = tuple[int, bytes | BadRecord]
"""One example of a file: the number of its line or of its array element, and its bytes or the error of reading it."""


def parse(raw: bytes) -> Any:
    """Return the JSON value of one example; a conversation that is a bare list becomes a record. Raises BadRecord."""
    record = loads(raw)
    for key in _TURNS if isinstance(record, dict) else ():
        if isinstance(text := record.get(key), str) and text.lstrip().startswith("["):
            record[key] = loads(text.encode())  # tables store a list of turns as JSON text
    return {"messages": record} if _is_conversation(record) else record


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and all(not names.isdisjoint(turn) for names in _OF_A_TURN) for turn in value)
    )


def examples(file: BinaryIO) -> Iterator[Line]:
    """Yield the examples of JSONL or of a JSON array; a BadRecord for an example that is too big, and a BadFile where
    reading must stop."""
    try:
        file.seek(0)
        if foreign := foreign_file(file):
            raise BadRecord(f"the file is {foreign[0]}; expected one JSON object on each line: {foreign[1]}")
        array = _array(file)
    except BadRecord as bad:
        yield 1, BadFile(str(bad))
        return
    if array is not None:
        for number, element in enumerate(array, 1):
            raw = orjson.dumps(element)
            limit = f"is {len(raw)} bytes long; the limit for one example is {MAX_EXAMPLE_BYTES}"
            yield number, raw if len(raw) <= MAX_EXAMPLE_BYTES else BadRecord(limit)
        return
    file.seek(0)
    for number, line in enumerate(iter(lambda: file.readline(MAX_EXAMPLE_BYTES + 1), b""), 1):
        if len(line) > MAX_EXAMPLE_BYTES:
            limit = f"is longer than {MAX_EXAMPLE_BYTES} bytes, the limit for one example"
            yield number, BadFile(f"{limit}; the lines after it were not checked")
            return
        if raw := _bare(line):
            yield number, raw


def _array(file: BinaryIO) -> list[Any] | None:
    """Return the elements of a file that is one JSON array; None for JSON lines. Raises BadRecord for an unreadable
    array and for objects over several lines."""
    first = b""
    while not first and (line := file.readline(MAX_EXAMPLE_BYTES + 1)):
        first = _bare(line)
    try:
        value = parse(first)
    except BadRecord as bad:
        if first[:1] == b"{" and len(first) <= MAX_EXAMPLE_BYTES and "unexpected end of data" in str(bad):
            with suppress(BadRecord):
                parse(_bare(file.readline(MAX_EXAMPLE_BYTES + 1)))
                return None  # only the first line is broken
            raise BadRecord(
                "the first line ends within an object, so no other line was checked; expected one example per line "
                "(for objects over several lines: jq -c . FILE > train.jsonl)"
            ) from None
        if not first.startswith(b"["):
            return None
        if (size := file.seek(0, 2)) > MAX_ARRAY_BYTES:
            raise BadRecord(
                f"the file is a JSON array of {size} bytes; arrays may have {MAX_ARRAY_BYTES}, JSON lines any number: "
                "jq -c '.[]' FILE > train.jsonl"
            ) from None
        file.seek(0)
        value = loads(_bare(file.read()))
    if not isinstance(value, list) or any(map(_bare, file)):  # several lists are JSON lines, not one array
        return None
    return [value] if _is_conversation(value) else value


def _bare(raw: bytes) -> bytes:
    raw = raw.strip()
    while raw.startswith(MARK):
        raw = raw[len(MARK) :].strip()
    return raw


def foreign_file(file: BinaryIO) -> tuple[str, str] | None:
    """Return the kind of a file that is neither JSON lines nor a JSON array, and the command that converts the file;
    else None. Afterwards the file is at its beginning."""
    head = file.read(4096)
    file.seek(0)
    for beginning, kind, command in _BEGINNINGS:
        if re.match(beginning, head, re.DOTALL):
            return kind, command
    text = head.removeprefix(MARK).lstrip()
    first, second, *_ = [*text.split(b"\n"), b""]
    for delimiter, name, option in _DELIMITERS if b"{" not in first and not first.startswith(b"[") else ():
        if delimiter in first and delimiter in second:
            return f"a table ({name})", _PANDAS.format(f"read_csv('FILE'{option})")
    return None


# -- the JSON of one example -------------------------------------------------------------------------------------------


def loads(raw: bytes) -> Any:
    """Parse JSON: UTF-8, at most MAX_DEPTH levels, no key twice in an object, NaN as null. Raises BadRecord."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # Python's json and pandas write an empty cell as NaN.
        without = _STRING_OR_NAN.sub(lambda match: match[0] if match[0][:1] == b'"' else b"null", raw)
        if without == raw:
            raise BadRecord(_why_not_json(raw, error)) from None
        return loads(without)
    # Measure the depth only of records with many brackets: walking through every record would take long.
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and is_exceeding(value, MAX_DEPTH):
        raise BadRecord(f"is nested deeper than {MAX_DEPTH} levels")
    # orjson drops the first of two equal keys. Each key has a colon, so too many colons reveal a lost key, unless a
    # string has an escaped colon.
    if raw.count(b":") != orjson.dumps(value).count(b":") or _ESCAPED_COLON.search(raw):
        json.loads(raw, object_pairs_hook=_refuse_twice)
    return value


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Raise BadRecord for an object that has a key twice."""
    if len(dict(pairs)) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise BadRecord(f"has the key {key[:60]!r} twice in one object; only one of the two values can be meant")


def _why_not_json(raw: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return (
            "is not UTF-8: iconv -f ENCODING -t utf-8 FILE > train.jsonl, with the encoding that it was saved in "
            "(often windows-1252 of Western texts, gb18030 of Chinese ones)"
        )
    rest = text[error.pos :].strip()
    if _PYTHON.match(rest):
        return f"is written as Python prints it, expected JSON: {_PYTHON_TO_JSON}"
    if rest[:1] in ("\u201c", "\u201d", "\u2018", "\u2019"):
        return "is not valid JSON: its keys have curly quotes, expected straight ones"
    if text.lstrip()[:1] not in ("{", "[", '"'):
        return "is not valid JSON: expected one example in braces on each line, not a table (CSV) or plain text"
    if rest == ",":
        return "is not valid JSON: a comma follows the example; expected one example on each line, nothing between them"
    if rest[:1] in ("{", "[") and error.msg.startswith("unexpected content after"):
        return "has several JSON values on one line; expected one example on each: jq -c . FILE > train.jsonl"
    if rest.startswith("Infinity"):
        return f"has Infinity at character {error.pos + 1}, which JSON does not know; expected a number or null"
    # orjson's message names a line within the example, which a reader would mistake for a line of the file.
    return f"is not valid JSON ({error.msg} at character {error.pos + 1})"


# -- values and fields -------------------------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """Return the name of a JSON value's type for errors."""
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def has_value(value: Any) -> bool:
    """Whether the value is neither null nor an empty string, list or object."""
    return value is not None and (bool(value) or not isinstance(value, (str, list, dict)))


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


class Fields:
    """One object of a row; use in a `with`, which at its end refuses unread fields or reports them as ignored.

    Args:
        left_out: receives the names of ignored fields: `source`, `messages[].id`.
        where: the object's place in the row: `messages[3]`; "" for the row itself.
        refuses: for each key, a test for values that make the row unusable, and the reason.
    """

    def __init__(self, record: Record, left_out: set[str], where: str = "", refuses: Refuses | None = None):
        self.record, self.left_out, self.unread, self._refuses = record, left_out, dict(record), refuses or {}
        self._prefix, self._path = (f"{where} ", re.sub(r"\[\d+\]", "[]", f"{where}.")) if where else ("", "")

    def __enter__(self) -> Fields:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.refuse()
            self.left_out.update(f"{self._path}{key}" for key, value in self.unread.items() if has_value(value))

    def refuse(self) -> None:
        """Raise BadRecord for an unread field that the object must not have."""
        for key, value in self.unread.items():
            if key in self._refuses and self._refuses[key][0](value):
                raise BadRecord(f"{self._prefix}has {key!r}: {self._refuses[key][1]}")

    def take(self, *names: str) -> Any:
        """Return the value of a field with several names; None without a value. Raises BadRecord if two names have
        different values."""
        for name in names:
            self.unread.pop(name, None)
        first, *others = [name for name in names if has_value(self.record.get(name))] or [self.name(*names)]
        for other in others:
            if self.record[other] != self.record[first]:
                raise BadRecord(
                    f"{self._prefix}has both {first!r} and {other!r}, which differ; expected one of the two"
                )
        return self.record.get(first)

    def text(self, *names: str) -> str | None:
        """Return the value like `take`, but None for an empty value. Raises BadRecord if it is not a string."""
        value = self.take(*names)
        if not has_value(value):
            return None
        if not isinstance(value, str):
            raise BadRecord(f"{self._prefix}has a {kind_of(value)} as {self.name(*names)!r}, expected a string")
        return value

    def name(self, *names: str) -> str:
        """Return the name under which the object has a value, else the first name that is a key."""
        full = (name for name in names if self.record.get(name) is not None)
        return next(full, next((name for name in names if name in self.record), names[0]))
