"""`appliance init` writes what the box's own reader accepts, and never over a file that is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from appliance.config import load_config
from tests.unit.cli.conftest import run

TEMPLATES = Path(__file__).parents[3] / "appliance" / "templates"
NAMES = ("light", "box", "enterprise")
SECTORS = ("finance", "manufacturing", "education")


def uncommented(text: str) -> str:
    """What stands commented out as settings: sections and assignments."""
    lines = (line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    return "\n".join(line for line in lines if re.match(r"(\[[a-z.]+\]|[a-z_-]+ = )", line))


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {
        name: merged(one[name], other[name])
        if isinstance(one.get(name), dict) and name in other
        else other.get(name, one.get(name))
        for name in {**one, **other}
    }


def as_toml(table: dict[str, Any], at: str = "") -> str:
    def value(told: Any) -> str:
        return str(told).lower() if isinstance(told, bool) else repr(told)

    flat = "".join(f"{name} = {value(told)}\n" for name, told in table.items() if not isinstance(told, dict))
    below = "".join(as_toml(told, f"{at}{name}.") for name, told in table.items() if isinstance(told, dict))
    return (f"[{at[:-1]}]\n" if at and flat else "") + flat + below


def accepted(text: str, tmp_path: Path) -> Any:
    path = tmp_path / "appliance.toml"
    path.write_text(text)
    return load_config(path, {})


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_accepted_and_differs_from_the_defaults(name, tmp_path):
    made = run("init", "--template", name, "--data-dir", str(tmp_path / "box"))
    assert made.exit_code == 0, made.output
    path = tmp_path / "box" / "appliance.toml"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    text = path.read_text()
    config, told = load_config(path, {}).model_dump(), tomllib.loads(text)
    defaults = accepted("", tmp_path).model_dump()

    def same(one: dict[str, Any], default: dict[str, Any], at: str = "") -> list[str]:
        found = []
        for key, value in one.items():
            if isinstance(value, dict):
                found += same(value, default[key], f"{at}{key}.")
            elif default[key] == value:
                found.append(f"{at}{key}")
        return found

    allowed = {"controller.retention.job_data_days", "backup.keep", "serve.max_replicas"}  # said for the reader's sake
    assert set(same(told, defaults)) <= allowed
    assert config["box"]["serving_floor"] >= 1


@pytest.mark.parametrize("sector", SECTORS)
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_accepted_too(name, sector, tmp_path):
    text = (TEMPLATES / f"{name}.toml").read_text()
    assert [*re.findall(r"^# example: (\w+)$", text, re.M)] == list(SECTORS)
    block = re.search(rf"^# example: {sector}\n((?:# .*\n?)+)", text, re.M)
    assert block is not None
    told = tomllib.loads(uncommented(block[1]))
    assert len(told) >= 2
    accepted(as_toml(merged(tomllib.loads(text), told)), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_what_only_you_know_is_accepted_once_it_is_filled_in(name, tmp_path):
    text = (TEMPLATES / f"{name}.toml").read_text().partition("# --- examples")[0]
    lines = [re.sub(r"^# (?=(\[[a-z.]+\]$|[a-z_-]+ = ))", "", line) for line in text.splitlines()]
    config = accepted("\n".join(lines), tmp_path)
    assert config.backup.url and config.gateway.tls_cert_path


def test_a_file_that_is_there_stays_unless_forced(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[box]\nport = 9000\n")
    refused = run("init", "--template", "box", str(path))
    assert refused.exit_code == 5 and "--force replaces it" in refused.stderr
    assert path.read_text() == "[box]\nport = 9000\n" and list(tmp_path.iterdir()) == [path]
    assert run("init", "--template", "box", str(path), "--force").exit_code == 0
    assert path.read_text() == (TEMPLATES / "box.toml").read_text()
    assert run("init", "--template", "box", str(tmp_path / "no" / "folder.toml")).exit_code == 1
    assert run("init", "--template", "huge", str(path)).exit_code == 2


def test_where_it_goes_is_said_first_and_how_to_start_from_there_after_it(tmp_path, monkeypatch):
    monkeypatch.delenv("APPLIANCE_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    told = run("init", "--template", "light")
    default = tmp_path / ".local" / "share" / "appliance"
    assert (default / "appliance.toml").exists() and f"the default data directory, {default}" in told.stderr
    assert told.output.endswith("then `appliance up`\n")
    other = run("init", "--template", "light", "--data-dir", str(tmp_path / "box"))
    assert "note:" not in other.stderr and other.output.endswith(f"then `appliance up --data-dir {tmp_path}/box`\n")
    spaced = run("init", "--template", "light", "--data-dir", str(tmp_path / "my box"))
    assert spaced.output.endswith(f"then `appliance up --data-dir '{tmp_path}/my box'`\n")
