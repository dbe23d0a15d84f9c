"""Arguments of commands as data: their declaration, the types of their values, and the shared arguments."""

from __future__ import annotations

import json
import math
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from appliance.cli import output


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of a command. settings: for `ArgumentParser.add_argument`. env: variable that holds its default."""

    flags: tuple[str, ...]
    settings: dict[str, Any]
    env: str = ""

    @property
    def is_positional(self) -> bool:
        return not self.flags[0].startswith("-")

    @property
    def shown(self) -> str:
        """The argument as a usage line shows it."""
        name = self.settings.get("metavar") or self.flags[0]
        return name if self.is_positional else f"{self.flags[0]} {name}"

    @property
    def dest(self) -> str:
        return self.settings.get("dest") or self.flags[-1].lstrip("-").replace("-", "_")


def opt(words: str, help: str = "", env: str = "", **settings: Any) -> Option:
    """Declare an option or positional argument. words: flags or a name, then the value's name ("--limit N")."""
    *flags, last = words.split(" ")
    if last.startswith("-") and last != "-" or not flags:
        flags = [*flags, last]
    else:
        settings["metavar"] = last
    default = settings.get("default")
    if default not in (None, "") and not isinstance(default, (bool, list)):
        help = f"{help} Default: {default}.".lstrip()
    return Option(tuple(flags), {"help": help.replace("%", "%%"), **settings}, env)


def flag(words: str, help: str) -> Option:
    return opt(words, help, action="store_true")


def either(yes: str, no: str, help: str, default: bool | None = None, dest: str = "") -> tuple[Option, Option]:
    """Declare two opposite options that set one value."""
    dest = dest or yes.lstrip("-").replace("-", "_")
    return (
        opt(yes, help, dest=dest, action="store_const", const=True, default=default),
        opt(no, f"The opposite of {yes}.", dest=dest, action="store_const", const=False),
    )


# Types of options: argparse shows their errors with the option's name.


def number(kind: type = int, least: float = -math.inf, most: float = math.inf) -> Callable[[str], Any]:
    """Return an option type: a number within bounds."""

    def parsed(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            bounds = (f" from {least}" if least > -math.inf else "") + (f" to {most}" if most < math.inf else "")
            raise ArgumentTypeError(f"{text!r} is not a {'whole ' if kind is int else ''}number{bounds}")
        return value

    return parsed


def auto_or(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: text if text == "auto" else kind(text)


NULL = object()
"""The value of an option that is null in the request."""


def or_null(kind: Callable[[str], Any], word: str = "none") -> Callable[[str], Any]:
    """Return an option type: a value of this kind, or a word for null."""
    return lambda text: NULL if text == word else kind(text)


def named(kind: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return an option type: NAME=VALUE with a value of this kind."""

    def parsed(text: str) -> Any:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise ArgumentTypeError(f"{text!r} is not NAME=VALUE")
        return name.strip(), kind(value)

    return parsed


def seconds(text: str) -> float:
    if (value := output.seconds_of(text)) is None:
        raise ArgumentTypeError(f"{text!r} is not a time such as 90s, 45m, 9h, 1h30m or 7d")
    return value


def future(text: str) -> float:
    """Parse a time from now (8h), a date with a time, or a date (its end) to seconds since 1970. A date without a zone
    is local."""
    try:
        is_date_alone = len(text) <= len("2026-11-22")
        moment = (datetime.fromisoformat(text) + timedelta(days=is_date_alone)).timestamp()
    except (OverflowError, ValueError):
        if (value := output.seconds_of(text)) is None:
            expected = "a time from now such as 8h, or a date such as 2026-11-22T06:00"
            raise ArgumentTypeError(f"{text!r} is not {expected}") from None
        moment = time.time() + value
    if moment <= time.time():
        raise ArgumentTypeError(f"{text!r} is past; expected a future time, such as 8h from now")
    return moment


def part(text: str) -> float:
    """Parse a share such as 1% or 0.1 to a number from 0 to 1."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share such as 1% or 0.1")
    return value


def existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ArgumentTypeError(f"there is no file {text!r}")
    return path


def text_file(text: str) -> str:
    """Return the content of the file at this path."""
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentTypeError(f"{text!r} cannot be read: {error}") from None


def json_file(text: str) -> Any:
    try:
        return json.loads(text_file(text))
    except ValueError as error:
        raise ArgumentTypeError(f"{text} is not JSON: {error}") from None


# Options that several commands share

DATA_DIR = opt("--data-dir DIR", "The box on this machine [APPLIANCE_DATA_DIR].", env="APPLIANCE_DATA_DIR")
OUTPUT = opt("-o --output FORMAT", "table, or json for scripts.", choices=("table", "json"), default="table")
CONFIG = opt(
    "--config FILE",
    "Default: appliance.toml in the data directory, if it exists.",
    env="APPLIANCE_CONFIG",
    type=existing_file,
)
DEVICES = opt("--devices auto|N", "auto: every GPU, else 8 CPU devices; N: N CPU devices.")
WATCH = flag("-w --watch", "Refresh every two seconds until Ctrl-C.")


def picked(args: Namespace, of: str | Iterable[Option]) -> dict[str, Any]:
    """Return the given arguments as fields of a request. of: argument names separated by spaces, or options."""
    names = of.split() if isinstance(of, str) else [one.dest for one in of]
    found = {name: getattr(args, name) for name in names}
    return {name: None if value is NULL else value for name, value in found.items() if value is not None}


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields of a request that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
