"""Arrivals are counted once, whatever becomes of the processes that report them."""

from __future__ import annotations

import pytest

from appliance.controller.bus.arrivals import Arrivals
from appliance.controller.bus.load import Arrived, Report, parse_report

BEGAN_S = 1000.0


def said(requests: int, *, by: str = "g-0", started_s: float = BEGAN_S + 1, model: str = "m") -> Report:
    row = {"arrived_requests": requests, "arrived_prompt_tokens": 10 * requests}
    return parse_report(
        {"type": "load", "gateway": by, "generation": 1, "started_s": started_s, "replicas": {}, "models": {model: row}}
    )


def counted(*reports: Report) -> Arrived:
    arrivals, last = Arrivals(BEGAN_S), 0
    for report in reports:
        arrivals.heard(report)
        total = arrivals.totals.get("m", Arrived())
        assert total.requests >= last, "never falls"
        assert total.prompt_tokens == 10 * total.requests
        last = total.requests
    return arrivals.totals.get("m", Arrived())


def test_two_workers_add_up_and_repeated_reports_do_not():
    assert counted(said(3), said(4, by="g-1"), said(3), said(5), said(4, by="g-1")) == Arrived(9, 90)


@pytest.mark.parametrize("anew", [2, 7, 12])
def test_a_restarted_worker_counts_from_nothing_whatever_it_has_reached(anew):
    assert counted(said(7), said(anew, started_s=BEGAN_S + 50)).requests == 7 + anew


def test_late_words_count_nothing():
    assert counted(said(5), said(3), said(6)).requests == 6, "an old connection's line after the new one's"
    assert counted(said(5), said(1, started_s=BEGAN_S + 9), said(6)).requests == 6, "of the process before"


def test_what_came_before_we_listened_is_no_burst():
    long_there = BEGAN_S - 500
    assert counted(said(10_000, started_s=long_there), said(10_002, started_s=long_there)).requests == 2


def test_a_model_that_leaves_the_table_and_returns_goes_on():
    assert counted(said(4), said(9, model="other"), said(6)).requests == 6


def test_reports_without_counts_are_no_arrivals():
    report = parse_report({"gateway": "g", "generation": 1, "models": {"m": {"inflight": 3}}})
    assert counted(report) == Arrived() and report.arrived == {}
    with pytest.raises(ValueError, match="started_s"):
        parse_report({"gateway": "g", "generation": 1, "started_s": "now"})
