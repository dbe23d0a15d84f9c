"""Developer tools: tables of measurements, tables of client tests, size limits and wording checks."""

import json
from pathlib import Path

import pytest

from benchmarks import _claims
from benchmarks._claims import at_least, at_most, record, stated
from tests.clients import table
from tests.clients.clients import CHECKS, CLIENTS
from tests.clients.run import _surprises
from tests.clients.table import ROOT, Row
from tests.tools import sizes, words


def test_record_replaces_rows_of_the_same_claim_and_size(tmp_path):
    first = [at_most("pause", "5M", 12.0, "ms", 30), at_most("pause", "50M", 44.0, "ms", 30)]
    record("benchmarks/swap.py", first, tmp_path)
    record("benchmarks/swap.py", [at_most("pause", "50M", 29.0, "ms", 30)], tmp_path)
    record("benchmarks/wake.py", [at_least("wake", "5M", 3.0, "x", 50), stated("memory", "5M", 0.2, "GB")], tmp_path)
    rows = [line.split()[:-1] for line in _claims.table(tmp_path).splitlines()[1:]]
    assert [row[0] for row in rows] == ["pause", "pause", "wake", "memory"]
    assert [row[-1] for row in rows] == ["met", "met", "missed", "GB"] and rows[1][1:3] == ["50M", "29"]


def test_each_client_has_a_script_and_each_script_a_client():
    scripts = {client.script for client in CLIENTS}
    own = {"__init__.py", "clients.py", "run.py", "table.py"}
    files = {path.name for path in (ROOT / "tests" / "clients").iterdir() if path.suffix in (".py", ".mjs")}
    assert scripts == files - own - {"report.py", "report.mjs"}
    assert all(client.known.keys() <= {*CHECKS, "trouble"} for client in CLIENTS)


def test_verdicts_are_parsed_from_mixed_output():
    said = 'noise\n@@{"check": "plain", "failed": ""}\n@@{"check": "tools", "failed": "KeyError: 1"}\n@ @'
    assert table.verdicts(said) == {"plain": "", "tools": "KeyError: 1"}


def test_client_table_shows_results_and_reasons(tmp_path):
    rows = [Row("a", "1.0", "d", {"plain": "", "tools": "ValueError: x"}), Row("b", "", "d", {}, "not installed: y")]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGINS}\nold\n{table.ENDS}\nafter\n")
    table.put(table.drawn(rows), page)
    text = page.read_text()
    assert "| `a` | 1.0 | d | yes | – | **no** | – | – | – | – |" in text
    assert "- `a`, tools: ValueError: x" in text and "- `b`: not installed: y" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text


def test_surprises_exclude_known_failures_of_a_client():
    client = CLIENTS[0].__class__("x", "x.py", known={"tools": "why"})
    assert _surprises(client, Row("x", "1", "d", {"tools": "e", "plain": ""})) == []
    assert _surprises(client, Row("x", "1", "d", {"plain": "e"})) == ["plain"]
    assert _surprises(client, Row("x", "", "d", {}, "not installed")) == ["not installed"]


@pytest.mark.parametrize(
    "source, number",
    [
        ("from vllm.a import B\n\n\ndef patch():\n    B.f = B.c.g = None\n    setattr(B, 'h', 1)\n", 2),
        ("import vllm.a\nimport torch as t\n\n\ndef patch():\n    vllm.a.f = 1\n    t.nn.Linear.forward = 2\n", 2),
        ("from vllm.a import B\n\n\nclass C:\n    def f(self):\n        self.b = B.g\n", 0),
    ],
)
def test_patches_counts_assignments_to_imported_names(source, number):
    assert sizes.patches(source) == number


def test_sizes_main_fails_on_growth_and_lowers_limits(tmp_path, monkeypatch):
    held = tmp_path / "sizes.json"
    monkeypatch.setattr(sizes, "HELD", held)
    monkeypatch.setattr(sizes, "ROOT", tmp_path)
    monkeypatch.setattr(sizes, "sizes", lambda: {"train": 7, "serve": 5})
    held.write_text(json.dumps({"train": 9, "serve": 4}))
    assert sizes.main() == 1
    assert json.loads(held.read_text()) == {"train": 7, "serve": 4}
    held.write_text(json.dumps({"train": 7, "serve": 5}))
    assert sizes.main() == 0


def test_word_hits_ignore_code(tmp_path: Path) -> None:
    source = tmp_path / "one.py"
    source.write_text('"""It goes on."""\n\nbeside = "beside"  # nobody\nraise ValueError(f"it is {beside} anew")\n')
    page = tmp_path / "page.md"
    page.write_text("fine\nlearnt of it\n")
    found = [hit.split(": ")[0:2] for hit in words.hits(iter([source, page]))]
    numbered = sorted((Path(place).name, phrase) for place, phrase in found)
    assert numbered == [("one.py:1", "goes on"), ("one.py:3", "nobody"), ("one.py:4", "anew"), ("page.md:2", "learnt")]
