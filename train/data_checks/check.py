"""Reads a data file once, notes what each check finds in every example, and makes the report."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from train.data.check import Count, Refuses, count_left_out, estimate_tokens, read_examples
from train.data.records import BadRecord, NoAnswer, Record
from train.data_checks.personal_data import masked
from train.data_checks.repeats import NearDuplicates, ValidationIndex, words_of

_MOST_SHOWN = 20
_MOST_REASON = 300
_PERCENTILES = (5, 25, 50, 75, 95, 99)


@dataclass(slots=True)
class Finding:
    """In how many examples a check found something, how often each kind, and the first of them."""

    count: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    first: list[dict[str, Any]] = field(default_factory=list)


class Check:
    """The findings of all checks in the file that `read` was given."""

    def __init__(
        self,
        names: Sequence[str],
        refuses: Refuses | None = None,
        count: Count | None = None,
        max_tokens: int | None = None,
        against: Path | None = None,
    ):
        """names: of all checks, as a report has them. count: gives tokens of a converted record; without it they are
        estimated. against: the validation file."""
        self._refuses, self._count, self._max_tokens = refuses, count, max_tokens
        self._lines: list[int] = []  # of all examples
        self._lengths: list[int] = []  # tokens of the usable ones
        self.bytes, self.sha256, self.shape = 0, "", None
        needed = {"too_long": max_tokens is not None, "contaminated": against is not None}
        self.found = {name: Finding() for name in names if needed.get(name, True)}
        self._keys_left_out: dict[str, int] = {}
        self._by_digest: dict[bytes, int] = {}
        self._near = NearDuplicates()
        self._validation = None
        if against is not None:
            read = read_examples(against, refuses)
            self._validation = ValidationIndex({o.line: _texts_of(o.example.record)[0] for o in read if o.example})

    def read(self, path: Path) -> None:
        """Raises OSError."""
        with open(path, "rb") as file:
            self.sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            self.bytes = file.tell()
        for read in read_examples(path, self._refuses):
            self._lines.append(read.line)
            self.shape = read.shape or self.shape
            if read.bad is not None:
                self._flag_bad(read.bad)
            elif read.example is not None:
                count_left_out(self._keys_left_out, read.example)
                self._look_at(read.example.record)

    def report(self, name: str) -> dict[str, Any]:
        """The report as plain JSON values. `usable`: whether a job would take the file, as far as a check knows.

        Args:
            name: what the report calls the file.
        """
        tokens = np.array(self._lengths, np.int64)
        return {
            "object": "file.check",
            "file": {"file": name, "bytes": self.bytes, "sha256": self.sha256, "shape": self.shape},
            "examples": len(self._lines),
            "usable": 0 < len(tokens) == len(self._lines),
            "checks": {name: self._finding(found) for name, found in self.found.items()},
            "keys_left_out": dict(sorted(self._keys_left_out.items())),
            "tokens": {"total": int(tokens.sum()), "exact": self._count is not None, "most_allowed": self._max_tokens},
            "lengths": _lengths(tokens) if len(tokens) else {},
        }

    def _finding(self, found: Finding) -> dict[str, Any]:
        share = round(found.count / max(1, len(self._lines)), 6)
        kinds = {"kinds": dict(found.kinds.most_common())} if found.kinds else {}
        return {"count": found.count, "share": share, **kinds, "first": found.first}

    def _look_at(self, record: Record) -> None:
        try:
            lengths = self._tokens(record)
        except BadRecord as bad:  # the model's chat template refuses it
            self._flag_bad(bad)
            return
        self._lengths.append(sum(lengths))
        if self._max_tokens is not None and max(lengths) > self._max_tokens and "text" not in record:
            self._flag("too_long", tokens=max(lengths))
        index = len(self._lines) - 1
        digest = hashlib.blake2b(orjson.dumps(record, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
        body, shared = _texts_of(record)
        words = words_of(body)
        if (first := self._by_digest.setdefault(digest, index)) != index:
            self._flag("duplicates", of=self._lines[first])
        elif near := self._near.find(index, words):
            self._flag("near_duplicates", of=self._lines[near[0]], likeness=round(near[1], 2))
        if self._validation and (overlap := self._validation.overlap(words)):
            self._flag("contaminated", of=overlap[0], share=round(overlap[1], 2))
        if matches := [match for text in (body, shared) for match in masked(text)[1]]:
            self.found["personal_data"].kinds.update(match.kind for match in matches)
            self._flag("personal_data", kind=matches[0].kind, value=matches[0].hint())

    def _tokens(self, record: Record) -> list[int]:
        """Tokens of each sequence. Raises BadRecord."""
        if self._count is not None:
            return [length for row in self._count(record) for length in row]
        return [estimate_tokens(chat) for chat in record.get("sequences", (record,))]

    def _flag_bad(self, bad: BadRecord) -> None:
        if isinstance(bad, NoAnswer):
            self._flag("empty")
        else:
            self._flag("bad_lines", reason=str(bad)[:_MOST_REASON])

    def _flag(self, check: str, **detail: Any) -> None:
        """Notes a finding in the newest example."""
        finding = self.found[check]
        finding.count += 1
        if len(finding.first) < _MOST_SHOWN:
            finding.first.append({"line": self._lines[-1], **detail})


def _texts_of(record: Record) -> tuple[str, str]:
    """The text of a converted example without its system prompts, which many examples share; and these, with what a
    grader sees of it."""
    if "text" in record:
        return record["text"], ""
    body, shared = [], []
    for number, chat in enumerate(record.get("sequences", (record,))):
        # The sequences of a pair share their prompt.
        for message in chat["messages"] if number == 0 else chat["messages"][-1:]:
            (shared if message["role"] == "system" else body).append(message["content"])
            body += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    if record.get("item"):
        shared.append(orjson.dumps(record["item"]).decode())
    return "\n".join(body), "\n".join(shared)


def _lengths(tokens: np.ndarray) -> dict[str, Any]:
    return {
        "shortest": int(tokens.min()),
        **{f"p{p}": int(np.percentile(tokens, p, method="lower")) for p in _PERCENTILES},
        "longest": int(tokens.max()),
        "mean": round(float(tokens.mean()), 1),
    }
