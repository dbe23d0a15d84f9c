"""The table of simple commands: each is one request and a way to draw the answer. Commands that do more are functions
in `appliance.cli.commands`."""

from __future__ import annotations

import inspect
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from appliance.cli import output
from appliance.cli.command import COMMANDS, Command, Session, patient
from appliance.cli.errors import AuthFailed, CliError, Conflict, Ended, NotFound
from appliance.cli.options import WATCH, Option, auto_or, number, opt, picked, seconds


def segment(name: str) -> str:
    """Quote a name as one segment of a path: model names contain ":" and may contain "/"."""
    return quote(name, safe="")


def has_ended(work: dict[str, Any]) -> bool:
    """Return whether a job, a batch or a run of an evaluation has ended."""
    return work["status"] in ("succeeded", "completed", "failed", "expired", "cancelled", "canceled")


@dataclass(frozen=True, slots=True)
class Row:
    """One command.

    request: method and path, with {id} where an argument `id` or each of `ids` goes. draw: columns of a list, a
    template of the answer's fields, or a function; "": all fields. options: their values, as `fields` reads them, are
    the query or the body. empty: what is said of an empty list. own: the path for a key without the scope read.
    """

    name: str
    request: str
    help: str
    draw: str | Callable[[Any], Any] = ""
    options: tuple[Option, ...] = ()
    empty: str = ""
    own: str = ""
    watch: bool = False
    timeout_s: float = 60.0
    fields: Callable[[Namespace, Iterable[Option]], dict[str, Any]] = picked

    def drawn(self, answer: Any) -> Any:
        if callable(self.draw):
            return self.draw(answer)
        if "{" in self.draw:
            return self.draw.format_map({name: output.by_name(name, value) for name, value in answer.items()})
        return output.listing(self.draw, answer["data"], empty=self.empty) if "data" in answer else output.view(answer)

    def command(self) -> Command:
        options = [*self.options, *((WATCH,) if self.watch else ())]
        text = inspect.cleandoc(self.help)
        if "Examples:\n" not in text:
            line = " ".join(["  appliance", self.name, *(option.shown for option in options if option.is_positional)])
            text += f"\n\nExamples:\n{line}\n{line} {'--watch' if self.watch else '-o json'}"
        return Command(self.name, text, self.run, tuple(options))

    def run(self, session: Session, args: Namespace) -> None:
        method, path = self.request.split(" ")
        fields = self.fields(args, self.options)
        id, ids, most = (fields.pop(name, None) for name in ("id", "ids", "limit"))

        def fetch(path: str, id: str) -> Any:
            path = path.format(id=segment(id))
            if method == "GET":
                return session.client.listed(path, most, **fields)
            body = fields or ({} if method == "PATCH" else None)
            return session.client.send(method, path, body=body, timeout_s=self.timeout_s)

        def answer() -> Any:
            try:
                return fetch(path, id or "")
            except AuthFailed:
                if self.own:
                    with suppress(AuthFailed):  # what it lacks for all of it is the reason
                        return fetch(self.own, id or "")
                raise

        if ids:
            refused: CliError | None = None
            for one in ids:  # a refused request does not stop the others
                try:
                    session.show(fetch(path, one), self.drawn)
                except (NotFound, Conflict) as error:
                    output.say(f"error: {error}")
                    refused = refused or error
            if refused:
                raise Ended(refused.exit_code)
        elif self.watch and args.watch:
            output.watch(answer(), patient(answer), self.drawn, as_json=session.as_json)
        else:
            session.show(answer(), self.drawn)


# How answers look where the order and the names of their fields do not say it

Answer = dict[str, Any]
_DEVICES = (
    "device=id kind name >memory=memory_bytes ?>used=meters.memory_used_bytes ?>heat=meters.temperature_c "
    "?>power=meters.power_w ?>limit=meters.power_limit_w ?slowed_by=meters.throttled ?>busy=meters.busy health ?cordon "
    "holder ?reason=health_reason ?lost"
)
_JOBS = (
    "job=id status ?phase model=fine_tuned_model|model ?>devices:total ?>step ?>of=total_steps ?>loss "
    "?>tokens/s=tokens_per_s:count ?>eta=eta_s ?reason:short"
)
_REPLICAS = "replica=id model version state >devices:total >requests=inflight >memory=rss_bytes"
_STEPS = "step=verb target state ?>time=seconds ?>bytes ?>rate=bytes_per_s ?path ?detail"
_QUEUE = (
    ">#=position job=id owner >priority phase >devices:total ?may_use=allowed_sizes ?>from=min_devices "
    "?>to=max_devices deadline=deadline_s reason message"
)


