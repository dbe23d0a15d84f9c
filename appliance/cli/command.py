"""A command as data: its words, help, options and function; and the parser, the box and the form of answer it gets."""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import textwrap
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from appliance.cli import formats, output
from appliance.cli.errors import BadUsage
from appliance.cli.locate import BoxFile

WORK_TIMEOUT_S = 900.0
"""Of an answer that the box works for: it reads a whole file line by line."""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a command. settings: of `ArgumentParser.add_argument`. names: "model" or "job", whose names the
    shell completes."""

    flags: tuple[str, ...]
    settings: dict[str, Any]
    names: str = ""


def opt(words: str, help: str = "", names: str = "", **settings: Any) -> Option:
    """An option or a positional argument. words: its flags or its name, and what help calls its value ("--limit N")."""
    *flags, last = words.split(" ")
    if last.startswith("-") and last != "-" or not flags:
        flags = [*flags, last]
    else:
        settings["metavar"] = last
    default = settings.get("default")
    if default not in (None, "") and not isinstance(default, (bool, list)):
        help = f"{help} Default: {default}.".lstrip()
    return Option(tuple(flags), {"help": help.replace("%", "%%"), **settings}, names)


def flag(words: str, help: str) -> Option:
    return opt(words, help, action="store_true")


def either(yes: str, no: str, help: str, default: bool | None = None) -> tuple[Option, Option]:
    """Two options for one choice."""
    dest = yes.lstrip("-").replace("-", "_")
    return (
        opt(yes, help, dest=dest, action="store_const", const=True, default=default),
        opt(no, f"The opposite of {yes}.", dest=dest, action="store_const", const=False),
    )


def number(kind: type = int, least: float | None = None, most: float | None = None) -> Callable[[str], Any]:
    """A type of options: a number within bounds."""

    def parsed(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not (least is None or value >= least) or not (most is None or value <= most) or value != value:
            bounds = (f"from {least} to {most}" if least is not None else "") if most is not None else f"from {least}"
            bounds = "" if least is most is None else f" {bounds}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number{bounds}")
        return value

    return parsed


def auto_or(kind: Callable[[str], Any], word: str = "auto") -> Callable[[str], Any]:
    """A type of options: of this kind, or a word."""
    return lambda text: text if text == word else kind(text)


def named(kind: Callable[[str], Any] = str, word: str = "") -> Callable[[str], Any]:
    """A type of options: NAME=VALUE, whose value is of this kind, or a word."""

    def parsed(text: str) -> Any:
        name, equals, value = text.partition("=")
        if word and text == word:
            return word
        if not equals or not name.strip():
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
        return name.strip(), kind(value)

    return parsed


def seconds(text: str) -> float:
    """A type of options: a time."""
    if (value := formats.seconds_of(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 90s, 45m, 9h, 1h30m or 7d")
    return value


def part(text: str) -> float:
    """A type of options: a part of a whole, 0 to 1."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 1% or 0.1")
    return value


def existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path


DATA_DIR = opt("--data-dir DIR", "The box on this machine [APPLIANCE_DATA_DIR].")
OUTPUT = opt("-o --output FORMAT", "table, or json for scripts.", choices=("table", "json"), default="table")
CONFIG = opt("--config FILE", "Default: appliance.toml in the data directory, if it exists.", type=existing_file)
BOX = (
    OUTPUT,
    opt("--url URL", "A box elsewhere [APPLIANCE_URL]."),
    opt("--api-key KEY", "For --url [APPLIANCE_API_KEY]."),
    DATA_DIR,
)
WATCH = (
    flag("-w --watch", "Refresh until Ctrl-C."),
    opt("--every SECONDS", "Time between refreshes.", type=number(float, 0.1), default=2.0),
)
_SHARED = {"box": BOX, "here": (OUTPUT, DATA_DIR), "": ()}


@dataclass(frozen=True)
class Session:
    """The box that a command talks to, and the form of its answer. client: a Client; None where the command needs no
    box. box_file: None for a box named by URL."""

    client: Any
    as_json: bool
    box_file: BoxFile | None = None
    api_key: str | None = None

    def show(self, answer: Any, render: Callable[[Any], Any]) -> None:
        """Print an answer of the box, as it is or drawn."""
        output.print_json(answer) if self.as_json else output.draw(render(answer))


Function = Callable[[Session, Namespace], None]


