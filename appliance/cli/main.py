"""The console script `appliance`: finds the command in the table, and turns errors into a message and an exit code."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import itertools
import os
import sys
from pathlib import Path

from appliance.cli import output
from appliance.cli.command import COMMANDS
from appliance.cli.errors import BadUsage, CliError, Said
from appliance.cli.resources import GROUPS

_OF_CLIENTS = ("chat", "data", "evals", "jobs", "keys", "mode", "models", "plan")
for _module in (*(f"commands.{name}" for name in _OF_CLIENTS), "box.box", "box.machine", "box.nodes"):
    importlib.import_module(f"appliance.cli.{_module}")

BOX_OPTIONS = ("--url", "--api-key", "--data-dir")
_OVERVIEW = """\
One box that fine-tunes and serves. `appliance COMMAND --help` explains each command with examples.

Usage: appliance [--url URL] [--api-key KEY] [--data-dir DIR] COMMAND ...
       appliance --version | --install-completion | --show-completion

Commands:
{commands}

Examples:
  appliance up --detach                    start the box on this machine
  appliance model import smollm2-135m      bring a model in, by its name in `appliance model catalog`
  appliance job submit --model smollm2-135m --file train.jsonl --wait
  appliance chat smollm2-135m "Hello!"
  appliance mode set split --train 6       six devices train, the others serve
  appliance status --watch"""
_SHELLS = {
    "bash": (".bashrc", "complete -o default -C 'appliance --complete' appliance"),
    "zsh": (
        ".zshrc",
        "autoload -U +X bashcompinit && bashcompinit; complete -o default -C 'appliance --complete' appliance",
    ),
    "fish": (
        ".config/fish/completions/appliance.fish",
        "complete -c appliance -f -a '(COMP_LINE=(commandline -cp) appliance --complete)'",
    ),
}


def below(group: str) -> list[tuple[str, str]]:
    """The next words behind those of a group ("" for all), each with the first line of its help."""
    begin = f"{group} " if group else ""
    found = {}
    for name, help in [*((name, made.help) for name, made in COMMANDS.items()), *GROUPS.items()]:
        if name.startswith(begin):
            word = name.removeprefix(begin).partition(" ")[0]
            text = GROUPS.get(f"{begin}{word}") or help
            found[word] = text.partition("\n")[0] if word not in found or f"{begin}{word}" == name else found[word]
    return sorted(found.items())


def split(words: list[str]) -> tuple[str, list[str]]:
    """The name of a command or group and what is behind it; options of the box may stand before the command."""
    leading: list[str] = []
    while words and words[0].partition("=")[0] in BOX_OPTIONS:
        width = 1 if "=" in words[0] else 2
        leading, words = leading + words[:width], words[width:]
    name = ""
    while words and name not in COMMANDS and words[0] in dict(below(name)):
        name, words = f"{name} {words[0]}".strip(), words[1:]
    return name, leading + words


def call(words: list[str]) -> int:
    """One command; its exit code. Raises CliError, and SystemExit for a wrong argument."""
    name, rest = split(words)
    if name in COMMANDS:
        COMMANDS[name].call(rest)
        return 0
    if not rest or rest[0] in ("-h", "--help"):
        width = max(len(word) for word, _ in below(name)) + 2
        commands = "\n".join(f"  {word.ljust(width)}{text}" for word, text in below(name))
        head = f"{GROUPS.get(name, '')}\n\nUsage: appliance {name} COMMAND ...\n\nCommands:\n{{commands}}"
        print((head if name else _OVERVIEW).format(commands=commands))
        return 0 if rest else 2
    if not name and rest[0] in _OPTIONS:
        _OPTIONS[rest[0]](rest[1:])
        return 0
    guesses = difflib.get_close_matches(rest[0], dict(below(name)))
    if guesses:
        hint = f"Did you mean {' or '.join(map(repr, guesses))}?"
    else:
        hint = f"`{f'appliance {name}'.strip()} --help` lists them."
    raise BadUsage(f"there is no command {f'{name} {rest[0]}'.strip()!r}. {hint}")


def _version(_: list[str]) -> None:
    from importlib import metadata  # late: 25 ms

    print(f"appliance {metadata.version('appliance')}")


def _shell() -> tuple[Path, str]:
    """The file that sets this shell up, and the line for it."""
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise BadUsage(f"SHELL is {shell!r}; completion is for {', '.join(_SHELLS)}")
    file, line = _SHELLS[shell]
    return Path.home() / file, line


def _install_completion(_: list[str]) -> None:
    file, line = _shell()
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or line not in file.read_text():
        with open(file, "a") as config:
            config.write(f"\n{line}\n")
    print(f"completion is in {file}; it begins with the next shell")


def _complete(words: list[str]) -> None:
    """For the shell: what may stand where the cursor is in COMP_LINE, a word a line. words: bash names the command and
    the part of the word that it replaces, which begins behind a colon."""
    begun = words[1] if len(words) > 1 else None
    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "100000"))]
    *before, typed = line.split(" ")
    name, rest = split([word for word in before[1:] if word])
    if name in COMMANDS:
        options = COMMANDS[name].all_options()
        found = [text for one in options for text in one.flags if text.startswith("--")]
        last = next((one for one in options if rest and rest[-1] in one.flags), None)
        wanted = last.names if last else next((one.names for one in options if one.flags[0][0] != "-"), "")
        found += _names(wanted, rest) if wanted else []
    else:
        found = [word for word, _ in below(name)]
    there = 0 if begun is None else len(typed) - len(begun)
    print("\n".join(word[there:] for word in found if word.startswith(typed)))


def _names(kind: str, rest: list[str]) -> list[str]:
    """Names of the box, none if it does not answer: a shell that completes must not print errors over the line."""
    path, key = {"model": ("/admin/v1/models", "name"), "job": ("/v1/fine_tuning/jobs", "id")}[kind]
    given = [text for pair in itertools.pairwise(rest) if pair[0] in BOX_OPTIONS for text in pair]
    with contextlib.suppress(CliError, SystemExit):
        session = COMMANDS["model list"].session(given)
        answer = session.client.send("GET", path, query={"limit": 500}, timeout_s=2.0)
        return [row[key] for row in answer["data"]]
    return []


_OPTIONS = {
    "--version": _version,
    "--show-completion": lambda _: print(_shell()[1]),
    "--install-completion": _install_completion,
    "--complete": _complete,
}


def main(words: list[str]) -> int:
    """The exit code of a command: see appliance.cli.errors, and 130 for Ctrl-C."""
    try:
        return call(words)
    except SystemExit as end:
        return int(end.code or 0)
    except Said as end:
        return end.exit_code
    except CliError as error:
        output.say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read the output has gone; Python flushes it once more
        return 1
    except ModuleNotFoundError as error:
        if importlib.util.find_spec("ray") is not None:
            raise
        output.say(f"error: this command needs all of the appliance, and here is appliance[client] alone: {error}")
        return 2


def run() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