def _status(now: Answer) -> Any:
    box, devices, requests = now["box"], now["devices"], now["requests"].values()
    memory = now["memory"]
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
        "weights": f"{output.size(memory['used_bytes'])} of {output.size(memory['budget_bytes'])} of shared memory",
        "memory": memory.get("host"),
        "nodes' memory": memory.get("nodes"),
    }
    return output.stack(
        output.view(about),
        output.listing(_DEVICES, devices),
        output.listing(_REPLICAS, now["replicas"], empty="no replicas: a model starts when it is asked for"),
        output.listing(_JOBS, now["jobs"], empty="no unfinished jobs"),
        draw_handover(now["handover"]) if now["handover"] else None,
        output.listing("degraded=name since_s failures why", now["degraded"]) if now.get("degraded") else None,
        output.view({"notes": now["notes"]}) if now.get("notes") else None,
    )


def draw_mode(now: Answer) -> Any:
    return output.stack(output.view(now | {"handover": None}), now["handover"] and draw_handover(now["handover"]))


def draw_handover(handover: Answer) -> Any:
    """Draw a hand-over and a table of its steps."""
    steps = output.listing(_STEPS, handover["steps"], empty="no steps")
    return output.stack(output.view({**handover, "steps": None}), steps)


MODEL = opt("id MODEL")
JOB = opt("id JOB_ID")
_BATCH = opt("id BATCH_ID")
JOBS = "/v1/fine_tuning/jobs"


def limit(usual: int) -> Option:
    return opt("--limit N", "How many, the newest first.", type=number(int, 1, 1000), default=usual)


def _since(text: str) -> float:
    return max(0.0, time.time() - seconds(text))


MODE = (
    opt("--train N|auto", "With split: devices that training may have.", dest="train_devices", type=auto_or(int)),
    opt("--floor N", "Devices that serving keeps. Default: [box] serving_floor.", dest="serving_floor", type=int),
)
_POLICIES = ("serve", "train", "split", "auto")
POLICY = opt("policy serve|train|split|auto", choices=_POLICIES)


def mode_fields(args: Namespace, of: Iterable[Option]) -> dict[str, Any]:
    """A split between serving and training that the box itself chooses is the policy auto."""
    fields = picked(args, of)
    is_auto = args.policy == "split" and args.train_devices == "auto"
    return fields | ({"policy": "auto", "train_devices": None} if is_auto else {})


_SINCE = opt("--since TIME", "45m, 24h, 7d, in whole hours.", dest="since_s", type=_since, default="24h")

GROUPS = {
    "backup": "Backups: copies of the box elsewhere, taken while it runs.",
    "batch": "Batches: many requests from a file, answered while engines are idle.",
    "eval": "Evaluations: how good models are at a suite of prompts, by graders (docs/evals.md).",
    "file": "Files: training and validation data, and what jobs leave behind.",
    "gpu": "Devices: GPUs, or logical CPU devices where there is none.",
    "job": "Fine-tuning jobs.",
    "key": "API keys: who may use the box over the network. Commands on the box itself need none.",
    "mode": "Modes: who the devices belong to, serving or training.",
    "mode schedule": "Mode windows: modes that come and go by the clock, such as serve by day and train by night.",
    "model": "Models: base models, fine-tuned ones, and their versions.",
    "node": "Nodes: the machines of the box, invitations for others, and taking one out.",
    "plan": "Show whether a job would fit, and what it would choose, before anything is started.",
    "tier": "Tiers: where the bytes of models and jobs are kept.",
}

