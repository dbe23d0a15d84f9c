"""`appliance doctor`; the checks are in `appliance.doctor`, run in a process of its own and never imported here."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from appliance.cli import output
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, OUTPUT, examples, group
from appliance.cli.locate import BoxFile
from appliance.cli.own_process import said_by

app = group("Check whether this machine is fit for the box, and whether the box is well.")
_MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skip": "-"}


@app.command(
    epilog=examples(
        "appliance doctor                           what is not as it should be, with what to do",
        "appliance doctor --all                     every check, with what was measured",
        "appliance doctor -o json                   for scripts",
        "",
        "It takes a second, no device and no privilege; the box may run or not. Exit code: 0 all is well, 1 something",
        "fails, 2 something is to be looked at.",
    )
)
def doctor(
    all_checks: Annotated[bool, typer.Option("--all", help="Show the checks that are right too.")] = False,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Check whether this machine is fit for the box, and whether the box is well."""
    settings = resolved(config, data_dir=data_dir)
    runs = ["--runs"] if BoxFile.read(settings.box.data_dir).pid is not None else []
    answer = json.loads(
        said_by("appliance.doctor.main", "--config", "/dev/stdin", *runs, given=settings.model_dump_json())
    )
    if output_format == "json":
        output.print_json(answer)
        raise typer.Exit(answer["exit_code"])
    shown = [one for one in answer["data"] if all_checks or one["state"] in ("warn", "fail")]
    rows = [(_MARKS[one["state"]], one["check"], one["found"], one["wanted"], one["remedy"]) for one in shown]
    right, left = (sum(one["state"] == state for one in answer["data"]) for state in ("ok", "skip"))
    output.draw(
        output.stack(
            output.table(("", "CHECK", "FOUND", "WANTED", "WHAT TO DO"), rows, empty="nothing is wrong"),
            f"right: {right} checks; not for this machine: {left}" + ("" if all_checks else "; --all shows them"),
        )
    )
    raise typer.Exit(answer["exit_code"])
