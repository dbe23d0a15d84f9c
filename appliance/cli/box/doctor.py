"""`appliance doctor`; the checks are in `appliance.doctor`, run in a process of its own and never imported here. Deep
ones are the running box's (`appliance.controller.devices.deep_checks`)."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer

from appliance.cli import output
from appliance.cli.box.local import CONFIG, resolved
from appliance.cli.command import DATA_DIR, OUTPUT, Session, examples, group, open_session
from appliance.cli.errors import BadUsage, Conflict
from appliance.cli.locate import BoxFile
from appliance.cli.operations import CHECK_TIMEOUT_S
from appliance.cli.own_process import said_by

app = group("Check whether this machine is fit for the box, and whether the box is well.")
_REMEDIES = {
    "fail": "it stays out of use: docs/gpu.md has what to do; then `appliance gpu undrain {} --check`",
    "warn": "`appliance doctor --deep {}` again when the machine is quiet",
}
_MARKS = {"ok": "ok", "warn": "WARN", "fail": "FAIL", "skip": "-"}


@app.command(
    epilog=examples(
        "appliance doctor                           what is not as it should be, with what to do",
        "appliance doctor --all                     every check, with what was measured",
        "appliance doctor -o json                   for scripts",
        "appliance doctor --deep                    measures every device that can be spared, one after the other",
        "appliance doctor --deep n0/3 --all         this one, with every figure",
        "",
        "Without --deep it takes a second, no device and no privilege; the box may run or not. With it the box runs,",
        "and each device gets free for it first; Ctrl-C gives it back. Exit code: 0 all is well, 1 something fails, 2",
        "something is to be looked at.",
    )
)
def doctor(
    ctx: typer.Context,
    devices: Annotated[
        list[str] | None, typer.Argument(metavar="[DEVICE]...", help="With --deep: these devices alone.")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Measure devices: copies, products, all-reduce.")] = False,
    new_baseline: Annotated[
        bool, typer.Option("--new-baseline", help="With --deep: later checks compare with what is measured now.")
    ] = False,
    all_checks: Annotated[bool, typer.Option("--all", help="Show the checks that are right too.")] = False,
    config: CONFIG = None,
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Check whether this machine is fit for the box, and whether the box is well."""
    if deep:
        session = open_session(ctx, None, None, data_dir, output_format)
        well = "nothing that was measured is wrong; `appliance doctor` looks at the rest"
        _show(_deep(session, devices or [], new_baseline), all_checks, output_format, well, "busy")
    if devices or new_baseline:
        raise BadUsage("devices and --new-baseline belong to --deep")
    settings = resolved(config, data_dir=data_dir)
    runs = ["--runs"] if BoxFile.read(settings.box.data_dir).pid is not None else []
    found = said_by("appliance.doctor.main", "--config-json", settings.model_dump_json(), *runs)
    _show(json.loads(found), all_checks, output_format, "nothing is wrong", "not for this machine")


def _deep(session: Session, devices: list[str], new_baseline: bool) -> dict[str, Any]:
    """The findings of every device, in the form of the other checks, and its exit code."""
    listed = session.client.get("/admin/v1/devices")["data"]
    there = [device["id"] for device in listed if device["health"] != "lost"]
    rows: list[dict[str, Any]] = []
    with output.progress("deep checks") as meter:
        for device_id in devices or there:
            meter.update(f"{device_id} gets free and is measured; Ctrl-C gives it back")
            try:
                answer = session.client.send(
                    "POST",
                    f"/admin/v1/devices/{device_id}/check",
                    body={"new_baseline": new_baseline},
                    timeout_s=CHECK_TIMEOUT_S,
                )
            except Conflict as error:
                # Who names a device wants to know of it; where all are asked for, busy ones are left for another time.
                state = "warn" if devices else "skip"
                rows.append({"check": device_id, "state": state, "found": str(error), "wanted": "", "remedy": ""})
                continue
            rows += [
                {
                    "check": f"{device_id} {one['measure']}",
                    "state": one["state"],
                    "found": one["found"],
                    "wanted": one["wanted"],
                    "remedy": _REMEDIES.get(one["state"], "").format(device_id),
                }
                for one in answer["found"]
            ]
    states = {row["state"] for row in rows}
    return {"exit_code": 1 if "fail" in states else 2 if "warn" in states else 0, "data": rows}


def _show(answer: dict[str, Any], all_checks: bool, output_format: str, well: str, skipped: str) -> NoReturn:
    """Ends the command with the answer's exit code. well: what is said where nothing is to be looked at. skipped: why
    checks are left out."""
    if output_format == "json":
        output.print_json(answer)
        raise typer.Exit(answer["exit_code"])
    shown = [one for one in answer["data"] if all_checks or one["state"] in ("warn", "fail")]
    rows = [(_MARKS[one["state"]], one["check"], one["found"], one["wanted"], one["remedy"]) for one in shown]
    right, left = (sum(one["state"] == state for one in answer["data"]) for state in ("ok", "skip"))
    output.draw(
        output.stack(
            output.table(("", "CHECK", "FOUND", "WANTED", "WHAT TO DO"), rows, empty=well),
            f"right: {right} checks; {skipped}: {left}" + ("" if all_checks else "; --all shows them"),
        )
    )
    raise typer.Exit(answer["exit_code"])
