"""docs/data.md says what its commands answer."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.unit.cli.conftest import run

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "data.md").read_text()
STEPS = re.findall(r"```console\n\$ (.*?)\n(.*?)```", PAGE, re.S)


def test_the_page_says_what_its_commands_answer(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    program = re.search(r"```python\n(.*?)```", PAGE, re.S)
    assert program
    exec(program[1], {})
    assert len(STEPS) == 3
    for command, said in STEPS:
        words = shlex.split(command)
        if words[0] == "appliance":
            done = run(*words[1:])
            assert done.stdout == said and done.exit_code == (words[2] == "check")
        else:
            assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == said
