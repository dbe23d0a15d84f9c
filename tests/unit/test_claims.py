"""The table that `make bench` ends with."""

from __future__ import annotations

import time

from benchmarks._claims import at_least, at_most, record, skipped, stated, table


def test_a_figure_measured_again_replaces_its_row_and_others_stay(tmp_path):
    first = [at_most("pause", "5M", 12.0, "ms", 30), at_most("pause", "50M", 44.0, "ms", 30)]
    record("benchmarks/swap.py", first, tmp_path)
    record("benchmarks/swap.py", [at_most("pause", "50M", 29.0, "ms", 30)], tmp_path)
    other = [at_least("wake", "5M", 3.0, "x", 50), stated("memory", "5M", 0.2, "of awake")]
    record("benchmarks/wake.py", other, tmp_path)
    lines, today = table(tmp_path).splitlines(), time.strftime("%Y-%m-%d")
    assert [line.split()[0] for line in lines] == ["claim", "pause", "pause", "wake", "memory"]
    assert lines[1].split()[1:] == ["5M", "12", "ms", "<=", "30", "met", today]
    assert lines[2].split()[1:] == ["50M", "29", "ms", "<=", "30", "met", today]
    assert lines[3].split()[-2:] == ["missed", today] and lines[4].split()[-2:] == ["stated", today]


def test_what_cannot_be_measured_here_says_so_until_it_is(tmp_path):
    record("benchmarks/copies.py", [skipped("locked copy", "4 GiB", ">= 0.9", "no GPU")], tmp_path)
    assert table(tmp_path).splitlines()[1].split()[:9] == "locked copy 4 GiB - >= 0.9 skipped: no".split()
    record("benchmarks/copies.py", [at_least("locked copy", "4 GiB", 0.95, "x", 0.9)], tmp_path)
    (row,) = table(tmp_path).splitlines()[1:]
    assert "met" in row and "skipped" not in row


def test_without_figures_the_table_says_what_to_run(tmp_path):
    assert "make bench" in table(tmp_path)
