"""Commands as data (name, help, options, function), their parser, their session with a box, and waiting for the work
that they start."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import shutil
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from appliance.cli import output
from appliance.cli.errors import BadUsage, CommandFailed, Unreachable, WaitTimedOut
from appliance.cli.locate import BoxFile
from appliance.cli.options import DATA_DIR, OUTPUT, Option, either, number, opt

WORK_TIMEOUT_S = 900.0
"""Of an answer for which the box reads a whole file, or a model writes: a held request waits for an engine to wake."""


_SHARED = {
    "box": (
        OUTPUT,
        opt("--url URL", "A box elsewhere [APPLIANCE_URL]."),
        opt("--api-key KEY", "For --url [APPLIANCE_API_KEY].", env="APPLIANCE_API_KEY"),
        replace(DATA_DIR, env=""),  # no `env` here, nor for --url: a typed option wins over both variables
    ),
    "here": (OUTPUT, DATA_DIR),
    "": (),
}


@dataclass(frozen=True)
class Session:
    """A command's connection to a box, and the form of its output.

    client: a Client; None if the command needs no box. box_file: None for a box named by URL.
    """

    client: Any
    as_json: bool
    box_file: BoxFile | None = None

    def show(self, answer: Any, render: Callable[[Any], Any] = output.view) -> None:
        """Print an answer of the box, as JSON or drawn."""
        output.print_json(answer) if self.as_json else output.draw(render(answer))


Function = Callable[[Session, Namespace], None]


@dataclass(frozen=True, slots=True)
class Command:
    """One command. help: its text, then examples after "Examples:". needs: key of `_SHARED` for its shared options;
    "box" gives its session a client. without_box: returns whether given arguments need no box."""

    name: str
    help: str
    run: Function
    options: tuple[Option, ...] = ()
    needs: str = "box"
    without_box: Callable[[Namespace], bool] = lambda _: False

    @property
    def all_options(self) -> tuple[Option, ...]:
        return (*self.options, *_SHARED[self.needs])

    def call(self, words: list[str]) -> None:
        """Run the command. Raises CliError, and SystemExit for a wrong argument."""
        args = Parser(self).parse_intermixed_args(words)
        if self.needs != "box" or self.without_box(args):
            session = Session(None, getattr(args, "output", "") == "json")
        else:
            session = open_session(args)
        self.run(session, args)


COMMANDS: dict[str, Command] = {}
"""By name, such as "job list"; filled by `command` and by the table of resources."""


def command(name: str, *options: Option, **more: Any) -> Callable[[Function], Function]:
    """Register a function as a command; its docstring is the help. more: fields of `Command`."""

    def add(run: Function) -> Function:
        COMMANDS[name] = Command(name, inspect.getdoc(run) or "", run, options, **more)
        return run

    return add


class Parser(argparse.ArgumentParser):
    """Parser of the arguments of one command."""

    def __init__(self, entry: Command):
        text, _, examples = entry.help.partition("\n\nExamples:\n")
        words = [option.shown for option in entry.options if option.is_positional or option.settings.get("required")]
        prog, width = f"appliance {entry.name}", min(110, shutil.get_terminal_size().columns)
        super().__init__(
            prog=prog,
            usage=" ".join([prog, *words, "[options]"]),
            description=text,
            epilog=f"Examples:\n{textwrap.indent(textwrap.dedent(examples), '  ')}",
            allow_abbrev=False,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width),
        )
        for option in entry.all_options:
            default = os.environ.get(option.env)  # argparse converts this text by the option's type
            self.add_argument(*option.flags, **option.settings, **({"default": default} if default else {}))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; `{self.prog} --help` shows what it takes\n")


def open_session(args: Namespace) -> Session:
    """Open the box that the options name, else the environment's, whose URL comes before its data directory. Raises
    BadUsage, and Unreachable if no box runs on this machine."""
    from appliance.cli.client import Client  # imported here because httpx takes longer than the rest of `--help`

    if args.url and args.data_dir:
        raise BadUsage("--url and --data-dir name two boxes; give one of them")
    as_json = args.output == "json"
    if url := args.url or (None if args.data_dir else os.environ.get("APPLIANCE_URL")):
        return Session(Client(url, args.api_key), as_json)
    box_file = BoxFile.read(args.data_dir or os.environ.get("APPLIANCE_DATA_DIR"))
    client = Client(socket_path=box_file.controller_socket(), why_silent=box_file.why_silent)
    return Session(client, as_json, box_file)


# Waiting for work that a command started: survives restarts of the box, and shows progress

WAIT = either("--wait", "--no-wait", "Return when it is done (the default).", True)
TIMEOUT = opt("--timeout SECONDS", "Give up waiting, exit code 124; the box goes on.", type=number(float, 0))
POLL_S = 0.5
PATIENCE_S = 120.0


def patient(fetch: Callable[[], Any]) -> Callable[[], Any | None]:
    """Wrap `fetch` so that it returns None while the box restarts. The wrapper raises CliError, and Unreachable if the
    box is away for longer than PATIENCE_S."""
    gone_s = math.inf

    def call() -> Any | None:
        nonlocal gone_s
        try:
            answer = fetch()
        except Unreachable as error:
            if gone_s == math.inf:
                gone_s = time.monotonic() + PATIENCE_S
                output.say(f"{error}; trying again for {PATIENCE_S:.0f} s")
            if time.monotonic() > gone_s:
                raise
            return None
        gone_s = math.inf
        return answer

    return call


Doing = tuple[str, float | None, float | None]
"""What a piece of work is doing, how much of it is done, and of how much; None where that is not known."""


def until(
    fetch: Callable[[], Any],
    ended: Callable[[Any], Any],
    doing: Callable[[Any], Doing],
    timeout_s: float | None,
    name: str,
) -> Any:
    """Repeat `fetch`, showing progress, until `ended` holds for its answer; return that. Raises WaitTimedOut."""
    look, began_s = patient(fetch), time.monotonic()
    with output.progress(name) as meter:
        while True:
            if (now := look()) is not None:
                if ended(now):
                    return now
                meter(*doing(now))
            if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
                raise WaitTimedOut(f"{name} is not done after {timeout_s:g} s; the box continues it")
            time.sleep(POLL_S)


def finish(session: Session, started: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """Wait for the operation's end, except with --no-wait; return the operation. Raises CommandFailed if it failed."""

    def doing(operation: dict[str, Any]) -> Doing:
        progress = operation.get("progress") or {}
        message = ": ".join(filter(None, [operation["kind"], progress.get("message")]))
        return message, progress.get("done"), progress.get("total")

    operation = started["operation"]
    if not args.wait:
        return operation
    if operation["state"] == "running":
        operation = until(
            lambda: session.client.get(f"/admin/v1/operations/{operation['id']}")["operation"],
            lambda now: now["state"] != "running",
            doing,
            args.timeout,
            f"{operation['kind']} (operation {operation['id']})",
        )
    if operation["state"] == "failed":
        error = operation["error"]
        named = f" ({error['code']})" if error.get("code") else ""
        raise CommandFailed(f"{operation['kind']} failed{named}: {error['message']}")
    return operation
