"""Check an uploaded data file before any device is taken, and rewrite it for the run. No torch; bounded memory: a
hostile file costs no more than a good one (train.data.records)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from train.data.formats import TEXT, Example, convert, shape_of
from train.data.records import BadFile, BadRecord, Line, Record, examples, parse

MAX_LISTED_ERRORS = 100
# The check stops after this many bad examples, which bounds its time even for a billion of them.
MAX_COUNTED_ERRORS = 10_000
# Keys and roles in a reason come from the file and may be as long as an example.
MAX_REASON_CHARACTERS = 300
MIN_EXAMPLES = 10
# Names of keys come from the file too.
MAX_LEFT_OUT, _MAX_NAME = 30, 60
# Examples whose tokens are counted, from the first on; those after them are estimated, corrected by what the first say.
COUNTED_EXAMPLES = 2000

_SHAPE_EXAMPLES = 100  # the first ones, by which the shape of a file is known
_BYTES_PER_TOKEN = 3.5  # English text under a common byte-pair vocabulary; only an estimate is made from it
_TOKENS_PER_MESSAGE = 5  # role and delimiters of a chat template

Count = Callable[[Record], list[list[int]]]
Refuses = Callable[[str], str | None]
"""`Method.refuses`."""


@dataclass
class DataReport:
    """What is in a data file; the longest example is measured by the longest of its sequences. `errors` has the first
    MAX_LISTED_ERRORS of `n_errors` (line, reason) pairs; counting stops at MAX_COUNTED_ERRORS. Tokens are counted or
    estimated, see `check_training_file`. n_rows: what is trained, more than the examples where the model's template
    needs a row for each turn; `example_tokens` has the tokens of each of the first COUNTED_EXAMPLES rows.
    n_tokens_by_size: as the bytes of the examples alone would have it, of each a row.
    `warnings` say what may be wrong, `notes` what was done. `left_out`: in how many examples each key was not read."""

    shape: str = "empty"
    n_examples: int = 0
    n_rows: int = 0
    n_tokens_estimate: int = 0
    n_tokens_by_size: int = 0
    longest_example_tokens: int = 0
    example_tokens: list[int] = field(default_factory=list)
    n_errors: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.n_errors == 0

    def add_error(self, line: int, reason: str) -> None:
        self.n_errors += 1
        if len(self.errors) < MAX_LISTED_ERRORS:
            cut = reason[: MAX_REASON_CHARACTERS - 1] + "…" if len(reason) > MAX_REASON_CHARACTERS else reason
            self.errors.append((line, cut))


@dataclass(slots=True)
class Read:
    """One example of a file: its line, and what it is, or why it cannot be used. shape: of the file."""

    line: int
    shape: str = ""
    example: Example | None = None
    bad: BadRecord | None = None


def read_examples(path: str | Path, refuses: Refuses | None = None) -> Iterator[Read]:
    """Every example of a file. The shape of most of the first is that of all, of those that the method takes if
    `refuses` says which; a record of another shape is unusable, and so is a file of which it takes none. Raises
    OSError."""
    with open(path, "rb") as file:
        shape = _usual_shape(islice(examples(file), _SHAPE_EXAMPLES), refuses)
        for line, raw in examples(file):  # read again: the first ones may take 1.6 GiB together
            read = Read(line)
            try:
                if isinstance(raw, BadRecord):
                    raise raw
                record = parse(raw)
                own = shape_of(record)
                read.shape = shape = shape or own
                if refuses and (refusal := refuses(shape)):
                    raise BadFile(refusal)
                if own != shape:
                    ends = " (its last message is from the user)" if own == "prompt" else ""
                    why = (refuses(own) if refuses else None) or f"has the shape {own!r}{ends}"
                    raise BadRecord(f"{why}; most of the file's first examples are {shape!r}")
                read.example = convert(record)
            except BadRecord as bad:
                read.bad = bad
            yield read


def _usual_shape(first: Iterable[Line], refuses: Refuses | None) -> str | None:
    seen: Counter[str] = Counter()
    for example in first:
        with suppress(BadRecord):
            if not isinstance(example.raw, BadRecord):
                seen[shape_of(parse(example.raw))] += 1
    return max(seen, key=lambda shape: (refuses is None or refuses(shape) is None, seen[shape]), default=None)


def check_training_file(
    path: str | Path,
    *,
    chat_path: str | Path | None = None,
    count: Count | None = None,
    counted: int = COUNTED_EXAMPLES,
    refuses: Refuses | None = None,
    visit: Callable[[Read, list[list[int]]], None] = lambda read, rows: None,
) -> DataReport:
    """Read the whole file and report on it; with `chat_path`, also write it there as JSONL (mode 0600).

    `refuses`: as `read_examples` has it. `count` gives the tokens of each sequence of each row of a converted record,
    for `counted` records, BadRecord if the model's chat template or the method refuses it; without it they are
    estimated. The chat file exists afterwards only if the report is `ok`. `visit` gets each example with its tokens, or
    none of a bad one. Raises OSError if the file is unreadable.
    """
    report, partial = DataReport(), Path(f"{chat_path}.partial")
    with ExitStack() as stack:
        output = None
        if chat_path:
            stack.callback(partial.unlink, missing_ok=True)
            number = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            output = stack.enter_context(os.fdopen(number, "wb"))
        for read in read_examples(path, refuses):
            report.shape, rows = read.shape or report.shape, list[list[int]]()
            if read.example is not None:
                try:
                    rows = _rows(report, read.example.record, count, counted)
                    _add(report, read.example, rows)
                    if output:
                        output.write(orjson.dumps(read.example.record) + b"\n")
                except BadRecord as bad:
                    read.bad = bad
            visit(read, rows)
            if read.bad is not None:
                report.add_error(read.line, str(read.bad))
                if isinstance(read.bad, BadFile) or report.n_errors >= MAX_COUNTED_ERRORS:
                    break
        _summarise(report)
        if output and chat_path and report.ok:
            output.flush()
            partial.rename(chat_path)
    return report


def _rows(report: DataReport, record: Record, count: Count | None, counted: int) -> list[list[int]]:
    """The tokens of each sequence of each row of a converted record. Raises BadRecord."""
    estimates = [_estimate_tokens(chat) for chat in record.get("sequences", (record,))]
    rows = [estimates]
    if count is not None and report.n_examples < counted:
        rows = count(record)
    elif count is not None:  # as many as the examples before have for what was estimated of them
        of_each = max(1, round(report.n_rows / report.n_examples))
        scale = report.n_tokens_estimate / max(1, report.n_tokens_by_size * of_each)
        rows = [[round(estimate * scale) for estimate in estimates]] * of_each
    report.n_tokens_by_size += sum(estimates)
    return rows


def _add(report: DataReport, example: Example, rows: list[list[int]]) -> None:
    for name in example.left_out:
        short = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
        key = short if short in report.left_out or len(report.left_out) < MAX_LEFT_OUT else "others"
        report.left_out[key] = report.left_out.get(key, 0) + 1
    report.n_examples += 1
    report.n_rows += len(rows)
    report.n_tokens_estimate += sum(map(sum, rows))
    report.example_tokens += map(sum, rows[: max(0, COUNTED_EXAMPLES - len(report.example_tokens))])
    report.longest_example_tokens = max(report.longest_example_tokens, *map(max, rows))


def _estimate_tokens(chat: dict[str, Any]) -> int:
    """The tokens of a converted chat or document, estimated from its bytes."""
    if "text" in chat:
        return int(len(chat["text"].encode()) / _BYTES_PER_TOKEN) + 1
    size = len(orjson.dumps(chat["tools"])) if chat.get("tools") else 0
    for message in chat["messages"]:
        size += len(message["content"].encode()) + len(orjson.dumps(message.get("tool_calls", "")))
    return int(size / _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * len(chat["messages"])


def _summarise(report: DataReport) -> None:
    if report.n_examples == 0 and report.n_errors == 0:
        report.add_error(1, "the file has no examples")
    if report.ok and report.n_examples < MIN_EXAMPLES:
        report.warnings.append(f"only {report.n_examples} examples; to learn from, at least {MIN_EXAMPLES} are wanted")
    if report.ok and report.shape == "unpaired":
        report.notes.append("the answers are marked good or bad (label): only the method kto learns from such a file")
    elif report.ok and report.shape not in ("chat", "preference", "prompt", TEXT):
        report.notes.append(f"converted {report.n_examples} examples from the {report.shape} shape to chat")
    if report.ok and report.left_out:
        keys = ", ".join(f"{name} ({count})" for name, count in sorted(report.left_out.items()))
        report.notes.append(f"left out these keys, which are not trained (number of examples): {keys}")
