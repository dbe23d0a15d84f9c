"""Checks a data file before any device is taken: reads the file's examples, writes them for a job, counts tokens, and
reports repeats, overlap with the validation file and personal data. No torch. The compared texts bound the memory: a
hostile file costs no more than a good file (train.data.records).

Texts are compared by hashes of word n-grams. Personal data and secrets are recognised by form and checksum; names and
addresses have no fixed form and are not recognised.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from train.data.formats import TEXT, Example, convert, shape_of
from train.data.records import BadFile, BadRecord, Line, NoAnswer, Record, examples, parse

MAX_LISTED_ERRORS = 100
# The check stops after this many bad examples, because a file may have a billion of them.
MAX_COUNTED_ERRORS = 10_000
# A reason may quote a key or a role of the file, which may be as long as an example.
MAX_REASON_CHARACTERS = 300
MIN_EXAMPLES = 10
# Limits of a report: how many ignored keys it names, and the characters of each name.
MAX_LEFT_OUT, _MAX_NAME = 30, 60
# The number of examples whose tokens are counted; the tokens of later ones are estimated, corrected by the first.
COUNTED_EXAMPLES = 2000

_SHAPE_EXAMPLES = 100  # this many first examples decide the shape of a file
_BYTES_PER_TOKEN = 3.5  # English text in a common byte-pair vocabulary; only for estimates
_TOKENS_PER_MESSAGE = 5  # for the role and the delimiters of a chat template; only for estimates

Count = Callable[[Record], list[list[int]]]
Refuses = Callable[[str], str | None]
"""`Method.refuses`."""


@dataclass
class DataReport:
    """The content of a data file, with tokens counted or estimated (`check_training_file`).

    n_rows: trained rows, more than examples where the model's template needs a row for each turn. n_tokens_by_size:
    tokens estimated from bytes, with one row per example. longest_example_tokens: tokens of the longest sequence.
    example_tokens: tokens of each of the first COUNTED_EXAMPLES rows. errors: the first MAX_LISTED_ERRORS of `n_errors`
    (line, reason) pairs; counting stops at MAX_COUNTED_ERRORS. warnings: possible faults of the data. notes:
    conversions of the data. left_out: for each ignored key, the number of examples that have it."""

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


def read_examples(path: str | Path, refuses: Refuses | None = None) -> Iterator[tuple[int, str, Example | BadRecord]]:
    """Yield (line, shape of the file, example or the reason why the example is unusable) for every example. The shape
    of the file is the most common shape of its first examples, if possible a shape that the method accepts (`refuses`).
    Records of another shape are unusable; a file whose shape the method refuses is unusable too. Raises OSError."""
    with open(path, "rb") as file:
        shape = _usual_shape(islice(examples(file), _SHAPE_EXAMPLES), refuses)
        for line, raw in examples(file):  # read the file again: its first examples may take 1.6 GiB of memory
            result: Example | BadRecord
            try:
                if isinstance(raw, BadRecord):
                    raise raw
                own = shape_of(record := parse(raw)).name
                shape = shape or own
                if refuses and (refusal := refuses(shape)):
                    raise BadFile(refusal)
                if own != shape:
                    ends = " (its last message is from the user)" if own == "prompt" else ""
                    raise BadRecord(f"has the shape {own!r}{ends}; most of the file's first examples are {shape!r}")
                result = convert(record)
            except BadRecord as bad:
                result = bad
            yield line, shape or "empty", result


def _usual_shape(first: Iterable[Line], refuses: Refuses | None) -> str:
    shapes: Counter[str] = Counter()
    for _, raw in first:
        with suppress(BadRecord):
            if not isinstance(raw, BadRecord):
                shapes[shape_of(parse(raw)).name] += 1
    return max(shapes, key=lambda shape: (not (refuses and refuses(shape)), shapes[shape]), default="")


def check_training_file(
    path: str | Path,
    *,
    chat_path: str | Path | None = None,
    count: Count | None = None,
    counted: int = COUNTED_EXAMPLES,
    refuses: Refuses | None = None,
    visit: Callable[[int, Example | BadRecord, list[list[int]]], None] = lambda line, result, rows: None,
) -> DataReport:
    """Read the whole file and report on it. Raises OSError if the file is unreadable.

    Args:
        chat_path: where to write the examples as JSONL (mode 0600), if the report is `ok`.
        count: returns the tokens of each sequence of each row of a converted record. Raises BadRecord if the model's
            chat template or the method refuses it. None: tokens are estimated.
        counted: the number of records to count; the tokens of later records are estimated.
        refuses: as in `read_examples`. visit: is called with each line, its example or the reason why it is unusable,
        and its tokens.
    """
    report, private = DataReport(), partial(os.open, mode=0o600)
    with open(chat_path, "wb", opener=private) if chat_path else nullcontext() as output:
        for line, shape, result in read_examples(path, refuses):
            report.shape, rows = shape, list[list[int]]()
            if isinstance(result, Example):
                try:
                    rows = _rows(report, result.record, count, counted)
                    _add(report, result, rows)
                    if output:
                        output.write(orjson.dumps(result.record) + b"\n")
                except BadRecord as bad:
                    result = bad
            visit(line, result, rows)
            if isinstance(result, BadRecord):
                report.add_error(line, str(result))
                if isinstance(result, BadFile) or report.n_errors >= MAX_COUNTED_ERRORS:
                    break
    _summarise(report)
    if chat_path and not report.ok:
        os.unlink(chat_path)
    return report


def _rows(report: DataReport, record: Record, count: Count | None, counted: int) -> list[list[int]]:
    """Return the tokens of each sequence of each row of a converted record. Raises BadRecord."""
    estimates = [_estimate_tokens(chat) for chat in record.get("sequences", (record,))]
    rows = [estimates]
    if count is not None and report.n_examples < counted:
        rows = count(record)
    elif count is not None:  # correct the estimate by the ratio of counted to estimated tokens so far
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
    """Estimate the tokens of a converted chat or document from its bytes."""
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
        report.warnings.append(f"only {report.n_examples} examples; expected at least {MIN_EXAMPLES} to learn from")
    if report.ok and report.shape == "unpaired":
        report.notes.append("the answers are marked good or bad (label), which only the method kto trains on")
    elif report.ok and report.shape not in ("chat", "preference", "prompt", TEXT):
        report.notes.append(f"converted {report.n_examples} examples from the {report.shape} shape to chat")
    if report.ok and report.left_out:
        keys = ", ".join(f"{name} ({count})" for name, count in sorted(report.left_out.items()))
        report.notes.append(f"left out these keys, which are not trained (number of examples): {keys}")


# -- findings ----------------------------------------------------------------------------------------------------------

NAMES = ("bad_lines", "empty", "duplicates", "near_duplicates", "too_long", "contaminated", "personal_data")
"""Names of the checks, in the order of a report."""
_MOST_SHOWN = 20
_PERCENTILES = (5, 25, 50, 75, 95, 99)


def report_findings(
    path: Path,
    name: str,
    refuses: Refuses | None = None,
    count: Count | None = None,
    max_tokens: int | None = None,
    against: Path | None = None,
) -> dict[str, Any]:
    """Return the findings of all checks as JSON values. `usable`: whether a job would accept the file, as far as a
    check can tell. Raises OSError.

    Args:
        name: the file's name in the report.
        count: as in `check_training_file`. max_tokens: the limit for the check `too_long`.
        against: the validation file.
    """
    with open(path, "rb") as file:
        sha256, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    validation = Texts()
    for line, _, result in read_examples(against, refuses) if against else ():
        if isinstance(result, Example):
            validation.add(line, grams(_texts_of(result.record)[0]))
    needed = {"too_long": max_tokens is not None, "contaminated": against is not None}
    checks: dict[str, dict[str, Any]] = {
        check: {"count": 0, "kinds": Counter(), "first": []} for check in NAMES if needed.get(check, True)
    }
    lengths: list[int] = []  # number of tokens of each usable example
    texts, by_digest = Texts(), dict[bytes, int]()

    def flag(check: str, line: int, **detail: Any) -> None:
        checks[check]["count"] += 1
        if len(checks[check]["first"]) < _MOST_SHOWN:
            checks[check]["first"].append({"line": line, **detail})

    def visit(line: int, result: Example | BadRecord, rows: list[list[int]]) -> None:
        if isinstance(result, NoAnswer):
            return flag("empty", line)
        if isinstance(result, BadRecord):
            return flag("bad_lines", line, reason=str(result)[:MAX_REASON_CHARACTERS])
        record, longest = result.record, max(map(max, rows))
        lengths.append(sum(map(sum, rows)))
        if max_tokens is not None and longest > max_tokens and "text" not in record:
            flag("too_long", line, tokens=longest)
        digest = hashlib.blake2b(orjson.dumps(record, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
        body, shared = _texts_of(record)
        own = grams(body)
        if (first := by_digest.setdefault(digest, line)) != line:
            flag("duplicates", line, of=first)
        elif near := texts.like(own):
            flag("near_duplicates", line, of=near[0], likeness=near[1])
        else:
            texts.add(line, own)
        if near := validation.like(own):
            flag("contaminated", line, of=near[0], share=near[1])
        if matches := [match for text in (body, shared) for match in personal_data(text)]:
            checks["personal_data"]["kinds"].update(kind for kind, _ in matches)
            kind, value = matches[0]
            # Reports are stored and displayed, so they contain only the beginning of the value.
            flag("personal_data", line, kind=kind, value=f"{value[:3]}… ({len(value)} characters)")

    data = check_training_file(path, count=count, counted=1 << 62, refuses=refuses, visit=visit)
    n_examples = len(lengths) + checks["bad_lines"]["count"] + checks["empty"]["count"]
    for check in checks.values():
        check["share"] = round(check["count"] / max(1, n_examples), 6)
        if kinds := check.pop("kinds"):
            check["kinds"] = dict(kinds.most_common())
    return {
        "object": "file.check",
        "file": {"file": name, "bytes": size, "sha256": sha256, "shape": None if data.shape == "empty" else data.shape},
        "examples": n_examples,
        "usable": 0 < len(lengths) == n_examples,
        "checks": checks,
        "keys_left_out": dict(sorted(data.left_out.items())),
        "tokens": {"total": sum(lengths), "exact": count is not None, "most_allowed": max_tokens},
        "lengths": _spread(sorted(lengths)) if lengths else {},
    }


def _texts_of(record: Record) -> tuple[str, str]:
    """Return the text of a converted example without its system prompts, which many examples share; and the system
    prompts together with the grader's item."""
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


