"""What `make clients` makes of what clients' scripts say."""

from __future__ import annotations

import pytest

from tests.clients import run, table
from tests.clients.clients import CHECKS, CLIENTS
from tests.clients.environments import command_of, uv_options, version_of
from tests.clients.run import _surprises
from tests.clients.table import ROOT, Row


def test_every_client_has_its_script_and_every_script_its_client():
    scripts = {client.script for client in CLIENTS}
    own = {"__init__.py", "__main__.py", "clients.py", "environments.py", "run.py", "table.py"}
    files = {path.name for path in (ROOT / "tests" / "clients").iterdir() if path.suffix in (".py", ".mjs")}
    assert scripts == files - own - {"report.py", "report.mjs"}
    assert all(client.known.keys() <= {*CHECKS, "trouble"} for client in CLIENTS)


def test_what_a_script_says_among_other_output():
    said = 'noise\n@@{"check": "plain", "failed": ""}\n@@{"check": "tools", "failed": "KeyError: 1"}\n@ @'
    assert table.verdicts(said) == {"plain": "", "tools": "KeyError: 1"}


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (
            "file:///x.mjs:5\nSyntaxError: 'ai' has no isStepCount\n    at async run\n\nNode.js v20",
            "'ai' has no isStepCount",
        ),
        ("Traceback\n  File x\nModuleNotFoundError: No module named 'y'\n", "No module named 'y'"),
        ("a" * 400 + "killed", "aakilled"),
        ("", "said nothing"),
    ],
)
def test_why_a_script_tried_nothing_is_its_error_or_its_end(output, told):
    assert run._last_words(output).endswith(told) and len(run._last_words(output)) <= 300


def test_a_client_tried_again_replaces_its_row(tmp_path):
    path = tmp_path / "results.json"
    first, second = CLIENTS[0].name, CLIENTS[1].name
    table.record([Row(second, "1", "d", {"plain": ""}), Row(first, "1", "d", {})], path)
    rows = table.record([Row(second, "2", "e", {"plain": "no"})], path)
    assert [(row.client, row.version) for row in rows] == [(first, "1"), (second, "2")]


def test_a_run_in_parts_tries_what_is_left_and_begins_nothing_when_its_time_is_over(tmp_path, monkeypatch):
    first, second, third = names = [client.name for client in CLIENTS[:3]]
    rows, began, clock = [Row(first, "1", "d", {}, "", "this"), Row(second, "1", "d", {}, "", "other")], [], [0.0]

    def tried(client, folder, box, trouble, commit):
        began.append(client.name)
        clock[0] += 100
        return Row(client.name, "2", "e", {}, "", commit)

    monkeypatch.setattr(run, "_commit", lambda: "this")
    monkeypatch.setattr(run, "_installed", lambda client, folder: "")
    monkeypatch.setattr(run, "_tried", tried)
    monkeypatch.setattr(run.Box, "_appliance", lambda self, *words: f"{run.MODEL} {run.EMBEDDING_MODEL}")
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(table, "recorded", lambda: rows)
    monkeypatch.setattr(table, "record", lambda made: rows.extend(made) or rows)
    monkeypatch.setattr(table, "put", lambda drawn: None)
    part = [*names, "--folder", str(tmp_path), "--left", "--within", "90"]
    assert run.main(part) == 3 and began == [second]
    assert run.main(part) == 0 and began == [second, third]
    assert run.main(part) == 0 and began == [second, third], "nothing is left, and no box is started"


def test_the_table_says_what_worked_what_not_and_why(tmp_path):
    rows = [Row("a", "1.0", "d", {"plain": "", "tools": "ValueError: x"}), Row("b", "", "d", {}, "not installed: y")]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGINS}\nold\n{table.ENDS}\nafter\n")
    table.put(table.drawn(rows), page)
    text = page.read_text()
    assert "| `a` | 1.0 | d | yes | – | **no** | – | – | – | – |" in text
    assert "- `a`, tools: ValueError: x" in text and "- `b`: not installed: y" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


def test_a_failure_that_is_known_is_no_surprise():
    client = CLIENTS[0].__class__("x", "x.py", known={"tools": "why"})
    assert _surprises(client, Row("x", "1", "d", {"tools": "e", "plain": ""})) == []
    assert _surprises(client, Row("x", "1", "d", {"plain": "e"})) == ["plain"]
    assert _surprises(client, Row("x", "", "d", {}, "not installed")) == ["not installed"]


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("global.index-url='https://a/simple'", ["--default-index", "https://a/simple"]),
        ("global.extra-index-url='file:///a file:///b'", ["--index", "file:///a", "--index", "file:///b"]),
        (":env:.find-links='/w'\nglobal.find-links='/w'", ["--find-links", "/w"]),
        ("global.timeout='3'\n:env:.cert='/c'", []),
    ],
)
def test_pips_settings_are_uvs(line, options):
    assert uv_options(line) == options


def test_a_script_in_javascript_runs_where_its_packages_are(tmp_path):
    client = CLIENTS[0].__class__("openai-node", "openai_node.mjs", ("openai", "zod"), npm=True)
    home = tmp_path / "openai-node"
    (home / "node_modules" / "openai").mkdir(parents=True)
    (home / "node_modules" / "openai" / "package.json").write_text('{"version": "6.0.0"}')
    assert command_of(client, tmp_path) == ["node", str(home / "openai_node.mjs")]
    assert (home / "openai_node.mjs").exists() and (home / "report.mjs").exists()
    assert version_of(client, tmp_path) == "6.0.0"
