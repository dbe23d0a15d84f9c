"""`appliance node token|remove` and `appliance join`: other machines give their devices to the box."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from pathlib import Path

from appliance.cli import output
from appliance.cli.command import Session, command, existing_file, flag, number, opt
from appliance.cli.errors import BadUsage
from appliance.cli.local import DEVICES, devices_of, python, resolved, said_by
from appliance.cli.locate import BoxFile
from appliance.paths import BoxPaths
from runtime.replace_file import replace_file


@command(
    "node token",
    opt("--minutes N", "How long it is good for.", type=number(float, 1, 1440), default=15.0),
    needs="here",
)
def token(session: Session, args: Namespace) -> None:
    """Print a token with which one machine can join, once.

    For the user who runs the box, on its machine. Whoever has the token can make one machine a node, once.

    Examples:
      appliance node token
      appliance node token --minutes 60
    """
    made = _enrolment(args, "--life-s", str(args.minutes * 60))
    session.show({"token": made, "minutes": args.minutes}, lambda answer: answer["token"])
    if not session.as_json:
        join = "appliance join NODE_ADDRESS:NODE_PORT --name n1 --address ITS_OWN --token -"
        output.say(f"good for {args.minutes:g} minutes, once: {join}, which asks for it")


@command("node remove", opt("node NODE", "The first part of its devices' names, e.g. n1."), needs="here")
def remove(session: Session, args: Namespace) -> None:
    """Take a node out of the box at once: its tunnels close, its Ray ends, and ray.token enrols no more nodes.

    For the user who runs the box, on its machine. Whoever took the machine over can still speak to Ray with its
    certificate: against that, make a new authority (docs/operations.md, More nodes).

    Examples:
      appliance node remove n1
    """
    others = _enrolment(args, "--remove", args.node).split()
    if session.as_json:
        output.print_json({"id": args.node, "removed": True, "certified": others})
        return
    output.say(f"{args.node} is removed; a machine may have its name again with a token of `appliance node token`")
    if others:
        # It had ray.token, with which it could get certificates for other names as long as no node was removed.
        output.say(f"certificates were given to {', '.join(others)} too: remove those that are no nodes of yours")


def _enrolment(args: Namespace, *options: str) -> str:
    """What the box on this data directory answers. Raises CommandFailed."""
    # A process of its own, like the box: importing what handles certificates takes longer than all of this command.
    where = ("--data-dir", str(BoxFile.read(args.data_dir).data_dir))
    return said_by("appliance.nodes.enrolment", *where, *options).strip()


@command(
    "join",
    opt("head HOST:PORT", "node_address:node_port of the box."),
    opt("--name NAME", "Its devices are then called NAME/0, NAME/1, ...", required=True),
    opt("--address ADDRESS", "This machine's own on the network of the nodes.", required=True),
    opt(
        "--token -",
        "What `appliance node token` on the box printed. -: it is asked for, or read from stdin. Written out here "
        "every user of this machine can read it, and join in its place [APPLIANCE_JOIN_TOKEN].",
    ),
    opt("--token-file FILE", "A file with it, or a copy of <data dir>/ray.token of the box.", type=existing_file),
    DEVICES,
    flag("--renew", "Replace this node's key and certificate first."),
    needs="node",
)
def join(session: Session, args: Namespace) -> None:
    """Give this machine's devices to a box that runs on another machine; in the foreground until Ctrl-C.

    On the box: set node_address in [box], start it with `appliance up`, and call `appliance node token`.
    All that nodes say to each other is encrypted, and each shows the certificate that it got for its token.
    Ctrl-C: the box moves what runs here elsewhere, then this machine leaves; a second one ends it at once.

    Examples:
      appliance join 10.0.0.5:6380 --name n1 --address 10.0.0.6 --token -     asks for the token
      appliance join 10.0.0.5:6380 --name n1 --address 10.0.0.6        again, with the certificate it has
      appliance join 10.0.0.5:6380 --name n1 --address 10.0.0.6 --renew     with another one for that
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", args.name) or args.name == "n0":
        raise BadUsage(
            f"--name is {args.name!r}; expected small letters, digits and dashes, and not n0, the box itself"
        )
    if not re.fullmatch(r".+:[0-9]{1,5}", args.head):
        raise BadUsage(f"the box's address is {args.head!r}; expected HOST:PORT, its node_address and node_port")
    settings = resolved(None, data_dir=args.data_dir, devices=devices_of(args.devices), node_address=args.address)
    token, token_file = args.token or args.join_token, args.token_file
    if token is not None and token_file is not None:
        raise BadUsage("--token and --token-file say the same thing; give one of them")
    if args.renew and (token is not None or token_file is not None):
        raise BadUsage("--renew asks with the certificate that this node has; a token brings another one by itself")
    if token is not None:
        if token == "-":
            token = _asked_for()
        elif args.token:
            output.say("note: every user of this machine can read this token, and join in its place: use --token -")
        # In a file, because every user of this machine could read an argument.
        token_file = _kept(Path(settings.box.data_dir), token)
    paths = BoxPaths.of(Path(settings.box.data_dir))
    paths.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(paths.config_file, settings.model_dump_json().encode())
    command = python("appliance.boot.node", "--config", str(paths.config_file))
    token_option = () if token_file is None else ("--token-path", str(token_file.resolve()))
    renew_option = ("--renew",) if args.renew else ()
    os.execv(sys.executable, [*command, "--head", args.head, "--name", args.name, *token_option, *renew_option])


def _asked_for() -> str:
    """The token, from whoever is at the terminal, without showing it, or from stdin. Raises BadUsage."""
    from getpass import getpass

    token = getpass("token of `appliance node token`: ") if sys.stdin.isatty() else sys.stdin.readline()
    if not token.strip():
        raise BadUsage("no token was given: `appliance node token` on the box prints one")
    return token.strip()


def _kept(data_dir: Path, token: str) -> Path:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = data_dir / "join.token"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return path
