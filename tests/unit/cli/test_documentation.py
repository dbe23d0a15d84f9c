"""docs/operations.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from appliance import config_reference
from appliance.cli import errors
from appliance.config import BoxConfig
from tests.unit.cli.test_tree import FROZEN

TEXT = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


def test_every_key_of_the_configuration_is_documented_as_it_is():
    (block,) = re.findall(r"<!-- python -m appliance.config_reference -->\n(.*?)<!-- end of reference -->", TEXT, re.S)
    assert block.strip() == config_reference.reference().strip(), "run python -m appliance.config_reference"
    for section, settings in BoxConfig().model_dump().items():
        assert f"#### [{section}]" in block
        for key, value in settings.items():
            assert f"`{key}`" in block or isinstance(value, dict) and f"#### [{section}.{key}]" in block


def test_every_exit_code_is_documented():
    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", TEXT, re.M)}
    assert documented == codes | {0, 130}


def test_every_command_is_documented():
    table = TEXT.split("## Commands")[1].split("### ")[0]
    listed = set()
    for row in re.findall(r"^\| (`.*?`) \|", table, re.M):
        names = [name.replace("\\", "") for name in re.findall(r"`([^`]*)`", row)]
        group = names[0].split()[0] if " " in names[0] else ""
        for name in names:
            words = name.split()
            words = [group, *words] if group and words[0] != group else words
            depth = 3 if words[:2] == ["mode", "schedule"] else 2 if group else 1
            listed.add(" ".join(words[:depth]))
    assert listed == set(FROZEN)
