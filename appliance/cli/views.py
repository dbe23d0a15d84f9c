"""How answers of the box look to people where the order and the names of their fields do not say it."""

from __future__ import annotations

import time
from typing import Any

from appliance.cli import output

Row = dict[str, Any]
DEVICES = (
    "device=id kind name >memory=memory_bytes ?>used=meters.memory_used_bytes ?>heat=meters.temperature_c "
    "?>power=meters.power_w ?>limit=meters.power_limit_w ?slowed_by=meters.throttled ?>busy=meters.busy health ?cordon "
    "holder ?reason=health_reason ?lost"
)
JOBS = (
    "job=id status ?phase model=fine_tuned_model|model ?>devices:total ?>step ?>of=total_steps ?>loss "
    "?>tokens/s=tokens_per_s:count ?>eta=eta_s ?reason:short"
)
_REPLICAS = "replica=id model version state >devices:total >requests=inflight >memory=rss_bytes"
_STEPS = "step=verb target state ?>time=seconds ?>bytes ?>rate=bytes_per_s ?path ?detail"
_QUEUE = (
    ">#=position job=id owner >priority phase >devices:total ?may_use=allowed_sizes ?>from=min_devices "
    "?>to=max_devices deadline=deadline_s reason message"
)


def status(now: Row) -> Any:
    box, devices, requests = now["box"], now["devices"], now["requests"].values()
    held, lost = sum(one["holder"] is not None for one in devices), sum(one["health"] == "lost" for one in devices)
    about = {
        "box": {"id": box["id"], "version": box["version"], "up_s": time.time() - box["started_s"]},
        "endpoint": box["url"],
        "data": box["data_dir"],
        "mode": {name: one for name, one in now["mode"].items() if one is not None},
        "power": now["power"] if now["power"].get("set") else None,
        "devices": f"{held} of {len(devices) - lost} held{f', {lost} lost' if lost else ''}",
        "requests": {
            "running": sum(one["inflight"] for one in requests),
            "waiting": sum(one["held"] for one in requests),
        },
        "backup": box.get("backup") or "none yet (`appliance backup make`)",
        "weights": now["memory"],
    }
    return output.stack(
        output.view(about),
        output.listing(DEVICES, devices),
        output.listing(_REPLICAS, now["replicas"], empty="no replicas: a model starts when it is asked for"),
        output.listing(JOBS, now["jobs"], empty="no unfinished jobs"),
        handover(now["handover"]) if now["handover"] else None,
        output.listing("degraded=name since_s failures why", now["degraded"]) if now.get("degraded") else None,
        output.notes(now.get("notes") or ()),
    )


def mode(now: Row) -> Any:
    moved = handover(now["handover"]) if now["handover"] else None
    return output.stack(output.view({**now, "handover": None}), moved)


def handover(one: Row) -> Any:
    """A hand-over, and a table of its steps."""
    return output.stack(output.view({**one, "steps": None}), output.listing(_STEPS, one["steps"], empty="no steps"))


def queue(answer: Row) -> Any:
    table = output.listing(_QUEUE, answer["data"], empty="no job waits or runs")
    return output.stack(table, output.listing("", answer["owners"]) if answer["data"] else None)


def operation(one: Row) -> Any:
    """An operation and what it made."""
    return output.view({"operation": one["id"], "state": one["state"], **(one.get("result") or {})})


def profile(found: Row) -> Any:
    """Where the time of profiled steps went."""
    shares = {where: seconds / found["seconds"] for where, seconds in found["share"].items()}
    trace = found["trace"] or "none: it would be too long; ask for fewer steps"
    return output.view({**found, "share": shares, "trace": trace})
