"""Check an uploaded data file before any device is taken, and rewrite it for the run. No torch; bounded memory.

A hostile file costs no more than a good one: lines are read with a limit, JSON arrays are cut into their elements
over a memory map, and every element is parsed alone by orjson, which is strict UTF-8 and strict JSON, and refuses
nesting beyond 1024.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from train.data.formats import BadRecord, Record, is_deeper, shape_of, to_chat

MAX_EXAMPLE_BYTES = 16 * 2**20
MAX_DEPTH = 64
MAX_LISTED_ERRORS = 100
# The check stops after this many bad examples, which bounds its time even for a billion of them.
MAX_COUNTED_ERRORS = 10_000
# Keys and roles in a reason come from the file and may be as long as an example.
MAX_REASON_CHARACTERS = 300
# In one record, also in its texts, some of which hold JSON that is parsed. Parsing holds up every other thread of the
# process: 16 MiB of "[]," do so for 3 s and take 570 MiB.
MAX_BRACKETS, MAX_COMMAS = 100_000, 1_000_000
MIN_EXAMPLES = 10
# Examples whose tokens are counted, from the first on; those after them are estimated, corrected by what the first say.
COUNTED_EXAMPLES = 2000

_BYTES_PER_TOKEN = 3.5  # English text under a common byte-pair vocabulary; only an estimate is made from it
_TOKENS_PER_MESSAGE = 5  # role and delimiters of a chat template

Convert = Callable[[Record, str], Record | None]
Count = Callable[[Record], list[int]]
Heard = Callable[[int, float], None]
"""How far a check is: examples, good or bad, and the share of the file that they are, at most 1."""

# One match runs up to the next bracket outside a string. Possessive (Python 3.11): no backtracking, so the time is
# linear in what is scanned, whatever the bytes are.
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+([{}\[\]])', re.DOTALL)
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")


@dataclass
class DataReport:
    """What is in a data file; the longest example is measured by the longest of its sequences. `errors` has the first
    MAX_LISTED_ERRORS of `n_errors` (line, reason) pairs; counting stops at MAX_COUNTED_ERRORS. Tokens are counted or
    estimated, see `check_training_file`; `example_tokens` has those of each of the first COUNTED_EXAMPLES examples.
    `warnings` say what may be wrong, `notes` what was done."""

    shape: str = "empty"
    n_examples: int = 0
    n_tokens_estimate: int = 0
    longest_example_tokens: int = 0
    example_tokens: list[int] = field(default_factory=list)
    n_errors: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.n_errors == 0

    def add_error(self, line: int, reason: str) -> None:
        self.n_errors += 1
        if len(self.errors) < MAX_LISTED_ERRORS:
            cut = reason[: MAX_REASON_CHARACTERS - 1] + "…" if len(reason) > MAX_REASON_CHARACTERS else reason
            self.errors.append((line, cut))


def check_training_file(
    path: str | Path,
    *,
    chat_path: str | Path | None = None,
    max_example_bytes: int = MAX_EXAMPLE_BYTES,
    convert: Convert = to_chat,
    count: Count | None = None,
    counted: int = COUNTED_EXAMPLES,
    heard: Heard | None = None,
) -> DataReport:
    """Read the whole file once and report on it; with `chat_path`, also write it there as JSONL (mode 0600).

    The shape of the first readable record is the shape of the file; a record of another shape is an error. `convert`
    (train.methods: a method's, or that of all) makes what is written of a record, None if there is nothing to write.
    `count` gives the tokens of each sequence of a converted record, for so many records (`counted`), BadRecord if the
    model's chat template or the method refuses it; without it they are estimated. `heard` is called after each example.
    The chat file exists afterwards only
    if the report is `ok` and its records were converted. Raises OSError if the file is unreadable.
    """
    report = DataReport()
    tokens = _Tokens(count, counted)
    partial = Path(f"{chat_path}.partial") if chat_path else None
    written, examples, read_bytes = False, 0, 0
    size = max(1, os.stat(path).st_size)
    output = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") if partial else None
    try:
        with open(path, "rb") as file:
            for line, raw in _examples(file, max_example_bytes):
                try:
                    written = _example(report, raw, output, convert, tokens)
                except BadRecord as bad:
                    report.add_error(line, str(bad))
                    if report.n_errors >= MAX_COUNTED_ERRORS:
                        break
                if heard is not None:
                    examples, read_bytes = examples + 1, read_bytes + (len(raw) if isinstance(raw, bytes) else 0)
                    heard(examples, min(1.0, read_bytes / size))
    except BaseException:
        if partial:
            partial.unlink(missing_ok=True)
        raise
    finally:
        if output:
            output.close()
    _summarise(report)
    if partial:
        if report.ok and written:
            partial.rename(chat_path)
        else:
            partial.unlink()
    return report


class _Tokens:
    """Tokens of records: those of the first are counted where there is something that can, the others estimated."""

    def __init__(self, count: Count | None, most: int):
        self._count, self._most = count, most
        self._counted, self._tokens, self._estimated = 0, 0, 0

    def of(self, made: Record | None) -> list[int]:
        """Of each sequence of a converted record. Raises BadRecord."""
        if made is None:
            return [0]
        estimates = [_estimate_tokens(chat) for chat in made.get("sequences", (made,))]
        if self._count is None:
            return estimates
        if self._counted == self._most:
            return [int(estimate * self._tokens / max(1, self._estimated)) for estimate in estimates]
        tokens = self._count(made)
        self._counted += 1
        self._tokens += sum(tokens)
        self._estimated += sum(estimates)
        return tokens


def _example(
    report: DataReport, raw: bytes | BadRecord, output: BinaryIO | None, convert: Convert, tokens_of: _Tokens
) -> bool:
    """Whether it was converted."""
    if isinstance(raw, BadRecord):
        raise raw
    record = _parse(raw)
    shape = shape_of(record)
    if report.shape == "empty":
        report.shape = shape
    if (report.shape, shape) == ("chat", "prompt"):
        shape = "chat"  # whoever converts it says what is missing
    if shape != report.shape:
        raise BadRecord(f"has the shape {shape!r}, but the file began with {report.shape!r}")
    made = convert(record, shape)
    sequences = tokens_of.of(made)
    if output and made is not None:
        output.write(orjson.dumps(made) + b"\n")
    report.n_examples += 1
    report.n_tokens_estimate += sum(sequences)
    if len(report.example_tokens) < COUNTED_EXAMPLES:
        report.example_tokens.append(sum(sequences))
    report.longest_example_tokens = max(report.longest_example_tokens, *sequences)
    return made is not None


def _parse(raw: bytes) -> Any:
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
        return f"is not UTF-8 ({byte}); save the file as UTF-8, or convert it: iconv -f latin1 -t utf-8"
    if raw.lstrip()[:1] not in (b"{", b"[", b'"'):
        return "is not valid JSON: expected one example in braces on each line, not a table (CSV) or plain text"
    return f"is not valid JSON ({error})"


def _estimate_tokens(chat: dict[str, Any]) -> int:
    size = len(orjson.dumps(chat["tools"])) if chat.get("tools") else 0
    for message in chat["messages"]:
        size += len(message["content"].encode()) + len(orjson.dumps(message.get("tool_calls", "")))
    return int(size / _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * len(chat["messages"])


def _summarise(report: DataReport) -> None:
    if report.n_examples == 0 and report.n_errors == 0:
        report.add_error(1, "the file has no examples")
    if report.ok and report.n_examples < MIN_EXAMPLES:
        report.warnings.append(f"only {report.n_examples} examples; fine-tuning wants at least {MIN_EXAMPLES}")
    if report.ok and report.shape not in ("chat", "preference", "prompt"):
        report.notes.append(f"converted {report.n_examples} examples from the {report.shape} shape to chat")


def _examples(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | BadRecord]]:
    """(line number, bytes of one record) for JSONL and for a JSON array; a BadRecord in place of what is too big."""
    head = file.read(4096).removeprefix(b"\xef\xbb\xbf")
    file.seek(0)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        yield 1, BadRecord("the file is UTF-16; save it as UTF-8")
    elif head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")):
        yield 1, BadRecord("the file is compressed; upload it unpacked")
    elif head.lstrip().startswith(b"["):
        yield from _array_elements(file, limit)
    else:
        yield from _lines(file, limit)


def _lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | BadRecord]]:
    number = 0
    while raw := file.readline(limit + 1):
        number += 1
        if len(raw) > limit and not raw.endswith(b"\n"):
            size = len(raw)
            while rest := file.readline(1 << 20):
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield number, BadRecord(f"is {size} bytes long; the limit for one example is {limit}")
            continue
        raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
        if raw.strip():
            yield number, raw


def _array_elements(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | BadRecord]]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position, line, counted = data.find(b"[") + 1, 1, 0
        while True:
            found = _NOT_SPACE.search(data, position)
            if not found:
                yield line, BadRecord("the file ends inside the JSON array; a closing ] is missing")
                return
            start = found.start()
            line += _newlines(data, counted, start)
            counted = start
            first = data[start : start + 1]
            if first == b"]":
                if _NOT_SPACE.search(data, start + 1):
                    yield line, BadRecord("there is text after the closing ] of the JSON array")
                return
            if first not in (b"{", b"["):
                yield line, BadRecord(f"array element starts with {first!r}; expected an object")
                return
            end = _element_end(data, start, limit)
            if isinstance(end, BadRecord):
                yield line, end  # the end of the element is unknown, and so is what follows
                return
            yield line, data[start:end]
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
