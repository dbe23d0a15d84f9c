"""What each benchmark found, kept as JSON, and one table of it.

    python benchmarks/_claims.py          # prints the table of everything in .benchmarks/

A benchmark calls `record(__file__, rows)`, which writes `.benchmarks/<script>.json`: a list of
`{"claim", "size", "measured", "unit", "aim", "met"}`. `aim` is text ("<= 30 ms"); `met` is true, false, or null for
a figure that is only stated. Rows of a size that this run did not measure stay as an earlier run left them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

FOLDER = Path(__file__).resolve().parents[1] / ".benchmarks"


class Claim(TypedDict):
    """One figure. `measured` in `unit`; `size` names the model or input it was measured at."""

    claim: str
    size: str
    measured: float
    unit: str
    aim: str
    met: bool | None


def at_most(claim: str, size: str, measured: float, unit: str, limit: float) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim=f"<= {limit:g}", met=measured <= limit)


def at_least(claim: str, size: str, measured: float, unit: str, limit: float) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim=f">= {limit:g}", met=measured >= limit)


def stated(claim: str, size: str, measured: float, unit: str) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim="stated", met=None)


def record(script: str, rows: Iterable[Claim], folder: Path = FOLDER) -> None:
    """Replace the rows of `script` (a path; its stem names the file) that were measured again."""
    folder.mkdir(exist_ok=True)
    path, fresh = folder / f"{Path(script).stem}.json", list(rows)
    seen = {(row["claim"], row["size"]) for row in fresh}
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in old if (row["claim"], row["size"]) not in seen]
    path.write_text(json.dumps([*kept, *fresh], indent=1))


def table(folder: Path = FOLDER) -> str:
    """All recorded rows, one line each: claim, size, measured, aim, met or missed."""
    verdicts = {True: "met", False: "missed", None: ""}
    lines = [("claim", "size", "measured", "aim", "")]
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text()):
            measured = f"{row['measured']:.4g} {row['unit']}"
            lines.append((row["claim"], row["size"], measured, row["aim"], verdicts[row["met"]]))
    if len(lines) == 1:
        return f"no figures in {folder}: run the scripts of benchmarks/ first, or make bench"
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    print(table())
