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


def test_what_left_the_table_is_forgotten_and_counts_from_nothing_when_it_returns():
    arrivals = Arrivals(BEGAN_S)
    arrivals.keep(["m", "other"])
    arrivals.heard(said(4))
    arrivals.heard(said(7, by="g-1"))
    arrivals.keep(["other"])
    assert arrivals.totals == {}
    arrivals.heard(said(8, by="g-1"))
    assert arrivals.totals == {}, "a gateway that routes by the table of before"
    arrivals.heard(said(9, model="other"))
    arrivals.keep(["m", "other"])
    arrivals.heard(said(2))
    assert arrivals.totals["m"].requests == 2, "g-0 heard of the table without it, and began again"
    arrivals.heard(said(9, by="g-1"))
    assert arrivals.totals["m"].requests == 3, "g-1 did not, and has had one more"


def test_however_many_names_were_asked_for_those_of_the_table_are_kept():
    arrivals = Arrivals(BEGAN_S)
    for number in range(50):
        name = f"ft:{number}"
        arrivals.keep([name])
        arrivals.heard(said(number + 1, model=name))
    assert list(arrivals.totals) == ["ft:49"] and list(arrivals._processes["g-0"].counts) == ["ft:49"]


def test_reports_without_counts_are_no_arrivals():
    report = parse_report({"gateway": "g", "generation": 1, "models": {"m": {"inflight": 3}}})
    assert counted(report) == Arrived() and report.arrived == {}
    with pytest.raises(ValueError, match="of another shape"):
        parse_report({"gateway": "g", "generation": 1, "started_s": "now"})
