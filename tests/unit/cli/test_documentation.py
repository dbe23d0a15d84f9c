"""docs/operations.md matches the code, and documents name only existing files and commands."""

import contextlib
import inspect
import io
import re
import shlex
from pathlib import Path

from appliance import config
from appliance.cli import errors
from appliance.cli.command import COMMANDS, Parser
from appliance.config import BoxConfig

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "operations.md").read_text()


def test_reference_lists_every_setting_with_meaning():
    sections = dict(re.findall(r"#### \[([\w.]+)\]\n(.*?)(?=\n#### |\Z)", config.reference(), re.S))
    for section, settings in BoxConfig().model_dump().items():
        rows = re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", sections[section], re.M)
        assert {key for key, _ in rows} == {key for key in settings if f"{section}.{key}" not in sections}, section


def test_every_exit_code_is_documented():
    codes = {
        kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.CliError)
    }
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.M)}
    assert documented == codes | {0, 130}


def test_files_named_in_documents_exist():
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        named = re.findall(
            r"`((?:appliance|scheduler|train|serve|weights|runtime|tests|benchmarks|images|examples)/[\w/.-]+)",
            page.read_text(),
        )
        missing = {name for name in named if not (ROOT / name).exists()}
        assert {name for name in missing if not re.search(r"[A-Z]{3}", name)} == set(), page.name


def typed() -> list[tuple[str, str]]:
    """Return pairs (file, command line) for all commands in help, code blocks, templates and systemd units."""
    found = []
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "images").rglob("README.md")):
        blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.S | re.M)
        found += [(page.name, line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for file in (*(ROOT / "appliance" / "templates").glob("*.toml"), *(ROOT / "images").rglob("*.s*")):
        found += [(file.name, line.lstrip("# ")) for line in file.read_text().splitlines()]
    for name, command in COMMANDS.items():
        examples = inspect.cleandoc(command.help).partition("Examples:\n")[2]
        found += [(f"{name} --help", line.strip()) for line in examples.splitlines()]
    return [(name, line.removeprefix("$ ")) for name, line in found if re.match(r"(\$ )?appliance [a-z-]", line)]


def fault(line: str) -> str:
    """Return the error in the words or options of a command line, or ""; values are not checked."""
    words = shlex.split(re.split(r" (?:&&|\|\|?|>|<) |;| {2,}[^-\"\[]", line)[0], comments=True)[1:]
    words = [word for word in words if word not in ("...", "…") and not word.startswith("[")]
    while words[0] in ("--url", "--api-key", "--data-dir"):  # these options may precede the command
        words = words[2:]
    name = next((" ".join(words[:n]) for n in (3, 2, 1) if " ".join(words[:n]) in COMMANDS), None)
    if name is None:
        return "" if words == ["--help"] else "no such command"
    parser = Parser(COMMANDS[name])
    for action in parser._actions:  # accept every value
        action.type, action.choices, action.required = None, None, False
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_intermixed_args(words[len(name.split()) :])
    except SystemExit:
        return said.getvalue()
    return ""


def test_documented_commands_parse():
    shown = typed()
    assert len(shown) > 80 and {"box.toml", "operations.md", "README.md"} <= {file for file, _ in shown}
    assert [(file, line, why) for file, line in shown if (why := fault(line))] == []
