"""Notes what each check finds in the examples of a data file, and makes the report.

Texts are compared by their runs of words (n-grams) as hashes: near duplicates, and training examples that contain a
validation example. Personal data and secrets are found by their form, and by their checksum if they have one; names and
addresses have no fixed form and are not found.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from train.data.check import Count, Read, Refuses, check_training_file, read_examples
from train.data.records import NoAnswer, Record

NAMES = ("bad_lines", "empty", "duplicates", "near_duplicates", "too_long", "contaminated", "personal_data")
"""Of the checks, in the order of a report."""
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
        refuses: Refuses | None = None,
        count: Count | None = None,
        max_tokens: int | None = None,
        against: Path | None = None,
    ):
        """count: gives tokens of a converted record; without it they are estimated. against: the validation file."""
        self._refuses, self._count, self._max_tokens = refuses, count, max_tokens
        self._lines: list[int] = []  # of all examples
        self._lengths: list[int] = []  # tokens of the usable ones
        needed = {"too_long": max_tokens is not None, "contaminated": against is not None}
        self.findings = {name: Finding() for name in NAMES if needed.get(name, True)}
        self._by_digest: dict[bytes, int] = {}
        self._near = NearDuplicates()
        self._validation = None
        if against is not None:
            reads = read_examples(against, refuses)
            texts = {read.line: _texts_of(read.example.record)[0] for read in reads if read.example}
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
        data = check_training_file(path, count=self._count, counted=counted, refuses=self._refuses, visit=self._visit)
        tokens = np.array(self._lengths, np.int64)
        shape = None if data.shape == "empty" else data.shape
        return {
            "object": "file.check",
            "file": {"file": name, "bytes": size, "sha256": sha256, "shape": shape},
            "examples": len(self._lines),
            "usable": 0 < len(tokens) == len(self._lines),
            "checks": {
                name: {
                    "count": finding.count,
                    "share": round(finding.count / max(1, len(self._lines)), 6),
                    **({"kinds": dict(finding.kinds.most_common())} if finding.kinds else {}),
                    "first": finding.first,
                }
                for name, finding in self.findings.items()
            },
            "keys_left_out": dict(sorted(data.left_out.items())),
            "tokens": {"total": int(tokens.sum()), "exact": self._count is not None, "most_allowed": self._max_tokens},
            "lengths": _lengths(tokens) if len(tokens) else {},
        }

    def _visit(self, read: Read, rows: list[list[int]]) -> None:
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
            self.findings["personal_data"].kinds.update(match.kind for match in matches)
            self._flag("personal_data", kind=matches[0].kind, value=matches[0].hint())

    def _flag(self, check: str, **detail: Any) -> None:
        """Notes a finding in the newest example."""
        finding = self.findings[check]
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


# -- repeats -----------------------------------------------------------------------------------------------------------

LIKE = 0.8
"""Near duplicates share at least this part of their 5-grams of words (Jaccard)."""
OVERLAP = 0.7
"""A training example is contaminated if it and a validation example share this part of the 13-grams of the shorter."""
_GRAM, _OVERLAP_GRAM = 5, 13  # 13: the length that GPT-3 and lm-eval use
_SKETCH = 16  # of the least n-grams; texts with a likeness of 0.8 share 13 of them on average
# Runs in more validation examples than this share (at least _TEMPLATE_LEAST) are a template, which leaks nothing.
_TEMPLATE_SHARE, _TEMPLATE_LEAST = 0.01, 3

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")
_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xFF51AFD7ED558CCD)


def words_of(text: str) -> np.ndarray:
    """(words,) uint64: the hash of each word, in order. A word is a run of letters and digits in lower case; in scripts
    without spaces between words (Chinese, Japanese, Korean, Thai) every character is a word."""
    return np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())], np.uint64)


def grams(words: np.ndarray, n: int) -> np.ndarray:
    """(m,) uint64, ascending: the distinct hashes of all runs of n words; of fewer words than n, one of them all."""
    if not len(words):
        return words
    n = min(n, len(words))
    rolled = np.zeros(len(words) - n + 1, np.uint64)
    for place in range(n):
        rolled = rolled * _BASE + words[place : place + len(rolled)]
    rolled = (rolled ^ (rolled >> np.uint64(33))) * _MIX
    return np.unique(rolled ^ (rolled >> np.uint64(33)))


class NearDuplicates:
    """Texts in the order of their file, each compared with the newest earlier ones that share one of its least n-grams:
    the n-grams are hashes, so these are a random sample, the same in every text that has them."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._grams: dict[int, np.ndarray] = {}

    def find(self, index: int, words: np.ndarray) -> tuple[int, float] | None:
        """The index of an earlier text that this one nearly repeats, and their likeness; None without any, and then
        later texts are compared with this one too."""
        own = grams(words, _GRAM)
        sketch = own[:_SKETCH].tolist()
        own = own.astype(np.uint32)  # half the time and memory; in one text, these rarely meet
        for earlier in dict.fromkeys(self._newest[gram] for gram in sketch if gram in self._newest):
            other = self._grams[earlier]
            if not LIKE * len(own) <= len(other) <= len(own) / LIKE:
                continue  # a text of megabytes is not compared with each short one
            both = len(np.intersect1d(own, other))
            if (alike := both / (len(own) + len(other) - both)) >= LIKE:
                return earlier, alike
        self._newest.update(dict.fromkeys(sketch, index))
        self._grams[index] = own
        return None


