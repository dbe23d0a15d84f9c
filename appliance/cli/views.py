"""How answers of the box look to people, where columns of a table do not say it."""

from __future__ import annotations

import json
import time
from typing import Any

from appliance.cli import formats, output
from appliance.cli.formats import many, moment, or_dash, size

Row = dict[str, Any]
NOT_KNOWN = "not known: the devices of this machine count no energy that the box may read"
MODES = ("serve", "train", "split", "auto")
"""As `scheduler.core.workload` has them."""


# Devices


def holder(device: Row) -> str:
    held = device.get("holder")
    return f"{held['kind']} {held['id']}" if held else "-"


def health(device: Row) -> str:
    """The health as the box says it; for a device that drains and that nobody holds, what it is instead."""
    if device["health"] != "draining" or device.get("holder") is not None:
        return device["health"]
    return "cordoned" if device.get("cordon") == "box" else "drained"


def device_line(device: Row) -> str:
    why = f" ({device['health_reason']})" if device.get("health_reason") else ""
    return f"{device['id']}: {health(device)}{why}, held by {'nobody' if device['holder'] is None else holder(device)}"


def _power(device: Row) -> str:
    found = device.get("meters") or {}
    if found.get("power_w") is None:
        return "-"
    limit = f" of {found['power_limit_w']:.0f} W" if found.get("power_limit_w") else ""
    slowed = "".join(f" ({word.replace('_', ' ')})" for word in found.get("throttled") or ())
    return f"{found['power_w']:.0f} W{limit}{slowed}"


def _heat(device: Row) -> str:
    heat = (device.get("meters") or {}).get("temperature_c")
    return "-" if heat is None else f"{heat} °C"


def _reason(device: Row) -> str:
    reason, lost = device.get("health_reason") or "", device.get("lost")
    return f"{reason}, since {moment(lost['since_s'])}" if lost else reason


_METERS = (">used=meters.memory_used_bytes:size", (">heat", _heat), (">power", _power), ">busy=meters.busy:percent")


def metered(devices: list[Row]) -> tuple[output.Column, ...]:
    """Columns that logical devices have nothing in."""
    return _METERS if any(device.get("meters") for device in devices) else ()


def devices(answer: Row) -> Any:
    rows = answer["data"]
    about = ("device=id", "kind", "name", ">memory=memory_bytes:size", *metered(rows))
    return output.listing(
        (*about, ("health", health), ("holder", holder), ("reason", _reason)), rows, empty="no devices"
    )


def nodes(answer: Row) -> Any:
    def answers(node: Row) -> str:
        return "no answer" if node["answered_s"] is None else formats.duration(node["answered_s"])

    def memory(node: Row) -> str:
        left = node["memory_available_bytes"]
        return "-" if left is None else f"{size(left)} of {size(node['memory_bytes'])}"

    columns: tuple[output.Column, ...] = (
        *("node=id", "address", ">devices:total", (">answers in", answers), (">memory left", memory)),
        ("state", lambda node: "leaves" if node["leaves"] else "home" if node["home"] else ""),
    )
    return output.listing(columns, answer["data"], empty="no nodes")


# The box


def status(now: Row) -> Any:
    box, mode, memory = now["box"], now["mode"], now["memory"]
    split = "" if mode["train_devices"] is None else f", {mode['train_devices']} devices for training at most"
    lost = sum(device["health"] == "lost" for device in now["devices"])
    busy = sum(device["holder"] is not None for device in now["devices"])
    budget = "what is free" if memory["budget_bytes"] is None else size(memory["budget_bytes"])
    last = box.get("backup")
    about = output.fields(
        ("box", f"{box['id']}, version {box['version']}, up for {formats.duration(time.time() - box['started_s'])}"),
        ("endpoint", box["url"]),
        ("data", box["data_dir"]),
        ("mode", mode["policy"] + split),
        *([("power", limit_line(now["power"]))] if now["power"].get("set") else []),
        ("devices", f"{busy} of {len(now['devices']) - lost} held{f', {lost} lost' if lost else ''}"),
        ("backup", f"{_ago(last['made_s'])} at {last['where']}" if last else "none yet (`appliance backup make`)"),
        ("weights", f"{size(memory['used_bytes'])} in shared memory, at most {budget}"),
    )
    held = output.listing(("device=id", "kind", ("health", health), ("holder", holder)), now["devices"], empty="none")
    replicas = output.listing(
        (
            *("replica=id", "model", "version", "state", ">devices:total", ">requests=inflight"),
            (">memory", lambda one: size(one["rss_bytes"] or None)),
        ),
        now["replicas"],
        empty=f"no replicas: {'see below' if now.get('troubles') else 'a model starts when it is asked for'}",
    )
    unfinished = jobs({"data": now["jobs"]}) if now["jobs"] else "no unfinished jobs"
    troubles = [
        f"degraded: {one['name']} failed {many(one['failures'], 'time')} since {_ago(one['since_s'])} ({one['why']}); "
        "it is tried again"
        for one in now.get("degraded") or ()
    ]
    moving = handover(now["handover"]) if now["handover"] else None
    return output.stack(about, held, replicas, unfinished, moving, output.notes([*troubles, *(now.get("notes") or ())]))


