"""Invitations that let a machine join the box, and the list of removed nodes."""

import json
import os
from pathlib import Path

import pytest

from appliance.invitation import Invitation, InvitationError, invite, prepare, remove, removed
from appliance.paths import BoxPaths
from tests.unit.cli.conftest import run


@pytest.fixture
def home(tmp_path: Path) -> BoxPaths:
    paths = BoxPaths.of(tmp_path / "home")
    paths.data_dir.mkdir()
    paths.ray_token.write_text("the token")
    prepare(paths, "10.0.0.5", 6380)
    return paths


def test_accepted_invitation_writes_private_files_for_ray(home: BoxPaths, tmp_path: Path) -> None:
    given, away = invite(home, "n1", "10.0.0.6"), BoxPaths.of(tmp_path / "away")
    away.data_dir.mkdir()
    given.accept(away)
    assert (given.head, given.address, away.ray_token.read_text()) == ("10.0.0.5:6380", "10.0.0.6", "the token")
    files = [away.ray_token, *away.certificates.iterdir()]
    assert sorted(file.name for file in files) == ["ca.pem", "node.key", "node.pem", "ray.token"]
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_second_prepare_keeps_certificate_authority(home: BoxPaths) -> None:
    before = (home.certificates / "ca.pem").read_bytes()
    prepare(home, "10.0.0.7", 6381)
    assert (home.certificates / "ca.pem").read_bytes() == before
    assert invite(home, "n1", "10.0.0.6").head == "10.0.0.7:6381"


def test_removed_lists_node_until_its_next_invitation(home: BoxPaths) -> None:
    remove(home, "n1")
    remove(home, "n2")
    assert removed(home) == {"n1", "n2"}
    invite(home, "n1", "10.0.0.6")
    assert removed(home) == {"n2"}


@pytest.mark.parametrize("name, address", [("n0", "10.0.0.6"), ("N1", "10.0.0.6"), ("n1", "no such host")])
def test_invite_rejects_invalid_names_and_addresses(home: BoxPaths, name: str, address: str) -> None:
    with pytest.raises(InvitationError):
        invite(home, name, address)


@pytest.mark.parametrize("words", [("invite", "n1", "10.0.0.6"), ("remove", "n1")])
def test_node_commands_without_node_address_are_rejected(tmp_path: Path, words: tuple[str, ...]) -> None:
    refused = run("node", *words, "--data-dir", str(tmp_path))
    assert refused.exit_code == 1 and "node_address" in refused.stderr


def test_printed_invitation_parses_back(home: BoxPaths, tmp_path: Path) -> None:
    printed = run("node", "invite", "n1", "10.0.0.6", "--data-dir", str(home.data_dir))
    assert printed.exit_code == 0
    file = tmp_path / "n1.json"
    file.write_text(printed.stdout)
    assert Invitation.read(file).name == "n1"
    file.write_text(json.dumps({"name": "n1"}))
    with pytest.raises(InvitationError):
        Invitation.read(file)


def test_join_passes_only_invitation_path_to_node_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user of the machine can read process arguments."""
    became: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: became.extend(arguments))
    file = tmp_path / "n1.json"
    file.write_text('{"ray_token": "abc-xyz"}')
    run("join", str(file), "--data-dir", str(tmp_path / "node"))
    assert became[-2:] == ["--invitation", str(file)] and "abc-xyz" not in " ".join(became)
    assert run("join", str(tmp_path / "none")).exit_code == 2
