"""The table of commands: its help, and how fast that is."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from appliance.cli.command import COMMANDS
from appliance.cli.main import below
from appliance.cli.resources import GROUPS
from tests.unit.cli.conftest import run


def is_command(words: str) -> bool:
    """Whether `appliance WORDS` is a command, and no group of them, with options that it has."""
    told = words.split()
    name = next((" ".join(told[:n]) for n in (3, 2, 1) if " ".join(told[:n]) in COMMANDS), None)
    return name is not None and {word for word in told if word.startswith("--")} <= options_of(name)


def options_of(name: str) -> set[str]:
    return {"--help", *(text for one in COMMANDS[name].all_options() for text in one.flags if text.startswith("--"))}


def test_version_is_the_release():
    assert run("--version").stdout == f"appliance {metadata.version('appliance')}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_a_command_has_examples_and_every_option(name):
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    text, _, examples = result.stdout.partition("Examples:")
    assert f"appliance {name}" in examples and all(option in text for option in options_of(name))


def test_help_of_a_group_lists_its_commands():
    for group in ("", *GROUPS):
        if group in COMMANDS:
            continue
        listed = run(*group.split(), "--help").stdout
        assert below(group) and all(f"  {word} " in listed for word, _ in below(group)), group
        assert all(text.endswith(".") for _, text in below(group)), group


HEAVY = ("torch", "vllm", "ray", "openai", "fastapi", "deepspeed", "transformers", "numpy", "pydantic", "rich", "httpx")


def test_help_imports_nothing_heavy():
    program = (
        "import sys\nfrom appliance.cli.main import run\n"
        "try: run()\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, "job", "submit", "-h"], capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "appliance.cli.main" in loaded
    assert not loaded.intersection(HEAVY) and "appliance.config" not in loaded