def _ago(unix_s: float) -> str:
    return f"{formats.duration(max(0.0, time.time() - unix_s))} ago"


# Modes and hand-overs


def mode(now: Row) -> Any:
    return output.stack(_mode(now), output.notes(now.get("notes") or ()))


def _mode(now: Row) -> Any:
    bounds, floor = now["bounds"], now["serving_floor"]
    train = or_dash(now["train_devices"])
    if now["train_devices"] is None and now["policy"] == "auto":
        train = "as many as serving does not need"
    until = "changed"
    if now["until_s"] is not None:
        until = f"{moment(now['until_s'])}, when a window of the schedule begins or ends"
    by = f"hand ({now['by_hand']['by']})" if now["by_hand"]["by"] else "default"
    if now["window"]:
        by = f"window {now['window']['id']}: {window_text(now['window'])}"
    elif now["overridden"]:
        by += f", instead of window {now['overridden']['id']}: {window_text(now['overridden'])}"
    back, grows = formats.duration(bounds["give_back_after_s"]), formats.duration(bounds["job_dwell_s"])
    return output.fields(
        ("mode", now["policy"]),
        ("train devices", train),
        ("serving floor", f"{many(floor, 'device')}; what lies idle above it is lent"),
        ("since", moment(now["since_s"] or None)),
        ("set by", by),
        ("until", until),
        ("dwell", f"serving gives back after {back} of lower demand, a running job grows after {grows}"),
    )


def mode_name(held: Row) -> str:
    return f"split --train {held['train_devices']}" if held["policy"] == "split" else held["policy"]


def window_text(window: Row) -> str:
    """A window in a few words."""
    end = f' until "{window["until"]}"' if window["until"] else ""
    if not end and window["for_s"]:
        end = f" for {formats.duration(window['for_s'])}"
    return f'{mode_name(window)} at "{window["cron"]}"{end} {window["tz"]}'


def window_ends(window: Row) -> str:
    return window["until"] or (f"after {formats.duration(window['for_s'])}" if window["for_s"] else "-")


def set_by(part: Row) -> str:
    instead = f", instead of {part['overridden']}" if part["overridden"] else ""
    return part["window"] or f"set by hand{instead}"


def mode_plan(plan: Row) -> Any:
    steps = [f"{number}. {text}" for number, text in enumerate(plan["steps"], 1)] or ["Nothing would move."]

    def told(title: str, *kinds: tuple[str, str]) -> Any:
        pairs = [(f"{kind} {one}", text) for name, kind in kinds for one, text in sorted(plan.get(name, {}).items())]
        return output.above(title, output.fields(*pairs)) if pairs else None

    split = f" {plan['train_devices']}" if plan["policy"] == "split" else ""
    return output.stack(
        "\n".join([f"mode {plan['policy']}{split}, serving floor {plan['serving_floor']}:", *steps]),
        told("Would wait:", ("waiting", "job"), ("notes", "model")),
        told("Learned:", ("standby", "model")),
        told("Idle:", ("idle", "model")),
    )


_STEP = (
    ("  step", lambda step: f"  {step['verb']}"),
    *("target", "state", ">time=seconds:duration", ">bytes:size", ">rate=bytes_per_s:rate"),
    "path",
)


