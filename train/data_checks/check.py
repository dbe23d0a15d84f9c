"""Reads a data file once, notes what each check finds in every example, and makes the report."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from train.data.check import Convert, Count, DataReport, Read, Refuses, check_training_file, read_examples
from train.data.formats import NoAnswer, Record
from train.data_checks.personal_data import masked
from train.data_checks.repeats import NearDuplicates, ValidationIndex, words_of

CHECKS = ("bad_lines", "empty", "duplicates", "near_duplicates", "too_long", "contaminated", "personal_data")
"""In the order of a report."""
_MOST_SHOWN = 20
_MOST_REASON = 300
_PERCENTILES = (5, 25, 50, 75, 95, 99)


@dataclass(slots=True)
class Row:
    """One example of the file. found: names of the checks that found something. digest: of its content, empty if it is
    unusable. of: index of the earlier row that it repeats or nearly repeats."""

    line: int
    tokens: int = 0
    digest: bytes = b""
    found: tuple[str, ...] = ()
    of: int | None = None


@dataclass(slots=True)
class Finding:
    """In how many examples a check found something, how often each kind, and the first of them."""

    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[dict[str, Any]] = field(default_factory=list)


class Check:
    """`rows` has every example of the file that `read` has read, in its order."""

    def __init__(
        self,
        convert: Convert,
        refuses: Refuses | None = None,
        count: Count | None = None,
        max_tokens: int | None = None,
        against: Path | None = None,
    ):
        """count: gives tokens of a converted record; without it they are estimated. against: the validation file.
        Raises OSError."""
        self._convert, self._refuses, self._count, self._max_tokens = convert, refuses, count, max_tokens
        self.rows: list[Row] = []
        self.bytes, self.sha256, self._read = 0, "", DataReport()
        needed = {"too_long": max_tokens is not None, "contaminated": against is not None}
        self.found = {name: Finding() for name in CHECKS if needed.get(name, True)}
        self._by_digest: dict[bytes, int] = {}
        self._near = NearDuplicates()
        self._validation = ValidationIndex(dict(self._texts(against))) if against is not None else None

    def read(self, path: Path) -> None:
        """Raises OSError."""
        with open(path, "rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self.bytes = file.tell()
        self._read = check_training_file(
            path,
            convert=self._convert,
            refuses=self._refuses,
            count=self._count,
            counted=sys.maxsize,
            look=self._look_at,
            most_errors=sys.maxsize,
        )

    def _texts(self, path: Path) -> Iterator[tuple[int, str]]:
        """(line, text) of each usable example. Raises OSError."""
        for read in read_examples(path, self._convert, self._refuses):
            if read.made is not None:
                yield read.line, _texts_of(read.made)[0]

    def report(self, name: str) -> dict[str, Any]:
        """The report as plain JSON values. name: what it calls the file. `usable`: whether a job would take it."""
        good = [row for row in self.rows if row.digest]
        tokens = np.array([row.tokens for row in good], np.int64)
        return {
            "object": "file.check",
            "file": {"file": name, "bytes": self.bytes, "sha256": self.sha256, "shape": self._read.shape},
            "examples": len(self.rows),
            "usable": 0 < len(good) == len(self.rows),
            "checks": {name: self._finding(found) for name, found in self.found.items()},
            "keys_left_out": dict(sorted(self._read.left_out.items())),
            "tokens": {"total": int(tokens.sum()), "exact": self._count is not None, "most_allowed": self._max_tokens},
            "lengths": _lengths(tokens) if len(tokens) else {},
        }

    def _finding(self, found: Finding) -> dict[str, Any]:
        share = round(found.count / max(1, len(self.rows)), 6)
        kinds = {"kinds": dict(found.kinds.most_common())} if found.kinds else {}
        return {"count": found.count, "share": share, **kinds, "first": found.first}

    def _look_at(self, read: Read, lengths: list[int]) -> None:
        self.rows.append(row := Row(read.line, sum(lengths)))
        if isinstance(read.bad, NoAnswer):
            self._flag("empty", row)
        elif read.bad is not None:
            self._flag("bad_lines", row, reason=str(read.bad)[:_MOST_REASON])
        if read.bad is not None or read.made is None:
            return
        made = read.made
        if self._max_tokens is not None and max(lengths) > self._max_tokens:
            self._flag("too_long", row, tokens=max(lengths))
        index = len(self.rows) - 1
        row.digest = hashlib.blake2b(orjson.dumps(made, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
        body, shared = _texts_of(made)
        words = words_of(body)
        if (first := self._by_digest.setdefault(row.digest, index)) != index:
            row.of = first
            self._flag("duplicates", row, of=self.rows[first].line)
        elif near := self._near.find(index, words):
            row.of = near[0]
            self._flag("near_duplicates", row, of=self.rows[near[0]].line, likeness=round(near[1], 2))
        if self._validation and (overlap := self._validation.overlap(words)):
            self._flag("contaminated", row, of=overlap[0], share=round(overlap[1], 2))
        if matches := [match for text in (body, shared) for match in masked(text)[1]]:
            self.found["personal_data"].kinds.update(match.kind for match in matches)
            self._flag("personal_data", row, kind=matches[0].kind, value=matches[0].hint())

    def _flag(self, check: str, row: Row, **detail: Any) -> None:
        row.found += (check,)
        finding = self.found[check]
        finding.count += 1
        if len(finding.first) < _MOST_SHOWN:
            finding.first.append({"line": row.line, **detail})


def _texts_of(made: Record) -> tuple[str, str]:
    """The text of a converted example without its system prompts, which many examples share; and these, with what a
    grader sees of it."""
    if "text" in made:
        return made["text"], ""
    body, shared = [], []
    for number, chat in enumerate(made.get("sequences", (made,))):
        # The sequences of a pair share their prompt.
        for message in chat["messages"] if number == 0 else chat["messages"][-1:]:
            (shared if message["role"] == "system" else body).append(message["content"])
            body += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    if made.get("item"):
        shared.append(orjson.dumps(made["item"]).decode())
    return "\n".join(body), "\n".join(shared)


def _lengths(tokens: np.ndarray) -> dict[str, Any]:
    return {
        "shortest": int(tokens.min()),
        **{f"p{p}": int(np.percentile(tokens, p, method="lower")) for p in _PERCENTILES},
        "longest": int(tokens.max()),
        "mean": round(float(tokens.mean()), 1),
    }
