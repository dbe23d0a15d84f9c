"""`appliance init` prints what the box's own reader accepts."""

from pathlib import Path

import pytest

from appliance.config import load_config
from tests.unit.cli.conftest import run


@pytest.mark.parametrize("name", ["light", "box", "enterprise"])
def test_init_prints_a_configuration_that_is_accepted(name: str, tmp_path: Path):
    made, path = run("init", "--template", name), tmp_path / "appliance.toml"
    assert made.exit_code == 0
    path.write_text(made.stdout)
    assert load_config(path, {}) != load_config(None, {})
