"""What each benchmark found, kept as JSON, and one table of it.

    python benchmarks/_claims.py          # prints the table of everything in .benchmarks/

A benchmark calls `record(__file__, rows)`, which writes `.benchmarks/<script>.json`: a list of
`{"claim", "size", "measured", "unit", "aim", "met", "date"}`. `aim` is text ("<= 30 ms"); `met` is true, false, or
null for a figure that is only stated. Rows of a size that this run did not measure stay as an earlier run left them,
with the day of that run. What could not be measured here has a row too, which says why.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NotRequired, TypedDict

FOLDER = Path(__file__).resolve().parents[1] / ".benchmarks"


class Claim(TypedDict):
    """One figure. `measured` in `unit`, None where it was `skipped` and why; `size` names the model or input it was
    measured at; `date` is the day of it."""

    claim: str
    size: str
    measured: float | None
    unit: str
    aim: str
    met: bool | None
    skipped: NotRequired[str]
    date: NotRequired[str]


def at_most(claim: str, size: str, measured: float, unit: str, limit: float) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim=f"<= {limit:g}", met=measured <= limit)


def at_least(claim: str, size: str, measured: float, unit: str, limit: float) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim=f">= {limit:g}", met=measured >= limit)


def stated(claim: str, size: str, measured: float, unit: str) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim="stated", met=None)


def skipped(claim: str, size: str, aim: str, why: str) -> Claim:
    return Claim(claim=claim, size=size, measured=None, unit="", aim=aim, met=None, skipped=why)


def record(script: str, rows: Iterable[Claim], folder: Path = FOLDER) -> None:
    """Replace the rows of `script` (a path; its stem names the file) that were measured again."""
    folder.mkdir(exist_ok=True)
    today = time.strftime("%Y-%m-%d")
    path, fresh = folder / f"{Path(script).stem}.json", [row | {"date": today} for row in rows]
    seen = {(row["claim"], row["size"]) for row in fresh}
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in old if (row["claim"], row["size"]) not in seen]
    path.write_text(json.dumps([*kept, *fresh], indent=1))


def table(folder: Path = FOLDER) -> str:
    """All recorded rows, one line each: claim, size, measured, aim, met or missed or why it was skipped, day."""
    verdicts = {True: "met", False: "missed", None: ""}
    lines = [("claim", "size", "measured", "aim", "", "on")]
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text()):
            measured = "-" if row["measured"] is None else f"{row['measured']:.4g} {row['unit']}"
            verdict = f"skipped: {row['skipped']}" if row.get("skipped") else verdicts[row["met"]]
            lines.append((row["claim"], row["size"], measured, row["aim"], verdict, row.get("date", "")))
    if len(lines) == 1:
        return f"no figures in {folder}: run the scripts of benchmarks/ first, or make bench"
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    print(table())
