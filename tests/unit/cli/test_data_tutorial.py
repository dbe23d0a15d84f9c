"""The programs in docs/data.md run, and its command prints the output that the page quotes."""

import re
import shlex
from pathlib import Path

import pytest

from tests.unit.cli.conftest import run

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()


def test_data_page_shows_real_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    made = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(program, made)
    ((command, shown),) = re.findall(r"```console\n\$ appliance (.*?)\n(.*?)```", PAGE, re.S)
    done = run(*shlex.split(command))
    assert (done.stdout, done.exit_code) == (shown, 1)
    assert (tmp_path / "clean.jsonl").read_text().count("\n") == 6
