"""Reads real traces of requests in Azure's format; plain or gzip CSV."""

from __future__ import annotations

import csv
import gzip
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from scheduler.core.errors import SchedulerError

_MOST_TOKENS = 10_000_000
"""The most that one prompt or output may have. More means that columns are swapped; one such request would take days to
simulate."""

_COARSE, _COARSE_S = 3, 0.5
"""A clock is coarse if as many requests share a stamp in the mean, and stamps are at least this far apart."""

_LONGEST_GAP_S = 31 * 86400.0
"""Between two requests. More means that a clock was wrong; the simulator would step through the gap by half minutes."""


class TraceError(SchedulerError, ValueError):
    """An unreadable trace file or job list; names file and line."""

    def __init__(self, path: object, line: int | None, problem: str):
        where = f"{path}" if line is None else f"{path}, line {line}"
        super().__init__(f"{where}: {problem}")
        self.path, self.line = path, line


@dataclass(slots=True)
class Requests:
    """Requests sorted by arrival. arrival_s: seconds since the first. prompt, output: tokens, at least 1. began_s: Unix
    time of the first, if the trace has it."""

    arrival_s: array[float]
    prompt: array[int]
    output: array[int]
    began_s: float | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def horizon_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrival_s[-1] if self.arrival_s else 0.0

    @property
    def clock_s(self) -> float:
        """Resolution of the arrivals if they were stamped by a coarse clock, else 0.

        Some published traces stamp every few seconds, which makes bursts that never were: in one, ten requests at once
        every 3 s, whose counts by stamp are those of independent arrivals.
        """
        stamps = sorted(set(self.arrival_s))
        if len(self) < _COARSE * len(stamps) or len(stamps) < 3:
            return 0.0
        step_s = min(later - earlier for earlier, later in pairwise(stamps))
        whole = all(abs(at_s / step_s - round(at_s / step_s)) < 0.01 for at_s in stamps)
        return step_s if step_s >= _COARSE_S and whole else 0.0

    def spread(self, seed: int = 0) -> Requests:
        """The same requests, each at a random moment of its tick of the clock; unchanged if the clock is not coarse."""
        clock_s, rng = self.clock_s, random.Random(seed)
        if not clock_s:
            return self
        rows = sorted(
            (at_s + rng.random() * clock_s, prompt, output)
            for at_s, prompt, output in zip(self.arrival_s, self.prompt, self.output, strict=True)
        )
        first_s = rows[0][0]
        return Requests(
            array("d", (row[0] - first_s for row in rows)),
            array("l", (row[1] for row in rows)),
            array("l", (row[2] for row in rows)),
            self.began_s,
        )

    def later(self, by_s: float) -> Requests:
        """The same requests, each `by_s` seconds later; the tokens are shared."""
        return Requests(array("d", (at_s + by_s for at_s in self.arrival_s)), self.prompt, self.output, self.began_s)


def _open(path: Path) -> TextIO:
    try:
        with open(path, "rb") as file:
            packed = path.suffix == ".gz" or file.read(2) == b"\x1f\x8b"
        # CSV files from spreadsheets begin with a byte order mark.
        return (gzip.open if packed else open)(path, "rt", newline="", encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(path, None, f"cannot be opened ({error.strerror or error})") from error


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """(line number, the requested columns) of each row. Raises TraceError for a missing column or short row."""
    with _open(path) as file:
        try:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            missing = [c for c in columns if c not in header]
            if missing:
                raise TraceError(path, 1, f"columns {header} given, {list(columns)} expected")
            places = [header.index(c) for c in columns]
            for row in reader:
                if not row:
                    continue
                try:
                    yield reader.line_num, [row[p] for p in places]
                except IndexError:
                    raise TraceError(path, reader.line_num, f"{len(row)} columns, {len(header)} expected") from None
        except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
            raise TraceError(path, None, f"is not readable as (gzip) CSV: {error}") from error


def _time_s(text: str) -> float:
    """Seconds since the epoch; Azure writes seven decimal digits, which fromisoformat does not accept."""
    head, _, fraction = text.strip().partition(".")
    zone = ""
    for sign in ("+", "-", "Z"):
        if sign in fraction:
            at = fraction.index(sign)
            fraction, zone = fraction[:at], fraction[at:]
            break
    try:
        moment = datetime.fromisoformat(head + (zone if zone != "Z" else "+00:00"))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)
    except ValueError:
        raise ValueError(f"time {text!r} given, one such as 2023-11-16 18:15:46.680 expected") from None


def _whole(column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{column} {text!r} given, a whole number expected") from None


def read_requests(path: str | Path, *, scale: float = 1.0, seed: int = 0) -> Requests:
    """A trace with columns TIMESTAMP, ContextTokens, GeneratedTokens, in any order of time.

    scale: multiplies the load. Each request is kept `scale` times on average (copies get a jitter of up to a second),
    so the shape over time is preserved.

    Raises:
        TraceError: naming file and line, if the file is not such a trace.
    """
    path = Path(path)
    if not 0 < scale < math.inf:
        raise TraceError(path, None, f"scale {scale:g} given, a number above 0 expected")
    rng = random.Random(seed)
    found: list[tuple[float, int, int, int]] = []
    line = 0
    for line, (when, prompt_text, output_text) in _rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        try:
            at_s = _time_s(when)
            prompt, output = _whole("ContextTokens", prompt_text), _whole("GeneratedTokens", output_text)
        except ValueError as error:
            raise TraceError(path, line, str(error)) from None
        if not (0 <= prompt <= _MOST_TOKENS and 0 <= output <= _MOST_TOKENS):
            raise TraceError(path, line, f"{prompt} and {output} tokens given, 0 to {_MOST_TOKENS:,} expected")
        request = (at_s, max(prompt, 1), max(output, 1), line)
        if scale == 1.0:
            found.append(request)
            continue
        copies = int(scale) + (rng.random() < scale - int(scale))
        found += [(at_s + (rng.random() if n else 0.0), *request[1:]) for n in range(copies)]
    if not found:
        raise TraceError(path, None, f"scale {scale:g} keeps none of its requests" if line else "contains no request")
    found.sort()
    for (before_s, *_, earlier), (at_s, *_, later) in pairwise(found):
        if at_s - before_s > _LONGEST_GAP_S:
            gap_days, most_days = (at_s - before_s) / 86400, _LONGEST_GAP_S / 86400
            gap = f"{gap_days:,.0f} days after the request before it in time (line {earlier})"
            raise TraceError(path, later, f"{gap}, at most {most_days:.0f} expected")
    first_s = found[0][0]
    return Requests(
        array("d", (r[0] - first_s for r in found)),
        array("l", (r[1] for r in found)),
        array("l", (r[2] for r in found)),
        began_s=first_s,
    )
