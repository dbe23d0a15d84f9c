"""What `make clients` makes of what clients' scripts say."""

from __future__ import annotations

from tests.clients import table
from tests.clients.clients import CHECKS, CLIENTS
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
