"""The console script `appliance`: finds the command in the table, and turns errors into a message and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata

from appliance.cli import output
from appliance.cli.command import COMMANDS
from appliance.cli.errors import BadUsage, CliError, Ended
from appliance.cli.resources import GROUPS

for _module in ("box", "data", "evals", "export", "jobs", "keys", "models"):
    importlib.import_module(f"appliance.cli.commands.{_module}")

BOX_OPTIONS = ("--url", "--api-key", "--data-dir")
_OVERVIEW = """\
One box that fine-tunes and serves. `appliance COMMAND --help` explains each command with examples.

Usage: appliance [--url URL] [--api-key KEY] [--data-dir DIR] COMMAND ...
       appliance --version

Commands:
{commands}

Examples:
  appliance up --detach                    start the box on this machine
  appliance model import smollm2-135m      bring a model in, by its name in `appliance model catalog`
  appliance job submit --model smollm2-135m --file train.jsonl --wait
  appliance chat smollm2-135m "Hello!"
  appliance mode set split --train 6       six devices train, the others serve
  appliance status --watch"""


def below(group: str) -> list[tuple[str, str]]:
    """Return the words that may follow a group ("": all words), each with the first line of its help."""
    begin = f"{group} " if group else ""
    words = {name.removeprefix(begin).partition(" ")[0] for name in (*GROUPS, *COMMANDS) if name.startswith(begin)}
    known = {name: command.help for name, command in COMMANDS.items()} | GROUPS
    helps = {word: known.get(begin + word, f"{word.capitalize()}s.") for word in words}
    return sorted((word, help.partition("\n")[0]) for word, help in helps.items())


def split(words: list[str]) -> tuple[str, list[str]]:
    """Split words into a command's or group's name and arguments; options of the box may precede the name."""
    leading: list[str] = []
    while words and words[0].partition("=")[0] in BOX_OPTIONS:
        width = 1 if "=" in words[0] else 2
        leading, words = leading + words[:width], words[width:]
    name = ""
    while words and name not in COMMANDS and words[0] in dict(below(name)):
        name, words = f"{name} {words[0]}".strip(), words[1:]
    return name, leading + words


def call(words: list[str]) -> int:
    """Run one command; return its exit code. Raises CliError, and SystemExit for a wrong argument."""
    name, rest = split(words)
    if name in COMMANDS:
        COMMANDS[name].call(rest)
        return 0
    if not rest or rest[0] in ("-h", "--help"):
        width = max(len(word) for word, _ in below(name)) + 2
        commands = "\n".join(f"  {word.ljust(width)}{text}" for word, text in below(name))
        about = GROUPS.get(name, f"{name.capitalize()}s.")
        head = f"{about}\n\nUsage: appliance {name} COMMAND ...\n\nCommands:\n{{commands}}"
        print((head if name else _OVERVIEW).format(commands=commands))
        return 0 if rest else 2
    if not name and rest[0] == "--version":
        print(f"appliance {metadata.version('appliance')}")
        return 0
    shown, group = f"{name} {rest[0]}".strip(), f"appliance {name}".strip()
    raise BadUsage(f"there is no command {shown!r}; `{group} --help` lists them")


def main(words: list[str]) -> int:
    """Run the command line; return its exit code: see appliance.cli.errors, and 130 for Ctrl-C."""
    try:
        return call(words)
    except SystemExit as end:
        return int(end.code or 0)
    except Ended as end:
        return end.exit_code
    except CliError as error:
        output.say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone, and Python flushes once more
        return 1
    except OSError as error:  # error of a file or folder that the user named
        named = f"{error.filename}: " if error.filename else ""
        output.say(f"error: {named}{error.strerror or error}")
        return 1


def run() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