# fmt: off
ROWS = (
    Row("gpu list", "GET /admin/v1/devices",
        """List devices with their health and holder (a job, a replica or nobody), and of GPUs heat, power and use.

        Devices of a node that was lost stay in the list until it joins again, or until `gpu forget`.""", _DEVICES,
        empty="no devices", watch=True),
    Row("gpu undrain", "POST /admin/v1/devices/{id}/undrain", "Put a device back into use, whoever took it out.",
        "{id}: {health}", (opt("id DEVICE", "As `gpu list` names it, e.g. n0/3."),)),
    Row("gpu forget", "DELETE /admin/v1/nodes/{id}",
        "Remove the devices of a lost node from the list. A node that joins again is usable again.",
        "{id} is forgotten with its devices: {devices}",
        (opt("id NODE", "The first part of its devices' names, e.g. n1."),)),
    Row("node list", "GET /admin/v1/nodes",
        "List the machines of the box. Each is asked now for the memory it has left.",
        "node=id address >devices:total >answers_in=answered_s >memory_left=memory_available_bytes "
        ">of=memory_bytes ?home:yes ?leaves:yes", empty="no nodes"),
    Row("status", "GET /admin/v1/status", "Show the box at a glance: mode, devices, replicas, jobs, memory, hand-over.",
        _status, watch=True),
    Row("usage", "GET /admin/v1/usage", """Show who spent what: tokens by key or model, device-hours of training.

        A key of scope inference or fine_tuning sees what its owner's keys and jobs have spent.

        Examples:
          appliance usage
          appliance usage --by owner --since 30d -o json""",
        "name >requests:count >refused:count >errors:count >prompt_tokens:count >completion_tokens:count >device_hours",
        (opt("--by", "One row for each.", choices=("key", "owner", "model", "version", "hour"), default="key"), _SINCE),
        empty="nothing was spent in that time"),
    Row("power", "GET /admin/v1/power",
        "Show the power limit, and the energy of each job that had not ended before that time.", output.view,
        (_SINCE,)),
    Row("audit", "GET /admin/v1/audit", """Show who did what: every change, by whom, and its outcome.

        WHO is a key's name, or `box` for a command on the box itself, for a window and for the box's own decisions.

        Examples:
          appliance audit --limit 1000 -o json | jq '.data[] | select(.action == "key.create")'""",
        "when=created_s who=by action of=target outcome detail", (limit(50),), empty="nothing was changed yet"),
    Row("mode show", "GET /admin/v1/mode", "Show the mode, since when it holds, and what serving always keeps.",
        watch=True),
    Row("mode plan", "POST /admin/v1/mode/plan",
        """Show what a mode would do now and why, in one sentence per step. Does nothing.

        Examples:
          appliance mode plan                              what the scheduler would do right now, in the mode that holds
          appliance mode plan train --floor 1              what `mode set train --floor 1` would do""",
        lambda found: output.view({**found, "steps": found["steps"] or ["Nothing would move."]}),
        (opt("policy serve|train|split|auto", choices=_POLICIES, nargs="?"), *MODE), fields=mode_fields),
    Row("mode schedule add", "POST /admin/v1/mode/schedule",
        """Put a mode in force whenever the clock says so.

        The five fields are minute hour day-of-month month day-of-week, in the time zone --tz. A mode set by hand
        holds until the next window begins or ends; between windows that end, the mode set by hand holds.

        Examples:
          appliance mode schedule add "0 22 * * *" train --until "0 6 * * *" --tz Europe/Berlin --floor 1""",
        options=(
            opt("cron CRON", "When it begins: five fields in quotes."), POLICY, *MODE,
            opt("--until CRON", "When it ends."),
            opt("--for TIME", "Its length, such as 9h, 90m or 1h30m.", dest="for_s", type=seconds),
            opt("--tz ZONE", "IANA name of the time zone.", default="UTC"),
        ), fields=mode_fields),
    Row("mode schedule list", "GET /admin/v1/mode/schedule",
        "List windows in the order they were made. If two begin together, the later one holds.",
        "id begins=cron ends=until|for_s zone=tz mode=policy ?>train=train_devices >floor=serving_floor next=next_s",
        empty='no windows; `appliance mode schedule add "0 22 * * *" train --for 9h` makes one'),
    Row("mode schedule remove", "DELETE /admin/v1/mode/schedule/{id}",
        "Remove a window. If it holds now, the mode that holds without it takes over at once.", "removed {id}",
        (opt("id WINDOW", "As `mode schedule list` names it."),)),
    Row("tier list", "GET /admin/v1/tiers",
        "List tiers: what each holds, what is still to be copied to it, its last error.",
        "tier=name where >versions >snapshots >size=bytes >backlog >bytes_of_it=backlog_bytes now=busy last_error",
        empty="no tiers", watch=True),
    Row("model list", "GET /admin/v1/models",
        """List models: the version that answers, its canary, and whether it is awake.

        A key without the scope read gets the names that it may ask, as OpenAI's API has them.""",
        "model=name|id ?kind ?of=adapter.base|base|owned_by ?architecture=arch ?>params:count ?>size=bytes "
        "?version=active_version ?canary=canary_version ?>context=max_model_len state=state_details|state "
        "?message:short",
        empty="no models; `appliance model catalog` lists some that `appliance model import` brings in",
        own="/v1/models", watch=True),
    Row("model show", "GET /admin/v1/models/{id}",
        "Show one model with all its versions and the tiers that each is in.", options=(MODEL,), own="/v1/models/{id}"),
    Row("model rm", "DELETE /v1/models/{id}", "Delete a model with all its versions. Exit code 5 if a job uses it.",
        "deleted {id}", (MODEL,)),
    Row("model promote", "POST /admin/v1/models/{id}/promote",
        "Give the canary of a model all its requests, swapped in under running ones.", "{model}: {from} -> {to}",
        (MODEL,), timeout_s=600),
    Row("model rollback", "POST /admin/v1/models/{id}/rollback",
        "Serve an older version, swapped in under running requests; a model that has a canary loses that instead.",
        "{model}: {from} -> {to}",
        (MODEL, opt("--version VERSION", "The version to serve. Default: the one before.")), timeout_s=600),
    Row("job list", f"GET {JOBS}", """List jobs: how far each is, which devices it holds, and what it waits for.

        A key without the scope read gets its owner's, as OpenAI's API has them.""", _JOBS, (limit(100),),
        empty="no jobs; `appliance job submit --help` shows how to make one", watch=True),
    Row("job get", f"GET {JOBS}/{{id}}", "Show everything the box knows of one job.",
        lambda job: output.view(job | {"hyperparameters": None}),  # its method has them too
        (JOB,), watch=True),
    Row("job queue", "GET /admin/v1/queue",
        "List jobs in the order in which they get devices, each with why it waits, as Slurm does.",
        lambda answer: output.stack(
            output.listing(_QUEUE, answer["data"], empty="no job waits or runs"),
            output.listing("", answer["owners"]) if answer["data"] else None,
        ),
        watch=True),
    *(
        Row(f"job {name}", f"POST {JOBS}/{{id}}/{name}", help, f"{{id}}: {name} accepted, status {{status}}",
            (opt("ids JOB_ID", nargs="+"),))
        for name, help in (
            ("pause", "Suspend jobs at their next step; they give their devices back and keep their state."),
            ("resume", "Resume paused jobs at the steps where they stopped, on the devices there are."),
            ("cancel", "Cancel jobs for good. Exit code 5 if one of them has ended already."),
        )
    ),
    Row("batch list", "GET /v1/batches", "List batches, the newest first.",
        "id status >answered=request_counts.completed >failed=request_counts.failed >total=request_counts.total "
        "created=created_at ?waits_for=waiting_for", empty="no batches; `appliance batch create FILE` starts one"),
    Row("batch show", "GET /v1/batches/{id}", "Show how far a batch is, what it waits for, and its files.",
        options=(_BATCH,)),
    Row("batch cancel", "POST /v1/batches/{id}/cancel", "Cancel a batch. Its output file keeps the answers so far.",
        options=(_BATCH,)),
    Row("eval list", "GET /v1/evals", "List evaluations, the newest first.",
        "id name graders=testing_criteria:names created=created_at",
        empty="no evaluations; `appliance eval run` makes one"),
    Row("file list", "GET /v1/files", "List files, the newest first.",
        "id purpose >size=bytes status created=created_at filename",
        empty="no files; `appliance file upload FILE` sends one"),
    Row("file rm", "DELETE /v1/files/{id}", "Delete files. Jobs that were made from them keep their own copy.",
        "deleted {id}", (opt("ids FILE_ID", nargs="+"),)),
    Row("key revoke", "DELETE /admin/v1/keys/{id}",
        "Revoke a key at once: its requests, batches and background responses end, its jobs are paused.",
        options=(opt("id NAME_OR_ID"),)),
)
# fmt: on
COMMANDS.update({one.name: one.command() for one in ROWS})
