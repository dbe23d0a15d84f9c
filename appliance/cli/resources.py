"""The table of what the box has: for each kind its path, its columns and its plain verbs, which become commands.
Commands that do more are functions in `appliance.cli.commands`."""

from __future__ import annotations

import inspect
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import quote

from appliance.cli import output, views
from appliance.cli.command import COMMANDS, WATCH, Command, Option, Session, number, opt, picked, seconds
from appliance.cli.errors import AuthFailed, CliError, Conflict, NotFound, Said
from appliance.cli.formats import by_name
from appliance.cli.waiting import TIMEOUT, WAIT, Patience, finish

Draw = str | Callable[[Any], Any]


def segment(name: str) -> str:
    """A name as one segment of a path: model names hold ":" and may hold "/"."""
    return quote(name, safe="")


@dataclass(frozen=True, slots=True)
class Verb:
    """One command of a resource: a request, and how its answer is drawn.

    draw: columns of a list, a template of the answer's fields, or a function; "": the resource's columns, or all
    fields of one thing.
    of: "all" (the resource itself), "one" or "many" of its things. path: default: the resource's, the id and, unless it
    is read or deleted, the name. body, query: arguments that are sent, by names with spaces between; None for no body.
    own: what a key without the scope read gets instead. operation: the answer is one, which is waited for.
    """

    name: str
    help: str
    draw: Draw = ""
    of: str = "one"
    method: str = "POST"
    path: str = ""
    options: tuple[Option, ...] = ()
    body: str | None = None
    query: str = ""
    own: str = ""
    watch: bool = False
    operation: bool = False
    timeout_s: float = 60.0


_SAMPLES = {
    "JOB_ID": "ftjob-abc123",
    "MODEL": "smollm2-135m",
    "DEVICE": "n0/3",
    "NODE": "n1",
    "WINDOW": "win_4fG7kQ2x",
    "NAME_OR_ID": "alice",
    "FILE_ID": "file-abc123",
}
"""Values of arguments, for examples; of another KIND_ID it is `kind_abc123`."""


@dataclass(frozen=True, slots=True)
class Resource:
    """name, help: of its group of commands. key: the argument for one of its things. columns, empty: of its list."""

    name: str
    help: str
    path: str
    verbs: tuple[Verb, ...]
    key: Option
    columns: str = ""
    empty: str = ""

    def draw(self, verb: Verb, answer: Any) -> Any:
        if callable(verb.draw):
            return verb.draw(answer)
        if "{" in verb.draw:
            return verb.draw.format_map({name: by_name(name, value) for name, value in answer.items()})
        if "data" in answer:
            return output.listing(verb.draw or self.columns, answer["data"], empty=self.empty)
        return output.view(answer)

    def path_of(self, verb: Verb) -> str:
        """With {id} in it, where it is of a thing."""
        if verb.path:
            return verb.path
        below = "" if verb.of == "all" else "/{id}"
        return self.path + below + ("" if verb.method in ("GET", "DELETE") else f"/{verb.name}")

    def command(self, verb: Verb) -> Command:
        options = list(verb.options)
        if verb.of == "one":
            options.insert(0, self.key)
        elif verb.of == "many":
            options.insert(0, Option(("ids",), {**self.key.settings, "nargs": "+"}, self.key.names))
        options += WATCH if verb.watch else ()
        options += (*WAIT, TIMEOUT) if verb.operation else ()
        name = f"{self.name} {verb.name}".strip()
        text = inspect.cleandoc(verb.help)
        if "Examples:\n" not in text:
            names = [one.settings["metavar"] for one in options if one.flags[0][0] != "-"]
            values = [_SAMPLES.get(one, one.lower().removesuffix("_id") + "_abc123") for one in names]
            words = " ".join([name, *values])
            text += f"\n\nExamples:\n  appliance {words}" + (f"\n  appliance {words} --watch" if verb.watch else "")
            text += f"\n  appliance {words} -o json"
        return Command(name, text, partial(self.run, verb), tuple(options))

    def run(self, verb: Verb, session: Session, args: Namespace) -> None:
        path, draw = self.path_of(verb), partial(self.draw, verb)
        body = None if verb.body is None else picked(args, verb.body)
        send = partial(session.client.send, verb.method, body=body, timeout_s=verb.timeout_s)
        if verb.of == "many":
            _send_each(session, lambda one: send(path.format(id=segment(one))), args.ids, draw)
            return
        one = segment(args.id) if verb.of == "one" else ""

        def fetch(path: str) -> Any:
            if verb.method == "GET":
                return session.client.listed(
                    path.format(id=one), getattr(args, "limit", None), **picked(args, verb.query)
                )
            return send(path.format(id=one))

        def answer() -> Any:
            try:
                return fetch(path)
            except AuthFailed as refused:
                try:
                    if verb.own:
                        return fetch(verb.own)
                except AuthFailed:
                    pass  # a key of another scope: what it lacks for all of it is the reason
                raise refused

        if verb.operation:
            session.show(finish(session, answer(), args), draw)
        elif verb.watch and args.watch:
            follow(session, answer, draw, args.every)
        else:
            session.show(answer(), draw)


