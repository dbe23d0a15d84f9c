"""No work on the controller's event loop grows with what an owner keeps: each route and each round is counted with a
little in the store and with ten times as much of everything, and what ran on the loop is the same.

Each of many readings and loops that grew with what somebody kept (files, jobs, keys) once held the loop, and
with it everybody's control routes and hand-overs, and each was found alone. A new table, column, route or round joins
by itself; a table or a route that nobody has judged fails.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from appliance.controller.app import create_app
from appliance.store.database import Database
from tests.simulator.control_plane import simulated_context
from tests.unit.loop_cost import asked, fill
from tests.unit.loop_cost.counted import Counted, count
from tests.unit.loop_cost.exceptions import GROWS, REFUSED
from tests.unit.loop_cost.fill import Size
from tests.unit.loop_cost.meter import COUNTS, Cost, Meter, Told

LITTLE, MUCH = Size(30, 6, 6), Size(300, 6, 6)
SLACK = Cost(steps=250, pages=80, rows=20, bytes=20_000, parsed=20_000, calls=2600, entries=20)
"""What may be more: deeper trees, longer numbers, a turn of the loop, and in calls what is built when a route is first
asked. Something for each of 270 rows is more than that."""
SHARE = 0.25


def grown(before: Told, after: Told, part: float = 1.0) -> dict[str, str]:
    """What grew: the counts together, or in the longest stretch of the loop. part: of what may be more."""
    found = {}
    for one in COUNTS:
        for which in ("all", "longest"):
            was, now = (getattr(getattr(told, which), one) for told in (before, after))
            if now > was + part * (SHARE * was + getattr(SLACK, one)):
                found[one if which == "all" else f"{one} at once"] = f"{was} -> {now}"
    return found


@pytest.mark.timeout(600)
def test_every_request_is_answered_and_what_runs_on_the_loop_does_not_grow_with_what_is_kept(tmp_path: Path):
    """One test: two were given to two workers, and each of these counted anew."""
    little, much = count(tmp_path / "little", LITTLE), count(tmp_path / "much", MUCH)
    check_answers(little, much)
    compare(little, much)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_it_does_not_with_a_thousand_of_each(tmp_path: Path):
    compare(count(tmp_path / "little", Size(100, 6, 6)), count(tmp_path / "much", Size(1000, 6, 6)))


def compare(little: Counted, much: Counted) -> None:
    assert little.told.keys() == much.told.keys()
    wrong, unneeded = [], set(GROWS)
    for name, after in much.told.items():
        found = grown(little.told[name], after)
        allowed: set[str] = set()
        for pattern, (counts, _) in GROWS.items():
            if re.search(pattern, name):
                allowed |= counts
                if grown(little.told[name], after, 0.2).keys() & counts:
                    unneeded.discard(pattern)
        if more := {count: told for count, told in found.items() if count not in allowed}:
            wrong.append(f"{name}: {more}")
    assert not wrong, "\n".join(wrong)
    assert not unneeded, f"these do not grow any more: {unneeded}"


def check_answers(little: Counted, much: Counted) -> None:
    """They are the same with much. One that is refused at once costs nothing, and shows nothing."""
    assert little.statuses == much.statuses
    refused = {name: status for name, status in much.statuses.items() if status >= 400}
    unexpected = [name for name in refused if not any(re.search(pattern, name) for pattern in REFUSED)]
    assert not unexpected, {name: (refused[name], much.texts[name]) for name in unexpected}


def test_every_table_and_every_route_is_judged(tmp_path: Path):
    with Database(tmp_path / "appliance.db") as db:
        assert fill.tables(db) == fill.TABLES.keys() | fill.NOT_KEPT.keys()
        app = create_app(simulated_context(tmp_path, db))
        assert not asked.unjudged(app)
        assert asked.CHANGES.keys() <= set(asked.routes(app))
        lists = {route for _, route in asked.routes(app)}
        assert asked.LISTS.keys() | asked.QUERY.keys() | asked.NO_REQUEST.keys() <= lists | {"/openapi.json"}


async def test_the_counter_sees_each_kind_of_work_on_the_loop_and_none_elsewhere(tmp_path: Path):
    meter = Meter()
    with meter.installed(), Database(tmp_path / "appliance.db") as db:
        db.execute("CREATE TABLE many (id INTEGER PRIMARY KEY, text TEXT)")
        db.many("INSERT INTO many (text) VALUES (?)", [["x" * 9000]] * 300)

        def reads(number: int) -> Any:
            return db.execute("SELECT text FROM many LIMIT ?", [number]).fetchall()

        async def here(number: int) -> None:
            reads(number)

        async def on_a_thread() -> None:
            await db.read(None, reads, 300)

        _, few = await meter.of(here(30))
        _, many = await meter.of(here(300))
        _, beside = await meter.of(on_a_thread())
    assert (few.all.rows, many.all.rows, many.all.bytes) == (30, 300, 300 * 9000)
    assert many.all.steps > 300 and many.all.steps == many.longest.steps
    assert {"steps", "rows at once", "bytes"} <= grown(few, many).keys()
    assert beside.all.rows == 0 and beside.all.steps == 0
