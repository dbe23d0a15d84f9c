"""`appliance join` hands over a token without showing it to other users of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import run

JOIN = ("join", "10.0.0.5:6380", "--name", "n1", "--address", "10.0.0.6")


class Became(Exception):
    """What the command would have become, which a test must not."""


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What stands in the arguments of the process that joins, and in the file that they name."""

    def becomes(program: str, arguments: list[str]) -> None:
        raise Became(*arguments)

    monkeypatch.setattr(os, "execv", becomes)

    def join(*arguments: str, input: str | None = None) -> tuple[str, str]:
        with pytest.raises(Became) as became:
            run(*JOIN, "--data-dir", str(tmp_path / "node"), *arguments, input=input)
        command = list(became.value.args)
        file = Path(command[command.index("--token-path") + 1])
        assert file.stat().st_mode & 0o777 == 0o600
        return " ".join(command), file.read_text()

    return join


def test_a_token_is_read_from_stdin_and_stands_in_no_argument(joined) -> None:
    arguments, kept = joined("--token", "-", input="join-abc\n")
    assert kept == "join-abc" and "join-abc" not in arguments


def test_it_may_come_from_the_environment(joined, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("APPLIANCE_JOIN_TOKEN", "join-abc")
    arguments, kept = joined()
    assert kept == "join-abc" and "join-abc" not in arguments and "every user" not in capsys.readouterr().err


def test_a_token_that_is_written_out_is_taken_and_whoever_wrote_it_is_told(joined, monkeypatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("appliance.cli.output.say", told.append)
    assert joined("--token", "join-abc")[1] == "join-abc"
    assert any("every user of this machine can read this token" in line for line in told)


def test_no_token_at_all_is_bad_usage() -> None:
    result = run(*JOIN, "--token", "-", input="\n")
    assert result.exit_code == 2 and "no token was given" in result.stderr