def follow(session: Session, fetch: Callable[[], Any], draw: Callable[[Any], Any], every_s: float) -> None:
    """Show again and again, also after a restart of the box."""
    first = fetch()  # what is wrong from the beginning ends the command
    patience, waiting = Patience(), [first]
    output.watch(
        lambda: waiting.pop() if waiting else patience.call(fetch), draw, every_s=every_s, as_json=session.as_json
    )


def _send_each(session: Session, send: Callable[[str], Any], ids: list[str], draw: Callable[[Any], Any]) -> None:
    """Sends for each, whatever becomes of the others; shows the answers, and then the refusals, of which the first is
    the command's. Raises CliError of what concerns all of them, the key or the box, behind these."""
    answers, refusals = list[dict[str, Any]](), list[CliError]()
    try:
        for one in ids:
            try:
                answers.append(send(one))
            except (NotFound, Conflict) as error:
                refusals.append(error)
    finally:
        if len(ids) > 1 and (answers or refusals):
            session.show({"data": answers}, lambda all_: "\n".join(map(draw, all_["data"])))
        elif answers:
            session.show(answers[0], draw)
        for refusal in refusals:
            output.say(f"error: {refusal}")
    if refusals:
        raise Said(refusals[0].exit_code)


ID = opt("id ID")


def resource(name: str, help: str, path: str, *verbs: Verb, key: Option = ID, **more: Any) -> Resource:
    return Resource(name, help, path, verbs, key, **more)


def read(name: str, help: str, draw: Draw = "", **more: Any) -> Verb:
    """A verb that shows the whole resource."""
    return Verb(name, help, draw, "all", "GET", **more)


def show(name: str, help: str, **more: Any) -> Verb:
    return Verb(name, help, of="one", method="GET", **more)


def limit(usual: int) -> Option:
    return opt("--limit N", "How many, the newest first.", type=number(int, 1, 1000), default=usual)


def _since(text: str) -> float:
    return max(0.0, time.time() - seconds(text))


SINCE = opt("--since TIME", "45m, 24h, 7d, in whole hours.", dest="since_s", type=_since, default="24h")
BY = opt("--by", "One row for each.", choices=("key", "owner", "model", "version", "hour"), default="key")
ORDER = opt("--order", "desc: the newest first.", choices=("desc", "asc"), default="desc")
JOB = opt("id JOB_ID", names="job")
MODEL = opt("id MODEL", names="model")
JOBS = "/v1/fine_tuning/jobs"
_AUDIT = "when=created_s who=by action of=target outcome detail"
_PREVIEW = "from=from_s to=to_s mode=policy ?>train=train_devices >floor=serving_floor ?window ?instead_of=overridden"

