"""`appliance node`: the machines of the box; letting others join, and taking one out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.cli import formats, output
from appliance.cli.command import DATA_DIR, OUTPUT, Session, box_command, examples, group
from appliance.cli.locate import BoxFile
from appliance.cli.own_process import said_by

app = group("Nodes: the machines of the box, tokens with which others may join, and taking one out.")


@app.command(
    epilog=examples(
        "appliance node token",
        "appliance node token --minutes 60",
        "",
        "For the user who runs the box, on its machine. Whoever has the token can make one machine a node, once.",
    )
)
def token(
    data_dir: DATA_DIR = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, max=1440, help="How long it is good for.")] = 15,
    output_format: OUTPUT = "table",
) -> None:
    """Print a token with which one machine can join, once."""
    given = _box(data_dir, "--life-s", str(minutes * 60))
    if output_format == "json":
        output.print_json({"token": given, "minutes": minutes})
    else:
        print(given)
        join = "appliance join NODE_ADDRESS:NODE_PORT --name n1 --address ITS_OWN --token -"
        output.say(f"good for {minutes:g} minutes, once: {join}, which asks for it")


@box_command(app, "appliance node list", "appliance node list -o json", name="list")
def list_nodes(session: Session) -> None:
    """List the machines of the box. Each is asked now and says how much memory it has left."""
    session.show(session.client.get("/admin/v1/nodes"), _table)


def _table(answer: dict[str, Any]) -> Any:
    return output.table(
        ("NODE", "ADDRESS", ">DEVICES", ">ANSWERS IN", ">MEMORY LEFT", "CERTIFICATE UNTIL", "STATE"),
        (
            (
                node["id"],
                node["address"],
                len(node["devices"]),
                "no answer" if node["answered_s"] is None else formats.duration(node["answered_s"]),
                _memory(node),
                formats.moment(node["certificate_ends_s"]),
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
    """Take a node out of the box at once: its tunnels close, its Ray ends, and ray.token enrols no more nodes."""
    others = _box(data_dir, "--remove", node).split()
    if output_format == "json":
        output.print_json({"id": node, "removed": True, "certified": others})
        return
    output.say(f"{node} is removed; a machine may have its name again with a token of `appliance node token`")
    if others:
        # It had ray.token, with which it could get certificates for other names as long as no node was removed.
        output.say(f"certificates were given to {', '.join(others)} too: remove those that are no nodes of yours")


def _box(data_dir: Path | None, *options: str) -> str:
    """What the box on this data directory answers. Raises CommandFailed."""
    # A process of its own, like the box: importing what handles certificates takes longer than all of this command.
    where = ("--data-dir", str(BoxFile.read(data_dir).data_dir))
    return said_by("appliance.nodes.enrolment", *where, *options).strip()
