"""`appliance sweep`: hyperparameters are tried on a part of the data, and the best go on."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import EVERY, WATCH, Session, box_command, group
from appliance.cli.errors import CommandFailed
from appliance.cli.jobs.request import table_file
from appliance.cli.operations import TIMEOUT, Patience

app = group("Sweeps: hyperparameters are tried on a part of the data, and the best go on (docs/sweeps.md).")
SWEEP = Annotated[str, typer.Argument(metavar="SWEEP_ID")]
_BAR_CELLS = 40


@box_command(app, "appliance sweep run rates.toml --wait", "appliance sweep run rates.toml -o json | jq -r .id")
def run(
    session: Session,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML: what is tried, and within which budget.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when it has ended; exit code 1 if it failed.")] = False,
    timeout: TIMEOUT = None,
) -> None:
    """Try hyperparameters: all on a little of the data, the better ones on more, the best on all of it."""
    body = {"spec": table_file("the sweep", file)}
    made = session.client.send("POST", "/v1/sweeps", body=body, headers={"idempotency-key": str(uuid.uuid4())})
    if not wait:
        session.show(made, lambda row: row["id"])
        return
    patience = Patience(timeout)
    with output.progress(made["id"]) as meter:
        while made["state"] == "running":
            meter.update(f"{made['id']} {made['reason'] or ''}")
            patience.pause(f"{made['id']} is not done after {patience.limit}; it goes on")
            made = patience.get(session, paths.sweep(made["id"])) or made
    session.show(made, _one)
    if made["state"] != "succeeded":
        raise CommandFailed(f"{made['id']} {made['state']}: {made['reason']}")


@box_command(app, "appliance sweep list", name="list")
def list_sweeps(session: Session) -> None:
    """List sweeps with their best trials, the newest first."""
    session.show(session.client.listed("/v1/sweeps", most=100), _table)


@box_command(app, "appliance sweep show sweep_abc123", "appliance sweep show sweep_abc123 --watch")
def show(session: Session, sweep_id: SWEEP, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """Show one sweep: each trial with its loss by round, and a bar for the loss of its last round."""
    session.follow(lambda: session.client.get(paths.sweep(sweep_id)), _one, watch, every)


@box_command(app, "appliance sweep cancel sweep_abc123")
def cancel(session: Session, sweep_id: SWEEP) -> None:
    """Cancel a sweep with its jobs, and delete what they made."""
    session.show(session.client.post(f"{paths.sweep(sweep_id)}/cancel"), lambda row: f"{row['id']}: {row['state']}")


def _one(sweep: dict[str, Any]) -> Any:
    best = sweep["best"]
    about = output.fields(
        ("sweep", f"{sweep['name']} ({sweep['id']})"),
        ("state", sweep["state"]),
        ("reason", formats.or_dash(sweep["reason"])),
        ("device-hours", f"{sweep['device_hours']:.3g} of {sweep['spec']['device_hours']:g}"),
        ("best", _parameters(best["parameters"]) if best else "-"),
        ("its loss", formats.loss(best["loss"]) if best else "-"),
        ("its model", formats.or_dash(best["model"]) if best else "-"),
    )
    names = list(dict.fromkeys(name for trial in sweep["trials"] for name in trial["parameters"]))
    shares = [f">{round_['share']:.3g} OF DATA" for round_ in sweep["rounds"]]
    order = sorted(enumerate(sweep["trials"]), key=lambda one: _rank(one[1]))
    lowest, highest = _ends(sweep["trials"])
    rows = []
    for number, trial in order:
        losses = [_loss(trial, at) for at in range(len(shares))]
        mark = " *" if best and best["trial"] == number else ""
        values = (formats.or_dash(trial["parameters"].get(name)) for name in names)
        rows.append((f"{number}{mark}", *values, *losses, _bar(trial, lowest, highest)))
    header = ("TRIAL", *(name.upper() for name in names), *shares, "LOSS")
    return output.stack(about, output.table(header, rows, empty=""))


def _known(trial: dict[str, Any]) -> list[float]:
    return [one["loss"] for one in trial["jobs"] if one["loss"] is not None]


def _rank(trial: dict[str, Any]) -> tuple[int, float]:
    """Sort key: the trials that came furthest first, the least loss first among them."""
    known = _known(trial)
    return -len(known), known[-1] if known else 0.0


def _ends(trials: list[dict[str, Any]]) -> tuple[float, float]:
    known = [found[-1] for trial in trials if (found := _known(trial))]
    return min(known, default=0.0), max(known, default=0.0)


def _bar(trial: dict[str, Any], lowest: float, highest: float) -> str:
    """A bar for the trial's last loss: one cell for the best of all trials, _BAR_CELLS for the worst."""
    known = _known(trial)
    if not known:
        return ""
    part = (known[-1] - lowest) / (highest - lowest) if highest > lowest else 0.0
    return "#" * (1 + round(part * (_BAR_CELLS - 1)))


def _loss(trial: dict[str, Any], at: int) -> str:
    if at >= len(trial["jobs"]):
        return "-"
    one = trial["jobs"][at]
    return formats.loss(one["loss"]) if one["loss"] is not None else one["state"]


def _parameters(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("SWEEP", "NAME", "STATE", ">TRIALS", ">DEVICE-HOURS", "BEST", ">LOSS", "REASON"),
        (
            (
                *formats.cells(row, "id name state"),
                len(row["trials"]),
                f"{row['device_hours']:.3g}",
                _parameters(row["best"]["parameters"]) if row["best"] else "-",
                formats.loss(row["best"]["loss"]) if row["best"] else "-",
                formats.or_dash(row["reason"]),
            )
            for row in answer["data"]
        ),
        empty="no sweeps; `appliance sweep run FILE` begins one (docs/sweeps.md)",
    )