RESOURCES = (
    resource(
        "gpu",
        "Devices: GPUs, or logical CPU devices where there is none.",
        "/admin/v1/devices",
        read(
            "list",
            """List devices with their health and holder (a job, a replica or nobody), and of GPUs heat, power and use.

            Devices of a node that was lost stay in the list until it joins again, or until `gpu forget`.""",
            watch=True,
        ),
        Verb("undrain", "Put a device back into use, whoever took it out.", "{id}: {health}"),
        key=opt("id DEVICE", "As `gpu list` names it, e.g. n0/3."),
        columns=views.DEVICES,
        empty="no devices",
    ),
    resource(
        "node",
        "Nodes: the machines of the box, invitations for others, and taking one out.",
        "/admin/v1/nodes",
        read("list", "List the machines of the box. Each is asked now for the memory it has left."),
        columns="node=id address >devices:total >answers_in=answered_s >memory_left=memory_available_bytes "
        ">of=memory_bytes ?home:yes ?leaves:yes",
        empty="no nodes",
    ),
    resource(
        "status",
        "Show the box at a glance.",
        "/admin/v1/status",
        read(
            "", "Show the box at a glance: mode, devices, replicas, jobs, memory, hand-over.", views.status, watch=True
        ),
    ),
    resource(
        "usage",
        "Show who spent what: tokens by key or model, device-hours of training.",
        "/admin/v1/usage",
        read(
            "",
            """Show who spent what: tokens by key or model, device-hours of training.

            A key of scope inference or fine_tuning sees what its owner's keys and jobs have spent.

            Examples:
              appliance usage
              appliance usage --by model --since 7d
              appliance usage --by owner --since 30d -o json""",
            options=(BY, SINCE),
            query="by since_s",
        ),
        columns="name >requests:count >refused:count >errors:count >prompt_tokens:count >completion_tokens:count "
        ">device_hours",
        empty="nothing was spent in that time",
    ),
    resource(
        "power",
        "Show the power limit, and the energy of jobs.",
        "/admin/v1/power",
        read(
            "",
            "Show the power limit, and the energy of each job that had not ended before that time.",
            output.view,
            options=(SINCE,),
            query="since_s",
        ),
    ),
    resource(
        "audit",
        "Show who did what: every change, by whom, and its outcome.",
        "/admin/v1/audit",
        read(
            "",
            """Show who did what: every change, by whom, and its outcome.

            WHO is a key's name, or `box` for a command on the box itself, for a window and for the box's own decisions.

            Examples:
              appliance audit
              appliance audit --limit 1000 -o json | jq '.data[] | select(.action == "key.create")'""",
            options=(limit(50),),
        ),
        columns=_AUDIT,
        empty="nothing was changed yet",
    ),
    resource(
        "mode",
        "Modes: who the devices belong to, serving or training.",
        "/admin/v1/mode",
        read("show", "Show the mode, since when it holds, and what serving always keeps.", watch=True),
    ),
    resource(
        "mode schedule",
        "Mode windows: modes that come and go by the clock, such as serve by day and train by night.",
        "/admin/v1/mode/schedule",
        read("list", "List windows in the order they were made. If two begin together, the later one holds."),
        Verb(
            "remove",
            "Remove a window. If it holds now, the mode that holds without it takes over at once.",
            "removed {id}",
            method="DELETE",
        ),
        read(
            "preview",
            """Show what will hold over the coming 24 hours, in this machine's local time.

            Without a window the mode that was set by hand holds.

            Examples:
              appliance mode schedule preview
              appliance mode schedule preview --hours 168""",
            _PREVIEW,
            path="/admin/v1/mode/schedule/preview",
            options=(opt("--hours N", "How far to look.", type=number(float, 1, 744), default=24.0),),
            query="hours",
        ),
        key=opt("id WINDOW", "As `mode schedule list` names it."),
        columns="id begins=cron ends=until|for_s zone=tz mode=policy ?>train=train_devices "
        ">floor=serving_floor next=next_s",
        empty='no windows; `appliance mode schedule add "0 22 * * *" train --for 9h` makes one',
    ),
    resource(
        "tier",
        "Tiers: where the bytes of models and jobs are kept.",
        "/admin/v1/tiers",
        read("list", "List tiers: what each holds, what is still to be copied to it, its last error.", watch=True),
        Verb(
            "verify",
            """Read every copy of every model, adapter and snapshot, and compare it with its checksums.

            Exit code 1 names every copy that is damaged. On disk or in the remote store such a copy is replaced from
            the next tier when it is needed; in memory it goes at once, if nobody reads it and a tier has it whole.""",
            views.operation,
            of="all",
            operation=True,
        ),
        columns="tier=name where >versions >snapshots >size=bytes >backlog >bytes_of_it=backlog_bytes "
        "now=busy last_error",
        empty="no tiers",
    ),
    resource(
        "model",
        "Models: base models, fine-tuned ones, and their versions.",
        "/admin/v1/models",
        read(
            "list",
            """List models: the version that answers, its canary, and whether it is awake.

            A key without the scope read gets the names that it may ask, as OpenAI's API has them.""",
            views.models,
            watch=True,
            own="/v1/models",
        ),
        show("show", "Show one model with all its versions and the tiers that each is in.", own="/v1/models/{id}"),
        Verb(
            "rm",
            "Delete a model with all its versions. Exit code 5 if a job uses it.",
            "deleted {id}",
            method="DELETE",
            path="/v1/models/{id}",
        ),
        Verb(
            "verify",
            "Compare every tensor of every version with its checksum. Exit code 1 names what is damaged.",
            views.operation,
            operation=True,
        ),
        Verb(
            "promote",
            "Give the canary of a model all its requests, swapped in under running ones.",
            "{model}: {from} -> {to}",
            body="",
            timeout_s=600,
        ),
        Verb(
            "rollback",
            """Serve an older version, swapped in under running requests; a model that has a canary loses that instead.

            Examples:
              appliance model rollback ft:starter:local:gsm8k:a1b2c3d4
              appliance model rollback ft:starter:local:gsm8k:a1b2c3d4 --version step-120""",
            "{model}: {from} -> {to}; swap: {swap}",
            options=(opt("--version VERSION", "The version to serve. Default: the one before."),),
            body="version",
            timeout_s=600,
        ),
        Verb(
            "pin",
            """Keep a version in every tier, whatever the retention rules say.

            Examples:
              appliance model pin ft:starter:local:gsm8k:a1b2c3d4 step-120
              appliance model pin ft:starter:local:gsm8k:a1b2c3d4 step-120 --off""",
            "{model} {version}, pinned: {pinned}",
            options=(
                opt("version VERSION"),
                opt("--off", "Leave it to the retention rules again.", dest="pinned", action="store_false"),
            ),
            body="version pinned",
        ),
        key=MODEL,
    ),
    resource(
        "job",
        "Fine-tuning jobs.",
        JOBS,
        read(
            "list",
            """List jobs: how far each is, which devices it holds, and what it waits for.

            A key without the scope read gets its owner's, as OpenAI's API has them.""",
            options=(limit(100),),
            watch=True,
        ),
        show("get", "Show everything the box knows of one job.", watch=True),
        read(
            "queue",
            "List jobs in the order in which they get devices, each with why it waits, as Slurm does.",
            views.queue,
            path="/admin/v1/queue",
            watch=True,
        ),
        *(
            Verb(name, help, f"{{id}} is {done}", of="many", path=f"/admin/v1/jobs/{{id}}/{name}")
            for name, help, done in (
                ("hold", "Keep jobs in the queue; one that runs is suspended at its next step.", "held"),
                ("release", "Release held jobs: they get devices again in their turn.", "released"),
            )
        ),
        *(
            Verb(name, help, f"{{id}}: {name} accepted, status {{status}}", of="many", path=f"{JOBS}/{{id}}/{name}")
            for name, help in (
                ("pause", "Suspend jobs at their next step; they give their devices back and keep their state."),
                ("resume", "Resume paused jobs at the steps where they stopped, on the devices there are."),
                ("cancel", "Cancel jobs for good. Exit code 5 if one of them has ended already."),
            )
        ),
        key=JOB,
        columns=views.JOBS,
        empty=views.NO_JOBS,
    ),
    resource("profile", "Show where the time of a running job goes.", "/admin/v1/jobs"),
    resource("plan", "Show whether a job or a model would fit, before anything is started.", "/admin/v1/plan"),
    resource(
        "batch",
        "Batches: many requests from a file, answered while engines are idle.",
        "/v1/batches",
        read("list", "List batches, the newest first."),
        show("show", "Show how far a batch is, what it waits for, and its files."),
        Verb("cancel", "Cancel a batch. Its output file keeps the answers so far."),
        key=opt("id BATCH_ID"),
        columns="id status >answered=request_counts.completed >failed=request_counts.failed "
        ">total=request_counts.total created=created_at ?waits_for=waiting_for",
        empty="no batches; `appliance batch create FILE` starts one",
    ),
    resource(
        "eval",
        "Evaluations: how good models are at a suite of prompts, by graders (docs/evals.md).",
        "/v1/evals",
        read("list", "List evaluations, the newest first.", options=(ORDER,), query="order"),
        columns="id name graders=testing_criteria:names created=created_at",
        empty="no evaluations; `appliance eval run` makes one",
    ),
    resource(
        "file",
        "Files: training and validation data, and what jobs leave behind.",
        "/v1/files",
        read(
            "list",
            "List files, the newest first.",
            options=(opt("--purpose PURPOSE", "Only files of this purpose."),),
            query="purpose",
        ),
        Verb(
            "rm",
            "Delete files. Jobs that were made from them keep their own copy.",
            "deleted {id}",
            of="many",
            method="DELETE",
        ),
        key=opt("id FILE_ID"),
        columns="id purpose >size=bytes status created=created_at filename",
        empty="no files; `appliance file upload FILE` sends one",
    ),
    resource(
        "key",
        "API keys: who may use the box over the network. Commands on the box itself need none.",
        "/admin/v1/keys",
        Verb(
            "revoke",
            "Revoke a key at once: its requests, batches and background responses end, its jobs are paused.",
            views.key_revoked,
            method="DELETE",
        ),
        key=opt("id NAME_OR_ID"),
    ),
    resource(
        "gpu",
        "",
        "/admin/v1/nodes",
        Verb(
            "forget",
            "Remove the devices of a lost node from the list. A node that joins again is usable again.",
            "{id} is forgotten with its devices: {devices}",
            method="DELETE",
        ),
        key=opt("id NODE", "The first part of its devices' names, e.g. n1."),
    ),
    resource("backup", "Backups: copies of the box elsewhere, taken while it runs.", ""),
    resource("support", "Collect what somebody else needs to see what is wrong with a box.", ""),
)
GROUPS = {one.name: one.help for one in RESOURCES if one.help}
COMMANDS.update({made.name: made for one in RESOURCES for made in map(one.command, one.verbs)})
