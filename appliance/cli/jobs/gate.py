"""`appliance gate`: what decided whether the versions of jobs answer, with its numbers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from appliance.cli import formats, output, paths
from appliance.cli.command import EVERY, WATCH, Session, box_command, group
from appliance.cli.complete import models as complete_models

app = group("Gates: whether the version of a job may answer, decided by evaluations (docs/gates.md).")
GATE = Annotated[str, typer.Argument(metavar="GATE_ID")]


@box_command(app, "appliance gate list", "appliance gate list --model fraud", name="list")
def list_gates(
    session: Session,
    model: Annotated[
        str | None, typer.Option("--model", help="Show the gates of this model alone.", autocompletion=complete_models)
    ] = None,
) -> None:
    """List gates with their verdicts, the newest first."""
    session.show(session.client.listed("/v1/gates", most=100, **({"model": model} if model else {})), _table)


@box_command(
    app,
    "appliance gate show gate_abc123",
    "appliance gate show gate_abc123 --watch",
    "appliance gate show gate_abc123 -o json | jq .suites",
)
def show(session: Session, gate_id: GATE, watch: WATCH = False, every: EVERY = 2.0) -> None:
    """Show one gate: for each suite both versions' results, the test, its p-value, and what became of the version."""
    session.follow(lambda: session.client.get(paths.gate(gate_id)), drawn, watch, every)


@box_command(app, "appliance gate cancel gate_abc123")
def cancel(session: Session, gate_id: GATE) -> None:
    """Cancel a gate: the version stays and does not answer. Exit code 5 if its canary runs."""
    session.show(session.client.post(f"{paths.gate(gate_id)}/cancel"), lambda row: f"{row['id']}: {row['reason']}")


def drawn(gate: dict[str, Any]) -> Any:
    about = output.fields(
        ("gate", gate["id"]),
        ("job", gate["job_id"]),
        ("version", f"{formats.or_dash(gate['version'])} of {gate['model']}"),
        ("against", formats.or_dash(gate["before"])),
        ("state", gate["state"]),
        ("verdict", formats.or_dash(gate["verdict"])),
        ("reason", formats.or_dash(gate["reason"])),
        ("answers by it", "yes" if gate["activated"] else "no"),
        ("decided", formats.moment(gate["decided_at"])),
        ("ended", formats.moment(gate["ended_at"])),
    )
    suites = output.table(
        ("SUITE", "VERDICT", ">ITEMS", ">PASSED", ">BEFORE", ">REWARD", ">BEFORE", "DIFFERENCE (95 %)", ">P"),
        (_suite(one) for one in gate["suites"]),
        empty="",
    )
    return output.stack(about, suites if gate["suites"] else None)


def _suite(one: dict[str, Any]) -> tuple[str, ...]:
    new, old, compared = one["candidate"] or {}, one["incumbent"] or {}, one["compared"] or {}
    chances = [f"{rule['p']:.3g}" for rule in one["rules"] if "p" in rule]
    return (
        one["name"],
        one["verdict"],
        str(one["items"]),
        _share(new.get("pass_rate")),
        _share(old.get("pass_rate")),
        _number(new.get("mean_reward")),
        _number(old.get("mean_reward")),
        _difference(compared),
        ", ".join(chances) or "-",
    )


def _difference(compared: dict[str, Any]) -> str:
    if compared.get("difference") is None:
        return "-"
    parts = [f"{compared['difference']:+.4g}"]
    if compared["low"] is not None:
        parts.append(f"({compared['low']:+.4g} to {compared['high']:+.4g})")
    return " ".join(parts)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("GATE", "MODEL", "VERSION", "AGAINST", "STATE", "VERDICT", "ANSWERED", "CREATED", "REASON"),
        (
            (
                *formats.cells(row, "id model version before state verdict"),
                "yes" if row["activated"] else "no",
                formats.moment(row["created_at"]),
                row["reason"],
            )
            for row in answer["data"]
        ),
        empty="no gates; `appliance job submit --gate` makes them",
    )
