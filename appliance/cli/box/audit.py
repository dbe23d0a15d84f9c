"""`appliance audit`: who did what."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import Session, box_command, group

app = group("Show who did what: every change, by whom, and its outcome.")


@box_command(
    app,
    "appliance audit",
    "appliance audit --limit 1000 -o json | jq '.data[] | select(.action == \"key.create\")'",
    "",
    "WHO is a key's name, or `box` for a command on the box itself, for a window and for the box's own decisions.",
)
def audit(
    session: Session,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many to show, the newest first.")] = 50,
) -> None:
    """Show who did what: every change, by whom, and its outcome."""
    session.show(session.client.listed("/admin/v1/audit", most=limit), _table)


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("WHEN", "WHO", "ACTION", "OF", "OUTCOME", "DETAIL"),
        (
            (
                formats.moment(row["created_s"]),
                *(row[name] for name in ("by", "action", "target", "outcome")),
                _detail(row["detail"]),
            )
            for row in answer["data"]
        ),
        empty="nothing was changed yet",
    )


def _detail(detail: dict[str, Any]) -> str:
    # A null is shown too: it is a limit that was lifted.
    shown = {name: value for name, value in detail.items() if value not in ("", [])}
    texts = (f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in shown.items())
    return formats.printable("  ".join(texts))
