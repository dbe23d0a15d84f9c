"""The table of commands and the help texts."""

import pytest

from appliance.cli.command import COMMANDS
from appliance.cli.main import below
from appliance.cli.resources import GROUPS
from tests.unit.cli.conftest import run


def is_command(words: str) -> bool:
    """Whether `appliance WORDS` is a command (not a group) and all its options exist."""
    told = words.split()
    name = next((" ".join(told[:n]) for n in (3, 2, 1) if " ".join(told[:n]) in COMMANDS), None)
    return name is not None and {word for word in told if word.startswith("--")} <= options_of(name)


def options_of(name: str) -> set[str]:
    return {"--help", *(text for one in COMMANDS[name].all_options for text in one.flags if text.startswith("--"))}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_a_command_has_examples_and_every_option(name):
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    text, _, examples = result.stdout.partition("Examples:")
    assert f"appliance {name}" in examples and all(option in text for option in options_of(name))


def test_group_without_own_entry_has_help_from_its_commands(monkeypatch):
    monkeypatch.setitem(COMMANDS, "toy list", COMMANDS["file list"])
    assert ("toy", "Toys.") in below("") and run("toy", "--help").stdout.startswith("Toys.\n\nUsage: appliance toy")


def test_help_of_a_group_lists_its_commands():
    for group in ("", *GROUPS):
        if group in COMMANDS:
            continue
        listed = run(*group.split(), "--help").stdout
        assert below(group) and all(f"  {word} " in listed for word, _ in below(group)), group
        assert all(text.endswith(".") for _, text in below(group)), group
