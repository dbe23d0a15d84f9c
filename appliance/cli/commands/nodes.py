"""`appliance node invite|remove` and `appliance join`: other machines give their devices to the box."""

from __future__ import annotations

import os
import stat
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from appliance.cli import output
from appliance.cli.command import Session, command
from appliance.cli.errors import BadUsage, CommandFailed
from appliance.cli.locate import BoxFile, look_for_all, python, resolved
from appliance.cli.options import DATA_DIR, DEVICES, existing_file, opt
from appliance.paths import BoxPaths
from runtime.replace_file import replace_file


def _invitation(args: Namespace, act: str, *words: str) -> Any:
    """An act of `appliance.invitation` for the box of these options. Raises CommandFailed."""
    look_for_all()
    from appliance import invitation

    try:
        return getattr(invitation, act)(BoxPaths.of(BoxFile.read(args.data_dir).data_dir), *words)
    except invitation.InvitationError as error:
        raise CommandFailed(str(error)) from error


@command(
    "node invite",
    opt("node NAME", "Its devices are then called NAME/0, NAME/1, ..."),
    opt("address ADDRESS", "Its own on the network of the nodes."),
    DATA_DIR,
    needs="",
)
def invite(session: Session, args: Namespace) -> None:
    """Print an invitation, with which one machine can join.

    For the user who runs the box, on its machine. Whoever has the file can join as that machine: it is for the
    eyes of its owner alone. The same file serves each time that the machine joins.

    Examples:
      appliance node invite n1 10.0.0.6 > n1.json      then, on that machine: appliance join n1.json
    """
    if sys.stdout.isatty():
        line = f"appliance node invite {args.node} {args.address} > FILE"
        raise BadUsage(f"an invitation has secrets; write it to a file: {line}")
    invitation = _invitation(args, "invite", args.node, args.address)
    if stat.S_ISREG(os.fstat(1).st_mode):
        os.fchmod(1, 0o600)  # the shell made the file, for others to read
    print(invitation.text())


@command("node remove", opt("node NODE", "The first part of its devices' names, e.g. n1."), needs="here")
def remove(session: Session, args: Namespace) -> None:
    """Take a node out of the box at once: its Ray ends, and again whenever it joins, until it is invited again.

    For the user who runs the box, on its machine. Whoever took the machine over can still speak to Ray with its
    certificate: against that, make a new authority (docs/operations.md, More nodes).

    Examples:
      appliance node remove n1
    """
    _invitation(args, "remove", args.node)
    if session.as_json:
        output.print_json({"id": args.node, "removed": True})
    else:
        output.say(f"{args.node} is removed; `appliance node invite` lets a machine of this name join again")


@command(
    "join", opt("file FILE", "What `appliance node invite` printed.", type=existing_file), DATA_DIR, DEVICES, needs=""
)
def join(session: Session, args: Namespace) -> None:
    """Give this machine's devices to a box that runs on another machine; in the foreground until Ctrl-C.

    On the box: set node_address in [box], start it with `appliance up`, and call `appliance node invite`.
    All that nodes say to each other is encrypted, and each shows the certificate of its invitation.
    Ctrl-C: the box moves what runs here elsewhere, then this machine leaves; a second one ends it at once.

    Examples:
      appliance join n1.json --data-dir /srv/node --devices 4
    """
    settings = resolved(None, args.devices, data_dir=args.data_dir)
    folder = Path(settings.box.data_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    config_file = folder / "node.json"  # not a box's: one may run here by mistake
    replace_file(config_file, settings.model_dump_json().encode())
    process = python("appliance.boot.node", "--config", str(config_file))
    os.execv(sys.executable, [*process, "--invitation", str(args.file.resolve())])