@dataclass(frozen=True, slots=True)
class Command:
    """help: text, and after "Examples:" lines to paste. needs: which options it shares with others, as `_SHARED` has
    them; with "box" it gets a Session of one. without_box: whether these arguments need no box."""

    name: str
    help: str
    run: Function
    options: tuple[Option, ...] = ()
    needs: str = "box"
    without_box: Callable[[Namespace], bool] | None = None

    def all_options(self) -> tuple[Option, ...]:
        return (*self.options, *_SHARED[self.needs])

    def parsed(self, words: list[str]) -> Namespace:
        """Raises CliError, and SystemExit for a wrong argument."""
        args = Parser(self).parse_intermixed_args(words)
        _add_environment(args)
        return args

    def session(self, words: list[str]) -> Session:
        return open_session(self.parsed(words), as_json=True)

    def call(self, words: list[str]) -> None:
        """Raises CliError, and SystemExit for a wrong argument."""
        args = self.parsed(words)
        as_json = getattr(args, "output", "") == "json"
        plain = self.needs != "box" or self.without_box is not None and self.without_box(args)
        self.run(Session(None, as_json) if plain else open_session(args, as_json), args)


COMMANDS: dict[str, Command] = {}
"""By name, such as "job list"; filled by `command` and by the table of resources."""


def command(
    name: str, *options: Option, needs: str = "box", without_box: Callable[[Namespace], bool] | None = None
) -> Callable[[Function], Function]:
    """Makes a function a command; its docstring is the help."""

    def add(run: Function) -> Function:
        COMMANDS[name] = Command(name, inspect.getdoc(run) or "", run, options, needs, without_box)
        return run

    return add


class Parser(argparse.ArgumentParser):
    """Of one command."""

    def __init__(self, made: Command):
        text, _, examples = made.help.partition("\n\nExamples:\n")
        words = [_shown(one) for one in made.options if one.flags[0][0] != "-"]
        needed = [one for one in made.options if one.settings.get("required")]
        words += [f"{one.flags[0]} {one.settings.get('metavar') or one.flags[0][2:].upper()}" for one in needed]
        prog, width = f"appliance {made.name}", min(110, shutil.get_terminal_size().columns)
        super().__init__(
            prog=prog,
            usage=" ".join([prog, *words, "[options]"]),
            description=text,
            epilog=f"Examples:\n{textwrap.indent(textwrap.dedent(examples), '  ')}",
            allow_abbrev=False,
            formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width),
        )
        for option in made.all_options():
            self.add_argument(*option.flags, **option.settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; `{self.prog} --help` shows what it takes\n")


def _shown(argument: Option) -> str:
    """In a line of usage."""
    name, nargs = argument.settings.get("metavar") or argument.flags[0], argument.settings.get("nargs")
    return {"?": f"[{name}]", "*": f"[{name}...]", "+": f"{name}..."}.get(nargs, name)


def _add_environment(args: Namespace) -> None:
    """Options that were not typed. A box that was typed wins over variables; of two variables the URL wins."""
    given, values = os.environ.get, vars(args)
    if "data_dir" in values and not values["data_dir"] and not values.get("url"):
        if "url" in values:
            args.url = given("APPLIANCE_URL")
        args.data_dir = None if values.get("url") else given("APPLIANCE_DATA_DIR")
    if "api_key" in values:
        args.api_key = args.api_key or given("APPLIANCE_API_KEY")
    if "data_dir" in values and values.get("config", "") is None and "url" not in values:
        args.config = existing_file(named) if (named := given("APPLIANCE_CONFIG")) else None


def open_session(args: Namespace, as_json: bool) -> Session:
    """The box of these options. Raises BadUsage, and Unreachable when none runs on this machine."""
    from appliance.cli.client import Client  # late: httpx takes longer than the rest of `--help`

    if args.url and args.data_dir:
        raise BadUsage("--url and --data-dir name two boxes; give one of them")
    if args.url:
        return Session(Client(args.url, args.api_key), as_json, None, args.api_key)
    box_file = BoxFile.read(args.data_dir)
    client = Client(socket_path=box_file.controller_socket(), why_silent=box_file.why_silent)
    return Session(client, as_json, box_file, args.api_key)


def picked(args: Namespace, names: str) -> dict[str, Any]:
    """The arguments with these names that were given. names: separated by spaces."""
    return {name: value for name in names.split() if (value := getattr(args, name)) is not None}


def given(**fields: Any) -> dict[str, Any]:
    """Fields of a request that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