def handover(one: Row) -> Any:
    """A hand-over as a title and a table of its steps."""
    ended = "" if one["seconds"] is None else f", {formats.duration(one['seconds'])}"
    moved = f", {size(one['bytes'])}" if one["bytes"] else ""
    by = f"; asked by {one['asked_by']} ({one['asked_for']})" if one["asked_by"] else ""
    title = f"hand-over {one['id']}: {one['reason']} ({one['state']}{ended}{moved}{by})"
    return output.above(title, output.listing(_STEP, one["steps"], empty="  no steps"))


def handover_details(one: Row) -> Any:
    columns = (("step", lambda step: step["verb"]), "target", ("detail", _detail))
    return output.stack(handover(one), output.listing(columns, one["steps"], empty=""), one["error"])


def handovers(answer: Row) -> Any:
    def faults(one: Row) -> str | None:
        lines = [
            f"  {step['verb']} {or_dash(step['target'])}: {step['detail']['error']}"
            for step in one["steps"]
            if (step["detail"] or {}).get("error")
        ]
        return "\n".join(lines) or one["error"] or None

    parts = [part for one in answer["data"] for part in (handover(one), faults(one))]
    return output.stack(*parts) if parts else "no hand-overs yet"


def _detail(step: Row) -> str:
    return formats.by_name("", step["detail"] or {})


# Jobs


def _model(job: Row) -> str:
    return job["fine_tuned_model"] or job["model"]


def _step(job: Row) -> str:
    return f"{job['step']}/{job['total_steps']}" if job.get("total_steps") else or_dash(job["step"] or None)


def _eta(job: Row) -> str:
    return formats.duration(job["eta_s"]) if job["phase"] == "running" else "-"


def jobs(answer: Row) -> Any:
    columns: tuple[output.Column, ...] = (
        *("job=id", "status", "phase", ("model", _model), ">devices:total", (">step", _step), ">loss:loss"),
        *(">tokens/s=tokens_per_s:count", (">eta", _eta), "reason:short"),
    )
    return output.listing(columns, answer["data"], empty="no jobs; `appliance job submit --help` shows how to make one")


_JOB: tuple[output.Column, ...] = (
    *("job=id", ("status", lambda job: f"{job['status']} ({job['phase']})"), "reason", "model"),
    *("fine-tuned model=fine_tuned_model", "?version of=publish_as"),
    ("?gate", lambda job: _gate(job.get("gate"))),
    *("devices", ("?energy", lambda job: energy_line(job["energy"]) if job.get("energy") else ""), "owner"),
    ("priority", lambda job: f"{job['priority']}{'' if job['preemptible'] else ', not preemptible'}"),
    *("deadline=deadline_s:moment", ("step", _step), "loss:loss", "validation loss=valid_loss:loss"),
    *("verdict=verdict.text", "tokens/s=tokens_per_s:count", ("time to finish", _eta), "created=created_s:moment"),
    *("started=started_s:moment", "finished=finished_s:moment", "training file=training_file"),
    *("validation file=validation_file", "error=error.message"),
)


def _gate(gate: Row | None) -> str:
    if not gate:
        return ""
    return f"{gate['verdict']}: {gate['reason']}" if gate["verdict"] else f"waits for {gate['eval_id']}"


def job(row: Row) -> Any:
    """A job, and its hyperparameters as --set takes them; a dash for what the box decides while the job runs."""
    settings = row.get("resolved") or row.get("hyperparameters") or {}

    def as_set(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return or_dash(",".join(map(str, value)))
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:.6g}" if isinstance(value, float) else or_dash(value)

    rows = [(name, as_set(value)) for name, value in sorted(settings.items())]
    table = output.table(("HYPERPARAMETER", "VALUE"), rows) if rows else None
    return output.stack(output.record(_JOB, row), table)


def queue(answer: Row) -> Any:
    def may_use(job: Row) -> str:
        if job["allowed_sizes"]:
            return ",".join(map(str, job["allowed_sizes"]))
        return f"{job['min_devices'] or 1} to {job['max_devices'] or 'all'}"

    columns: tuple[output.Column, ...] = (
        *(">#=position", "job=id", "owner", ">priority", "phase", ">devices:total", ("may use", may_use)),
        *("deadline=deadline_s:moment", "reason", ("", lambda job: job["message"])),
    )
    table = output.listing(columns, answer["data"], empty="no job waits or runs")
    owners = output.listing(("owner", ">running", ">waiting", ">devices"), answer["owners"], empty="")
    return output.stack(table, owners if answer["data"] else None)


