"""Notes what each check finds in the examples of a data file, and makes the report."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from train.data.check import Count, Read, Refuses, check_training_file, read_examples
from train.data.records import NoAnswer, Record
from train.data_checks.personal_data import personal_data
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
    """The findings of all checks in a file."""

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
        needed = {"too_long": max_tokens is not None, "contaminated": against is not None}
        self.found = {name: Finding() for name in names if needed.get(name, True)}
        self._by_digest: dict[bytes, int] = {}
        self._near = NearDuplicates()
        self._validation = None
        if against is not None:
            read = read_examples(against, refuses)
            texts = {one.line: _texts_of(one.example.record)[0] for one in read if one.example}
            self._validation = ValidationIndex(texts)

    def report(self, path: Path, name: str) -> dict[str, Any]:
        """Read a file and report on it as plain JSON values. `usable`: whether a job would take the file, as far as a
        check knows. Raises OSError.

        Args:
            name: what the report calls the file.
        """
        with open(path, "rb") as file:
            sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
        counted = 1 << 62
        data = check_training_file(path, count=self._count, counted=counted, refuses=self._refuses, look=self._look)
        tokens = np.array(self._lengths, np.int64)
        shape = None if data.shape == "empty" else data.shape
        return {
            "object": "file.check",
            "file": {"file": name, "bytes": size, "sha256": sha256, "shape": shape},
            "examples": len(self._lines),
            "usable": 0 < len(tokens) == len(self._lines),
            "checks": {name: self._finding(finding) for name, finding in self.found.items()},
            "keys_left_out": dict(sorted(data.left_out.items())),
            "tokens": {"total": int(tokens.sum()), "exact": self._count is not None, "most_allowed": self._max_tokens},
            "lengths": _lengths(tokens) if len(tokens) else {},
        }

    def _finding(self, finding: Finding) -> dict[str, Any]:
        share = round(finding.count / max(1, len(self._lines)), 6)
        kinds = {"kinds": dict(finding.kinds.most_common())} if finding.kinds else {}
        return {"count": finding.count, "share": share, **kinds, "first": finding.first}

    def _look(self, read: Read, rows: list[list[int]]) -> None:
        index = len(self._lines)
        self._lines.append(read.line)
        if isinstance(read.bad, NoAnswer):
            self._flag("empty")
        elif read.bad is not None:
            self._flag("bad_lines", reason=str(read.bad)[:_MOST_REASON])
        if read.bad is not None or read.example is None:
            return
        record, lengths = read.example.record, [length for row in rows for length in row]
        self._lengths.append(sum(lengths))
        if self._max_tokens is not None and max(lengths) > self._max_tokens and "text" not in record:
            self._flag("too_long", tokens=max(lengths))
        digest = hashlib.blake2b(orjson.dumps(record, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
        body, shared = _texts_of(record)
        words = words_of(body)
        if (first := self._by_digest.setdefault(digest, index)) != index:
            self._flag("duplicates", of=self._lines[first])
        elif near := self._near.find(index, words):
            self._flag("near_duplicates", of=self._lines[near[0]], likeness=round(near[1], 2))
        if self._validation and (overlap := self._validation.overlap(words)):
            self._flag("contaminated", of=overlap[0], share=round(overlap[1], 2))
        if matches := [match for text in (body, shared) for match in personal_data(text)]:
            self.found["personal_data"].kinds.update(match.kind for match in matches)
            self._flag("personal_data", kind=matches[0].kind, value=matches[0].hint())

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
