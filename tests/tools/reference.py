"""Writes the generated pages for `make docs`: every command and every setting.

python -m tests.tools.reference DIR        # copies docs/ there and adds DIR/reference/*.md
"""

import shutil
import sys
from pathlib import Path

from appliance import config
from appliance.cli import main as cli  # the import fills COMMANDS
from appliance.cli.command import COMMANDS, Parser

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> dict[str, str]:
    """Markdown by file name."""
    assert cli
    commands = [f"## {name}\n\n```\n{Parser(COMMANDS[name]).format_help()}```\n" for name in sorted(COMMANDS)]
    return {
        "commands.md": "# Commands\n\n" + "\n".join(commands),
        "configuration.md": "# Settings\n\n" + config.reference(),
    }


def main() -> None:
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(DOCS, target, ignore=shutil.ignore_patterns("mkdocs.yml"))
    (target / "reference").mkdir()
    for name, text in pages().items():
        (target / "reference" / name).write_text(text)


if __name__ == "__main__":
    main()