class ValidationIndex:
    """The 13-grams of a validation set, each with the first example that has it."""

    def __init__(self, texts: dict[int, str]):
        """texts: by the number of their line."""
        each = {line: grams(words_of(text), _OVERLAP_GRAM).tolist() for line, text in texts.items()}
        times = Counter(gram for own in each.values() for gram in own)
        most = max(_TEMPLATE_LEAST, _TEMPLATE_SHARE * len(each))
        self._line: dict[int, int] = {}
        self._size: Counter[int] = Counter()
        for line, own in each.items():
            for gram in own:
                if times[gram] <= most:
                    self._line.setdefault(gram, line)
                    self._size[line] += 1

    def overlap(self, words: np.ndarray) -> tuple[int, float] | None:
        """The line of the validation example that shares most, and the share; None if it is less than OVERLAP."""
        own = grams(words, _OVERLAP_GRAM)
        shared = Counter(self._line[gram] for gram in own.tolist() if gram in self._line)
        if not shared:
            return None
        line, count = shared.most_common(1)[0]
        share = min(1.0, count / min(len(own), self._size[line]))
        return (line, share) if share >= OVERLAP else None


# -- personal data -----------------------------------------------------------------------------------------------------


class Match(NamedTuple):
    kind: str
    value: str

    def hint(self) -> str:
        """Enough to locate it, too little to reveal it: reports are stored and shown."""
        return f"{self.value[:3]}… ({len(self.value)} characters)"


# No pattern backtracks: every repetition is bounded or possessive, so the cost of a text is proportional to its length.
_SECRET = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[^-]{0,8192}+-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
    r"|(?<![A-Za-z0-9])(?:"
    r"sk-[A-Za-z0-9_\-]{20,200}+|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_\-]{35}|gh[pousr]_[A-Za-z0-9]{36,255}+"
    r"|github_pat_[A-Za-z0-9_]{22,255}+|glpat-[A-Za-z0-9_\-]{20,64}+|xox[abprs]-[A-Za-z0-9\-]{10,200}+"
    r"|hf_[A-Za-z0-9]{30,64}+|npm_[A-Za-z0-9]{36}|[sr]k_live_[A-Za-z0-9]{16,200}+"
    r"|eyJ[A-Za-z0-9_\-]{8,4000}+\.eyJ[A-Za-z0-9_\-]{8,8000}+\.[A-Za-z0-9_\-]{8,4000}+)"
)
_CARD = re.compile(
    r"(?<![0-9])(?:[0-9]{4}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{4}([ \-])[0-9]{6}\2[0-9]{5}|[0-9]{14,19}+)"
    r"(?![0-9])"
)
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9._%+\-]{1,64}+@(?:[A-Za-z0-9\-]{1,63}+\.){1,6}[A-Za-z]{2,24}(?![A-Za-z0-9])"
)
_IP = re.compile(
    r"(?<![0-9A-Za-z.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z]|\.[0-9])"
    r"|(?<![0-9A-Za-z:.])[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?![0-9A-Za-z:])"
)
_PHONE = re.compile(
    r"(?<![0-9A-Za-z+])\+[1-9](?:[ ().\-/]{0,2}[0-9]){6,14}(?![0-9])"  # +49 30 1234567
    r"|(?<![0-9A-Za-z])\([2-9][0-9]{2}\) ?[0-9]{3}[\-. ][0-9]{4}(?![0-9])"  # (212) 555-0123
    r"|(?<![0-9A-Za-z.\-/])[2-9][0-9]{2}([\-.])[2-9][0-9]{2}\1[0-9]{4}(?![0-9A-Za-z\-])"  # 212-555-0123
    # 030/1234567, 0176 12345678
    r"|(?<![0-9A-Za-z.,\-/])(?<![0-9] )\(?0[1-9][0-9]{1,3}\)?[ /\-][0-9]{3,8}(?:[ \-][0-9]{1,5}){0,3}(?![0-9A-Za-z])"
    r"|(?<![0-9A-Za-z])1[3-9][0-9]{9}(?![0-9A-Za-z])"  # Chinese mobile
)


def personal_data(text: str) -> list[Match]:
    """The matches of all kinds, in the order of the kinds."""
    matches: list[Match] = []
    for kind, pattern, is_valid in _KINDS:
        found = [match for match in pattern.finditer(text) if is_valid(match[0])]
        matches += [Match(kind, match[0]) for match in found]
        edges = [0, *(edge for match in found for edge in match.span()), len(text)]
        text = " ".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    return matches


def _is_card(text: str) -> bool:
    """Whether it has the first digit of a payment card, its length and Luhn's checksum."""
    digits = [int(character) for character in text if character.isdigit()]
    if digits[0] not in (2, 3, 4, 5, 6) or len(set(digits)) == 1:
        return False
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_public(text: str) -> bool:
    """Whether it is an address on the internet: a private one, or a version such as 1.2.3.4.5, identifies nobody."""
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


# In this order: where two kinds overlap, the first wins.
_KINDS: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("secret", _SECRET, bool),
    ("card", _CARD, _is_card),
    ("email", _EMAIL, bool),
    ("ip", _IP, _is_public),
    ("phone", _PHONE, lambda text: 9 <= sum(map(str.isdigit, text)) <= 15),
)
