"""`appliance power`: the power limit, and who has drawn how much energy."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from appliance.cli import output
from appliance.cli.command import Session, box_command, group, seconds_given

app = group("Show power and energy: the power limit, and who has drawn how much.")

NOT_KNOWN = "not known: the devices of this machine count no energy that the box may read"
_SHOWN = {"idle": "nobody", "job": "job", "model": "model"}


@box_command(app, "appliance power", "appliance power --since 30d", "appliance power --since 7d -o json")
def power(
    session: Session,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="How far back: 45m, 24h, 7d. Whole hours are counted.")
    ] = "24h",
) -> None:
    """Show power and energy: the power limit, and who has drawn how much.

    Of each job, each model and of devices that nobody held: joules, watts, and joules per 1,000 tokens.
    """
    since_s = max(0.0, time.time() - seconds_given("--since", since))
    session.show(session.client.get("/admin/v1/power", since_s=since_s), _table)


def energy_line(drawn: dict[str, Any] | None) -> str:
    """Energy in one line: in all, and for each step and token."""
    if drawn is None:
        return NOT_KNOWN
    parts = [kwh(drawn["kwh"])]
    if drawn.get("watts_per_device") is not None:
        at = {
            "jobs": "what jobs like it have drawn here",
            "limit": "the power limit of the devices, which they do not reach",
        }[drawn["watts_from"]]
        parts.append(f"at {drawn['watts_per_device']:.0f} W a device, {at}")
    if drawn.get("joules_per_step") is not None:
        parts.append(f"{joules(drawn['joules_per_step'])} a step")
    if drawn.get("joules_per_1000_tokens") is not None:
        parts.append(f"{joules(drawn['joules_per_1000_tokens'])} per 1,000 tokens")
    if drawn.get("metered_share", 1.0) < 0.995:
        parts.append(f"counted for {drawn['metered_share']:.0%} of its time")
    return ", ".join(parts)


def joules(value: float | None) -> str:
    if value is None:
        return "-"
    for limit, unit in ((1e6, "MJ"), (1e3, "kJ")):
        if value >= limit:
            return f"{value / limit:,.3g} {unit}"
    return f"{value:.3g} J"


def kwh(value: float) -> str:
    return f"{value:.3g} kWh" if value >= 0.1 else f"{value * 1000:.3g} Wh"


def _table(answer: dict[str, Any]) -> Any:
    rows = output.table(
        ("HELD BY", "", ">ENERGY", ">DEVICE-HOURS", ">W PER DEVICE", ">PER 1,000 TOKENS"),
        (
            (
                _SHOWN[one["kind"]],
                one["name"],
                joules(one["joules"]),
                f"{one['metered_s'] / 3600:.2f}",
                f"{one['joules'] / one['metered_s']:.0f}" if one["metered_s"] else "-",
                joules(one["joules_per_1000_tokens"]),
            )
            for one in answer["data"]
        ),
        empty="nothing was counted in that time" if answer["meters"] else f"energy is {NOT_KNOWN}",
    )
    return output.stack(output.fields(("limit", limit_line(answer["limits"]))), rows)


def limit_line(limits: dict[str, Any]) -> str:
    """The power limit in force, in one line."""
    if not limits.get("set"):
        return "the box sets none"
    limit = "the devices' own" if limits["limit_w"] is None else f"{limits['limit_w']:g} W a device"
    return "; ".join([limit, *(f"not on {device}: {why}" for device, why in limits["refused"].items())])
