"""`appliance upgrade` and `appliance rollback`; the work is done in `appliance.bundle`, in a process of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli.command import DATA_DIR, OUTPUT, examples, group
from appliance.cli.locate import BoxFile
from appliance.cli.releases.bundle import in_process

app = group("Moving the box between releases.")

TIMEOUT = Annotated[
    float,
    typer.Option(
        "--timeout", metavar="SECONDS", min=1, help="How long one release may take to stop and the other to answer."
    ),
]


@app.command(
    epilog=examples(
        "appliance bundle install appliance-0.3.0.run      first: it is installed alongside the current release",
        "appliance upgrade 0.3.0",
        "",
        "A box that runs is stopped in order and started with the new release; if that does not answer, the old one",
        "comes back. The database is copied before its schema changes. Under systemd its unit starts the box.",
    )
)
def upgrade(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="As `bundle list` shows it.")],
    timeout: TIMEOUT = 600.0,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Move the box to another installed release."""
    in_process(output_format, "upgrade", version, *_of(data_dir, timeout))


@app.command(
    epilog=examples(
        "appliance rollback --dry-run              what would be lost",
        "appliance rollback",
        "",
        "Where the newer release changed the database's schema, the database of before comes back, and what was made",
        "since is lost: the command says so and asks. The other one is kept next to it.",
    )
)
def rollback(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be lost, and do nothing.")] = False,
    timeout: TIMEOUT = 600.0,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Move the box back to the release before."""
    said = [*(["--yes"] if yes else []), *(["--dry-run"] if dry_run else [])]
    in_process(output_format, "rollback", *said, *_of(data_dir, timeout))


def _of(data_dir: str | None, timeout_s: float) -> list[str]:
    return ["--data-dir", str(BoxFile.read(data_dir).data_dir), "--timeout", str(timeout_s)]
