"""`appliance node`: the machines of the box; inviting others, and taking one out."""

from __future__ import annotations

import os
import stat
import sys
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import DATA_DIR, OUTPUT, Session, box_command, examples, group
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.locate import BoxFile
from appliance.cli.own_process import look_for_all

app = group("Nodes: the machines of the box, invitations for others, and taking one out.")


@app.command(
    epilog=examples(
        "appliance node invite n1 10.0.0.6 > n1.json      then, on that machine: appliance join n1.json",
        "",
        "For the user who runs the box, on its machine. Whoever has the file can join as that machine: it is for the",
        "eyes of its owner alone. The same file serves each time that the machine joins.",
    )
)
def invite(
    node: Annotated[str, typer.Argument(metavar="NAME", help="Its devices are then called NAME/0, NAME/1, ...")],
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Its own on the network of the nodes.")],
    data_dir: DATA_DIR = None,
) -> None:
    """Print an invitation, with which one machine can join."""
    if sys.stdout.isatty():
        raise BadUsage(f"an invitation has secrets; write it to a file: appliance node invite {node} {address} > FILE")
    invitation = _box(data_dir, "invite", node, address)
    if stat.S_ISREG(os.fstat(1).st_mode):
        os.fchmod(1, 0o600)  # the shell made the file, for others to read
    print(invitation.text())


@box_command(app, "appliance node list", "appliance node list -o json", name="list")
def list_nodes(session: Session) -> None:
    """List the machines of the box. Each is asked now and says how much memory it has left."""
    session.show(session.client.get("/admin/v1/nodes"), _table)


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("NODE", "ADDRESS", ">DEVICES", ">ANSWERS IN", ">MEMORY LEFT", "STATE"),
        (
            (
                node["id"],
                node["address"],
                len(node["devices"]),
                "no answer" if node["answered_s"] is None else formats.duration(node["answered_s"]),
                _memory(node),
                "leaves" if node["leaves"] else "home" if node["home"] else "",
            )
            for node in answer["data"]
        ),
        empty="no nodes",
    )


def _memory(node: dict[str, Any]) -> str:
    if node["memory_available_bytes"] is None:
        return "-"
    return f"{formats.size(node['memory_available_bytes'])} of {formats.size(node['memory_bytes'])}"


@app.command(
    epilog=examples(
        "appliance node remove n1",
        "",
        "For the user who runs the box, on its machine. Whoever took the machine over can still speak to Ray with its",
        "certificate: against that, make a new authority (docs/operations.md, More nodes).",
    )
)
def remove(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The first part of its devices' names, e.g. n1.")],
    data_dir: DATA_DIR = None,
    output_format: OUTPUT = "table",
) -> None:
    """Take a node out of the box at once: its Ray ends, and again whenever it joins, until it is invited again."""
    _box(data_dir, "remove", node)
    if output_format == "json":
        output.print_json({"id": node, "removed": True})
    else:
        output.say(f"{node} is removed; `appliance node invite` lets a machine of this name join again")


def _box(data_dir: str | None, function: str, *arguments: str) -> Any:
    """What this function of appliance.invitation returns for the box on this data directory. Raises CommandFailed."""
    look_for_all()
    from appliance import invitation  # fenced, for the time of `--help`
    from appliance.paths import BoxPaths

    try:
        return getattr(invitation, function)(BoxPaths.of(BoxFile.read(data_dir).data_dir), *arguments)
    except invitation.InvitationError as error:
        raise CommandFailed(str(error)) from error
