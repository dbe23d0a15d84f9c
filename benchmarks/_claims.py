"""Stores the results of benchmarks as JSON, and prints them as one table.

    python -m benchmarks._claims          # prints the table of everything in .benchmarks/

A benchmark calls `record(__file__, rows)`, which prints the rows and writes `.benchmarks/<script>.json`. A row of the
same claim and size replaces the older one.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NotRequired, TypedDict

FOLDER = Path(__file__).resolve().parents[1] / ".benchmarks"


class Claim(TypedDict):
    """A measured figure. size: model or input. met: whether it meets its aim (None: no aim). date: day of the run."""

    claim: str
    size: str
    measured: float
    unit: str
    aim: str
    met: bool | None
    date: NotRequired[str]


def at_most(claim: str, size: str, measured: float, unit: str, limit: float) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim=f"<= {limit:g}", met=measured <= limit)


def at_least(claim: str, size: str, measured: float, unit: str, limit: float) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim=f">= {limit:g}", met=measured >= limit)


def stated(claim: str, size: str, measured: float, unit: str) -> Claim:
    return Claim(claim=claim, size=size, measured=measured, unit=unit, aim="", met=None)


def record(script: str, rows: Iterable[Claim], folder: Path = FOLDER) -> None:
    """Print the rows, and store them in place of earlier rows. script: path whose stem names the JSON file."""
    folder.mkdir(exist_ok=True)
    path, fresh = folder / f"{Path(script).stem}.json", [row | {"date": time.strftime("%Y-%m-%d")} for row in rows]
    old = {(row["claim"], row["size"]): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    path.write_text(json.dumps([*(old | {(row["claim"], row["size"]): row for row in fresh}).values()], indent=1))
    print(table_of(fresh), flush=True)


def table_of(rows: Iterable[Claim]) -> str:
    """Return a table with one line per row: claim, size, measured, aim, met or missed, day."""
    verdicts = {True: "met", False: "missed", None: ""}
    lines = [("claim", "size", "measured", "aim", "", "on")]
    for row in rows:
        measured = f"{row['measured']:.4g} {row['unit']}"
        lines.append((row["claim"], row["size"], measured, row["aim"], verdicts[row["met"]], row.get("date", "")))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def table(folder: Path = FOLDER) -> str:
    """Return the table of all stored rows."""
    return table_of(row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text()))


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser for a benchmark's options. Also make SIGTERM clean up like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


if __name__ == "__main__":
    print(table())
