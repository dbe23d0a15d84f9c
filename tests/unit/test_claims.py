"""The table that `make bench` ends with."""

from __future__ import annotations

from benchmarks._claims import at_least, at_most, record, stated, table


def test_record_replaces_rows_of_the_same_claim_and_size(tmp_path):
    first = [at_most("pause", "5M", 12.0, "ms", 30), at_most("pause", "50M", 44.0, "ms", 30)]
    record("benchmarks/swap.py", first, tmp_path)
    record("benchmarks/swap.py", [at_most("pause", "50M", 29.0, "ms", 30)], tmp_path)
    record("benchmarks/wake.py", [at_least("wake", "5M", 3.0, "x", 50), stated("memory", "5M", 0.2, "GB")], tmp_path)
    rows = [line.split()[:-1] for line in table(tmp_path).splitlines()[1:]]
    assert [row[0] for row in rows] == ["pause", "pause", "wake", "memory"]
    assert [row[-1] for row in rows] == ["met", "met", "missed", "GB"] and rows[1][1:3] == ["50M", "29"]
