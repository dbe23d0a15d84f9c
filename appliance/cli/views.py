"""How answers of the box look to people where the order and the names of their fields do not say it."""

from __future__ import annotations

import time
from typing import Any

from appliance.cli import formats, output
from appliance.cli.formats import many, size

Row = dict[str, Any]
DEVICES = "device=id kind name >memory=memory_bytes health ?cordon holder ?reason=health_reason ?lost"
REPLICAS = "replica=id model version state >devices:total >requests=inflight >memory=rss_bytes"
JOBS = (
    "job=id status ?phase model=fine_tuned_model|model ?>devices:total ?>step ?>of=total_steps ?>loss "
    "?>tokens/s=tokens_per_s:count ?>eta=eta_s ?reason:short"
)
_STEPS = "step=verb target state ?>time=seconds ?>bytes ?>rate=bytes_per_s ?path ?detail"


def status(now: Row) -> Any:
    box, devices, memory = now["box"], now["devices"], now["memory"]
    busy, lost = sum(one["holder"] is not None for one in devices), sum(one["health"] == "lost" for one in devices)
    budget = "what is free" if memory["budget_bytes"] is None else size(memory["budget_bytes"])
    last, waiting = box.get("backup"), sum(one["held"] for one in now["requests"].values())
    about = output.fields(
        ("box", f"{box['id']}, version {box['version']}, up for {formats.duration(time.time() - box['started_s'])}"),
        ("endpoint", box["url"]),
        ("data", box["data_dir"]),
        ("mode", formats.by_name("", {name: one for name, one in now["mode"].items() if one is not None})),
        *([("power", formats.by_name("", now["power"]))] if now["power"].get("set") else []),
        ("devices", f"{busy} of {len(devices) - lost} held{f', {lost} lost' if lost else ''}"),
        ("requests", f"{sum(one['inflight'] for one in now['requests'].values())} running, {waiting} waiting"),
        ("backup", formats.by_name("", last) if last else "none yet (`appliance backup make`)"),
        ("weights", f"{size(memory['used_bytes'])} in shared memory, at most {budget}"),
    )
    troubles = [
        f"degraded: {one['name']} failed {many(one['failures'], 'time')} since {formats.moment(one['since_s'])} "
        f"({one['why']}); it is tried again"
        for one in now.get("degraded") or ()
    ]
    return output.stack(
        about,
        output.listing(DEVICES, devices),
        output.listing(REPLICAS, now["replicas"], empty="no replicas: a model starts when it is asked for"),
        output.listing(JOBS, now["jobs"], empty="no unfinished jobs"),
        handover(now["handover"]) if now["handover"] else None,
        output.notes([*troubles, *(now.get("notes") or ())]),
    )


def mode(now: Row) -> Any:
    moved = handover(now["handover"]) if now["handover"] else None
    return output.stack(output.view({**now, "handover": None}), moved)


def handover(one: Row) -> Any:
    """A hand-over, and a table of its steps."""
    about = {name: value for name, value in one.items() if name != "steps"}
    return output.stack(output.view(about), output.listing(_STEPS, one["steps"], empty="no steps"))


def handovers(answer: Row) -> Any:
    def faults(one: Row) -> str:
        of_steps = (f"{step['verb']} {step['target']}: {fault}" for step in one["steps"] if (fault := _error(step)))
        return "; ".join([*of_steps, *([one["error"]] if one["error"] else [])])

    rows = [{**one, "steps": len(one["steps"]), "error": faults(one)} for one in answer["data"]]
    columns = "id ?began=started_s reason state >time=seconds ?>bytes >steps ?asked_by ?error"
    return output.listing(columns, rows, empty="no hand-overs yet")


def _error(step: Row) -> str:
    return (step["detail"] or {}).get("error") or ""


def queue(answer: Row) -> Any:
    columns = (
        ">#=position job=id owner >priority phase >devices:total ?may_use=allowed_sizes ?>from=min_devices "
        "?>to=max_devices deadline=deadline_s reason message"
    )
    table = output.listing(columns, answer["data"], empty="no job waits or runs")
    return output.stack(table, output.listing("", answer["owners"]) if answer["data"] else None)


def models(answer: Row) -> Any:
    columns = (
        "model=name|id ?kind ?of=adapter.base|base|owned_by ?architecture=arch ?>params:count ?>size=bytes "
        "?version=active_version ?canary=canary_version ?>context=max_model_len state=state_details|state"
    )
    empty = "no models; `appliance model catalog` lists some that `appliance model import` brings in"
    rows = answer["data"]
    told = output.notes(f"{one['name']}: {one['message']}" for one in rows if one.get("message"))
    return output.stack(output.listing(columns, rows, empty=empty), told)


def operation(one: Row) -> Any:
    """An operation and what it made."""
    return output.view({"operation": one["id"], "state": one["state"], **(one.get("result") or {})})


def audience(model: Row) -> str:
    if model.get("shared_with_everybody") or "*" in model["shared_with"]:
        return "everybody"
    names = [name for name in (model["owner"], *model["shared_with"]) if name]
    return f"{', '.join(names)} and operators" if names else "operators alone"


def profile(found: Row) -> Any:
    """Where the time of profiled steps went."""
    seconds, steps = found["seconds"], found["steps"]
    rows = [{"where": where, "share": s / seconds, "seconds_a_step": s / steps} for where, s in found["share"].items()]
    operators = [{**one, "share": one["seconds"] / seconds} for one in found["operators"]]
    about = {name: value for name, value in found.items() if name not in ("share", "operators")}
    return output.stack(
        output.view({**about, "trace": found["trace"] or "none: it would be too long; ask for fewer steps"}),
        output.listing("where >share >seconds_a_step", rows),
        output.listing("operator=name where=kind >share >calls=count", operators),
    )


def key_revoked(answer: Row) -> Any:
    left = (
        []
        if "admin" not in answer["scopes"] or answer["admin_keys"]
        else ["no key of scope admin is left: until one is made, only commands on the box itself administer it"]
    )
    return output.view({**answer, "notes": left})