def energy_line(drawn: Row | None) -> str:
    """Energy in one line: in all, and for each step and token."""
    if drawn is None:
        return NOT_KNOWN
    parts = [f"{drawn['kwh']:.3g} kWh" if drawn["kwh"] >= 0.1 else f"{drawn['kwh'] * 1000:.3g} Wh"]
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


def limit_line(limits: Row) -> str:
    """The power limit in force, in one line."""
    if not limits.get("set"):
        return "the box sets none"
    limit = "the devices' own" if limits["limit_w"] is None else f"{limits['limit_w']:g} W a device"
    return "; ".join([limit, *(f"not on {device}: {why}" for device, why in limits["refused"].items())])


def power(answer: Row) -> Any:
    columns: tuple[output.Column, ...] = (
        ("held by", lambda one: "nobody" if one["kind"] == "idle" else one["kind"]),
        *(("", lambda one: one["name"]), (">energy", lambda one: joules(one["joules"]))),
        (">device-hours", lambda one: f"{one['metered_s'] / 3600:.2f}"),
        (">W per device", lambda one: f"{one['joules'] / one['metered_s']:.0f}" if one["metered_s"] else "-"),
        (">per 1,000 tokens", lambda one: joules(one["joules_per_1000_tokens"])),
    )
    empty = "nothing was counted in that time" if answer["meters"] else f"energy is {NOT_KNOWN}"
    rows = output.listing(columns, answer["data"], empty=empty)
    return output.stack(output.fields(("limit", limit_line(answer["limits"]))), rows)


def usage(answer: Row) -> Any:
    counted = ("requests", "refused", "errors", "prompt_tokens", "completion_tokens")
    columns: tuple[output.Column, ...] = (f"{answer['by']}=name", *(f"{name}:count" for name in counted))
    hours = ("device-hours", lambda row: f"{row['device_hours']:.2f}")
    return output.listing((*columns, hours), answer["data"], empty="nothing was spent in that time")


def audit_detail(row: Row) -> str:
    # A null is shown too: it is a limit that was lifted.
    shown = {name: value for name, value in row["detail"].items() if value not in ("", [])}
    return "  ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in shown.items()
    )


# Models


def models(answer: Row) -> Any:
    rows = answer["data"]
    if any(_is_callable(model) for model in rows):
        return output.listing(_CALLABLE, rows, empty="")
    columns: tuple[output.Column, ...] = (
        *("model=name", ("kind", lambda model: _kind(model)), "architecture=arch", ">params:count"),
        *(">size=bytes:size", "version=active_version", "challenger=aliases.challenger", "state"),
    )
    table = output.listing(
        columns, rows, empty="no models; `appliance model catalog` lists some that `appliance model import` brings in"
    )
    return output.stack(table, output.notes(f"{one['name']}: {one['message']}" for one in rows if one.get("message")))


_CALLABLE: tuple[output.Column, ...] = (
    *("model=id", "of=owned_by", ">context=max_model_len:count", "created:moment"),
    ("state", lambda model: or_dash(model["state_details"] or model["state"])),
)


def _is_callable(model: Row) -> bool:
    """Whether it is OpenAI's object, which keys without the scope read get."""
    return "name" not in model


def _kind(model: Row) -> str:
    adapter = model.get("adapter")
    return f"adapter of {adapter['base']}" if adapter else model["kind"]


def _whole_kind(model: Row) -> str:
    adapter, base = model.get("adapter"), model.get("base")
    if adapter:
        return f"adapter of {adapter['base']} {adapter['base_version']}, rank {adapter['rank']}"
    return f"{model['kind']} of {base}" if base else model["kind"]


def audience(model: Row) -> str:
    if model.get("shared_with_everybody") or "*" in model["shared_with"]:
        return "everybody"
    names = [name for name in (model["owner"], *model["shared_with"]) if name]
    return f"{', '.join(names)} and operators" if names else "operators alone"


