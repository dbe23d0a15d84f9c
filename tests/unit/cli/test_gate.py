"""`appliance gate`: what decided whether a version answers, shown beside the gate, its job and its model."""

from __future__ import annotations

from appliance.controller.gates.verdict import Judged, Rules, Suite, decide
from appliance.store.objects import gates
from appliance.store.rows import GateRow
from tests.unit.cli.conftest import ControlledBox


def judged(box: ControlledBox) -> None:
    found = decide([Suite("sums", Rules(better_by=0.0), [Judged(True, 0.5)] * 4, [Judged(False, 0.25)] * 4)])
    row = GateRow(
        "gate_1",
        1.0,
        "ftjob-1",
        "starter",
        version="v2",
        before="v1",
        state="ended",
        verdict=found.verdict,
        reason=found.reason,
        told=found.told,
        decided_s=2.0,
    )
    gates.insert(box.context.db, row)


def test_a_gate_is_listed_and_shown_with_its_numbers(box: ControlledBox):
    assert "no gates" in box.run("gate", "list").stdout
    box.do(lambda: judged(box))
    listed = box.run("gate", "list", "--model", "starter").stdout
    assert "gate_1" in listed and "refused" in listed
    assert "no gates" in box.run("gate", "list", "--model", "other").stdout
    told = box.run("gate", "show", "gate_1").stdout
    assert "not shown to be better (p = 0.0625, level 0.05)" in told
    for part in ("100.0%", "0.0%", "0.25", "+1 (+1 to +1)", "0.0625", "v2 of starter"):
        assert part in told, part
    assert box.json("gate", "show", "gate_1")["suites"][0]["compared"]["gained"] == 4
    assert "gate_1: sums" in box.run("gate", "cancel", "gate_1").stdout, "one that has ended stays as it is"
    assert "gate_1" in box.run("model", "show", "starter").stdout
