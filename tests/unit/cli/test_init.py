"""`appliance init` prints a configuration that the box accepts."""

from pathlib import Path

import pytest

from appliance.config import load_config
from tests.unit.cli.conftest import run


@pytest.mark.parametrize("name", ["light", "box", "enterprise"])
def test_init_prints_valid_configuration(name: str, tmp_path: Path):
    made, path = run("init", "--template", name), tmp_path / "appliance.toml"
    assert made.exit_code == 0
    path.write_text(made.stdout)
    assert load_config(path, {}) != load_config(None, {})
