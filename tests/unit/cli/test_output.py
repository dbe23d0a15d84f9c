"""How commands print numbers, JSON and progress."""

import json
import unicodedata

import pytest

from appliance.cli import output


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (output.size, 999, "999 B"),
        (output.size, 1_234_567, "1.2 MB"),
        (output.size, None, "-"),
        (output.duration, 0.0123, "12 ms"),
        (output.duration, 61, "1 min 01 s"),
        (output.duration, 1e6, "11 d 13 h"),
        (output.count, 1234, "1,234"),
        (output.count, 7.2e9, "7.2 B"),
        (output.number, 12345.6, "12,346"),
        (output.label, "tokens_per_s", "tokens/s"),
        (output.printable, "a\x1b[2J\tb\r\n\u202e", "a[2J\tb\n"),
    ],
)
def test_numbers_are_formatted_for_people(function, value, text):
    assert function(value) == text


def test_json_output_escapes_control_characters(capsys):
    """U+009B starts a terminal command, as ESC [ does, but JSON need not escape U+009B."""
    hostile = {"filename\x85": "a\x9b2Jb\x7f\x1b", "name": "é漢"}
    output.print_json(hostile)
    told = capsys.readouterr().out
    assert json.loads(told) == hostile and "é漢" in told
    assert not [sign for sign in told if unicodedata.category(sign) == "Cc" and sign != "\n"]


def test_progress_without_terminal_prints_occasional_lines(monkeypatch, capsys):
    monkeypatch.setattr("appliance.cli.output.LINE_EVERY_S", 0.0)
    with output.progress("import") as meter:
        meter("import: downloading", 30, 60)
    assert ", 50 %, after" in capsys.readouterr().err
    monkeypatch.setattr("appliance.cli.output.LINE_EVERY_S", 30.0)
    with output.progress("import") as meter:
        meter("import: downloading", 30, 60)
    assert capsys.readouterr().err == ""
