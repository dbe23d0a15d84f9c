"""Generates the table of docs/clients.md from the output of the scripts. Pure, except for two files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.clients.clients import CHECKS, CLIENTS

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "clients.md"
BEGINS, ENDS = "<!-- made by `make clients` -->", "<!-- end -->"
_SAID = "@@"


@dataclass
class Row:
    """The result of one client. checks: by name, "" or why it failed. trouble: why no check ran. commit: commit of the
    tested code."""

    client: str
    version: str
    date: str
    checks: dict[str, str]
    trouble: str = ""
    commit: str = ""


def verdicts(output: str) -> dict[str, str]:
    """Results in a script's output (report.py): by check, "" or the reason of the failure."""
    lines = [json.loads(line.removeprefix(_SAID)) for line in output.splitlines() if line.startswith(_SAID)]
    return {line["check"]: line["failed"] for line in lines}


def recorded(path: Path = RESULTS) -> list[Row]:
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def record(rows: Iterable[Row], path: Path = RESULTS) -> list[Row]:
    """Replace these clients' rows; the others stay. Returns all, in the order of CLIENTS."""
    known = {row.client: row for row in recorded(path)}
    known |= {row.client: row for row in rows}
    kept = [known[client.name] for client in CLIENTS if client.name in known]
    path.write_text(json.dumps([asdict(row) for row in kept], indent=1) + "\n")
    return kept


def drawn(rows: Iterable[Row]) -> str:
    """The table in Markdown, followed by the reasons for failures."""
    lines = [f"| client | version | tried | {' | '.join(CHECKS)} |", "|---" * (3 + len(CHECKS)) + "|"]
    why = []
    for row in rows:
        cells = []
        for check in CHECKS:
            failed = row.checks.get(check)
            cells.append("–" if failed is None else "yes" if not failed else "**no**")
            if failed:
                why.append(f"- `{row.client}`, {check}: {failed}")
        if row.trouble:
            why.append(f"- `{row.client}`: {row.trouble}")
        lines.append(f"| `{row.client}` | {row.version or 'not installed'} | {row.date} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *why]).rstrip() + "\n"


def put(table: str, page: Path = PAGE) -> None:
    text = page.read_text()
    before, _, rest = text.partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    page.write_text(f"{before}{BEGINS}\n{table}{ENDS}{after}")