def _spread(lengths: list[int]) -> dict[str, Any]:
    last = len(lengths) - 1
    return {
        "shortest": lengths[0],
        **{f"p{p}": lengths[last * p // 100] for p in _PERCENTILES},
        "longest": lengths[last],
        "mean": round(sum(lengths) / len(lengths), 1),
    }


# -- repeats -----------------------------------------------------------------------------------------------------------

LIKE = 0.8
"""Texts are near duplicates if they share at least this part of their runs of words (Jaccard)."""
_RUN = 5
_SKETCH = 16  # smallest hashes per text; texts with a likeness of 0.8 share 13 of these on average

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+")


def grams(text: str) -> np.ndarray:
    """Return (m,) uint32, ascending: the distinct hashes of all runs of 5 words; a shorter text has one hash. A word is
    a run of letters and digits in lower case; in scripts without spaces between words (Chinese, Japanese, Korean, Thai)
    every character is a word."""
    words = _WORD.findall(text.lower())
    runs = (" ".join(words[at : at + _RUN]) for at in range(max(min(1, len(words)), len(words) - _RUN + 1)))
    return np.unique(np.fromiter((zlib.crc32(run.encode()) for run in runs), np.uint32))


class Texts:
    """Finds similar texts, by line. A text is compared with the newest texts that share one of its smallest hashes,
    which are a random sample of its runs of words."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self._grams: dict[int, np.ndarray] = {}

    def add(self, line: int, own: np.ndarray) -> None:
        self._newest.update(dict.fromkeys(own[:_SKETCH].tolist(), line))
        self._grams[line] = own

    def like(self, own: np.ndarray) -> tuple[int, float] | None:
        """Return the line of an earlier text with nearly the same runs of words, and the likeness; or None."""
        for line in dict.fromkeys(self._newest[gram] for gram in own[:_SKETCH].tolist() if gram in self._newest):
            other = self._grams[line]
            if not LIKE * len(own) <= len(other) <= len(own) / LIKE:
                continue  # the difference in length alone excludes this likeness
            both = len(np.intersect1d(own, other, assume_unique=True))
            if (alike := both / (len(own) + len(other) - both)) >= LIKE:
                return line, round(alike, 2)
        return None


# -- personal data -----------------------------------------------------------------------------------------------------


# No pattern backtracks: every repetition is bounded or possessive, so the time is proportional to a text's length.
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


def personal_data(text: str) -> list[tuple[str, str]]:
    """Return (kind, match) pairs, in the order of _KINDS."""
    matches: list[tuple[str, str]] = []
    for kind, pattern, is_valid in _KINDS:
        found = [match for match in pattern.finditer(text) if is_valid(match[0])]
        matches += [(kind, match[0]) for match in found]
        edges = [0, *(edge for match in found for edge in match.span()), len(text)]
        text = " ".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    return matches


def _is_card(text: str) -> bool:
    """Whether a number has a payment card's first digit and a valid Luhn checksum."""
    digits = [int(character) for character in text if character.isdigit()]
    if digits[0] not in (2, 3, 4, 5, 6) or len(set(digits)) == 1:
        return False
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_public(text: str) -> bool:
    """Whether a match is a public IP address. Private addresses, and versions such as 1.2.3.4.5, identify nobody."""
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


# The order counts: where matches of two kinds overlap, the first kind is reported.
_KINDS: tuple[tuple[str, re.Pattern[str], Callable[[str], bool]], ...] = (
    ("secret", _SECRET, bool),
    ("card", _CARD, _is_card),
    ("email", _EMAIL, bool),
    ("ip", _IP, _is_public),
    ("phone", _PHONE, lambda text: 9 <= sum(map(str.isdigit, text)) <= 15),
)