_SETTINGS = ("?settings number=settings_number", "?settings:short", "?set by the box=settings_note")
_MODEL: tuple[output.Column, ...] = (
    *("model=name", ("kind", _whole_kind), "architecture=arch", "parameters=params:count", "size=bytes:size"),
    *("context=max_model_len", "?why=context_note", "source", ("for", audience), "?tool calls=info.tool_parser"),
    *("?reasoning=info.reasoning_parser", "?template=info.template:short", *_SETTINGS),
    *("?challenger=aliases.challenger", "state", "?message", "?versions by=reload_note"),
)


def model(row: Row) -> Any:
    if _is_callable(row):
        return output.record([one.lstrip(">") if isinstance(one, str) else one for one in _CALLABLE], row)
    versions: tuple[output.Column, ...] = (
        ("version", lambda one: one["version"] + (" *" if one["version"] == row["active_version"] else "")),
        *("created=created_s:moment", ">size=bytes:size"),
        *(("in", lambda one: " + ".join(one["tiers"]) or "-"), "pinned:yes", "source"),
    )
    table = output.listing(versions, row["versions"], empty="no versions")
    challenged = canary(row["canary"]) if row.get("canary") else None
    notes = output.notes((row.get("info") or {}).get("warnings", ()))
    return output.stack(output.record(_MODEL, row), table, challenged, notes)


def deployment(answer: Row) -> Any:
    most = "[serve] max_replicas" if answer["max_replicas"] is None else answer["max_replicas"]
    columns: tuple[output.Column, ...] = (
        *("model", ("replicas", lambda row: f"{row['min_replicas']} to {most}"), "tensor parallel=tensor_parallel"),
        *("TTFT p95=ttft_p95_s:duration", "TPOT p95 in ms=tpot_p95_ms", "sleeps after=idle_sleep_s:duration"),
        *("pinned:yes", "fails=failed_reason", *_SETTINGS),
    )
    return output.record(columns, answer)


_CANARY: tuple[output.Column, ...] = (
    ("canary", lambda row: f"{row['version']} of {row['model']}, {row['share'] * 100:g}% of the requests"),
    ("state", lambda row: row["state"].replace("_", " ") + (", on its own" if row["auto"] else "")),
    *("began=created_s:moment", "ended=ended_s:moment", "message", "?verdict=decision.verdict"),
    "?because=decision.reason",
)


def canary(row: Row) -> Any:
    columns = (
        *("version", ">requests:n", ">errors:n", ">first byte p95=first_byte_p95_s:duration"),
        ">duration p95=duration_p95_s:duration",
    )
    rows = [{"version": version, **one} for version, one in (row["versions"] or {}).items()]
    return output.stack(output.record(_CANARY, row), output.listing(columns, rows, empty=""))


def rolled_back(done: Row) -> str:
    swap, text = done["swap"], f"{done['model']}: {done['from']} -> {done['to']}"
    if swap.get("how") is None:
        return text
    moved = f"{size(swap['bytes'])} in {formats.duration(swap['seconds'])}"
    return f"{text}, {swap['how']}: {moved}, streams paused {formats.duration(swap['pause_s'])}"


def operation(one: Row) -> Any:
    """An operation and what it made."""
    result = dict(one.get("result") or {})
    warnings = result.pop("warnings", ())
    checked = None
    if result.get("versions") and isinstance(result["versions"][0], dict):
        columns = ("version", ">tensors", ">size=bytes:size", "place=path")
        checked = output.listing(columns, result.pop("versions"), empty="")
    drawn = {"bytes": ("size", size), "params": ("parameters", formats.count)}
    rows = [("operation", one["id"]), ("state", one["state"])]
    rows += [(label, draw(result[name])) for name, (label, draw) in drawn.items() if name in result]
    rows += [(name, or_dash(value)) for name, value in result.items() if name not in drawn]
    return output.stack(output.fields(*rows), checked, output.notes(warnings))


def tier_backlog(tier: Row) -> str:
    return f"{tier['backlog']} ({size(tier['backlog_bytes'])})" if tier["backlog"] else "-"


def profile(found: Row, requested: int) -> Any:
    """Where the time of profiled steps went. requested: steps."""
    seconds, steps, of_job = found["seconds"], found["steps"], "step" in found
    fewer = f"after {PROFILED_ROWS} rows of data, a minute, or at the job's end" if of_job else "after a minute"
    short = f"{steps} of the {requested} steps asked for: a profile ends {fewer}" if steps < requested else None
    if not of_job and not found["operators"]:
        name = found["model"]
        asks = f"ask it while it is profiled (`appliance chat {name}`)"
        return f"{name} made no step in {seconds:.0f} s, for nobody asked it: {asks}"
    shares = [(where, f"{s / seconds:.1%}", f"{s / max(1, steps):.4f}") for where, s in found["share"].items()]
    columns: tuple[output.Column, ...] = (
        *("operator=name", "where=kind", (">share", lambda one: f"{one['seconds'] / seconds:.1%}"), ">calls=count"),
    )
    last = f", up to step {found['step']}" if of_job else f" of {found['model']}@{found['version']}"
    where = " in the data directory" if of_job else ""
    trace = f"trace: {found['trace']}{where}, {size(found['bytes'])}" if found["trace"] else ""
    return output.stack(
        f"{steps} steps{last}, in {seconds:.2f} s",
        short,
        output.table(("WHERE", ">SHARE", ">S/STEP"), shares),
        output.listing(columns, found["operators"], empty="no operator was seen"),
        trace or "no trace file: it would be too long; ask for fewer steps",
    )


PROFILED_ROWS = 8
"""Of data, in one profile of a job; runtime.profile_shares has the bound."""


# Files, batches, keys


def batch_counts(batch: Row) -> str:
    counts = batch["request_counts"]
    return f"{counts['completed']} answered, {counts['failed']} failed of {counts['total']}"


def batch(row: Row) -> Any:
    columns: tuple[output.Column, ...] = (
        *("id", "status", ("requests", batch_counts), "waits for=waiting_for", "model", "endpoint"),
        *("created=created_at:moment", "expires=expires_at:moment", "input file=input_file_id"),
        *("output file=output_file_id", "error file=error_file_id"),
    )
    errors = (row.get("errors") or {}).get("data") or []
    lines = [batch_error(one) for one in errors[:20]]
    left = [f"{len(errors) - 20} more; -o json has them"] if errors[20:] else []
    return output.stack(output.record(columns, row), "\n".join([*lines, *left]) or None)


def batch_error(error: Row) -> str:
    return f"line {error['line']}: {error['message']}" if error.get("line") else error["message"]


def key_limits(key: Row) -> str:
    shown = [
        f"{key[name]:,} {name.partition('_')[0]}/{name.rpartition('_')[2].replace('minute', 'min')}"
        for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month")
        if key.get(name) is not None
    ]
    shown += [
        f"{key[name]} {what}"
        for name, what, usual in (
            ("max_priority", "priority", 0),
            ("max_non_preemptible", "non-preemptible", 0),
            ("max_deadlines", "deadlines", 0),
            ("max_held", "held", 16),
        )
        if key.get(name, usual) != usual
    ]
    if key.get("models") is not None:
        shown.append(f"only {', '.join(key['models']) or 'what its jobs make'}")
    return "; ".join(shown) or "none"


def key_ends(key: Row) -> str:
    return "" if key.get("expires_s") is None else f", until {moment(key['expires_s'])}"


def key_changed(key: Row) -> str:
    return f"{key['name']}: {key_limits(key)}{key_ends(key)}"


def key_revoked(answer: Row) -> str:
    name = f"{answer['name']} ({answer['id']})"
    if answer["already_revoked"]:
        return f"{name} was revoked already, {moment(answer['revoked_s'])}"
    texts = [f"revoked {name}"]
    for kind, one, more in (
        ("jobs", "job is paused", "jobs are paused (`appliance job resume` lets one go on)"),
        ("batches", "batch ends", "batches end"),
        ("responses", "response in background fails", "responses in background fail"),
        ("eval_runs", "run of an eval fails", "runs of evals fail"),
        ("operations", "operation on models fails", "operations on models fail"),
    ):
        if count := len(answer["stopped"].get(kind, ())):
            texts.append(f"{count} {one if count == 1 else more}")
    if "admin" in answer["scopes"] and not answer["admin_keys"]:
        texts.append("no key of scope admin is left: until one is made, only commands on the box itself administer it")
    return "; ".join(texts)
