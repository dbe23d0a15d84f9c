"""No body of a control route, however large its route takes it, and nothing that is made of it, holds the loop for
long: each list, map, text and nesting of each route's body is grown to the route's own bound, and what one round of the
loop does is counted.

Each of many bodies (an evaluation of many judges) once held the loop,
and with it everybody's control routes and hand-overs, and each was found alone. A new field grows by itself; a route
with a body that nobody has given an example of fails.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.loop_cost import sized
from tests.unit.loop_cost.exceptions import HOLDS
from tests.unit.loop_cost.grown import growing, largest
from tests.unit.loop_cost.meter import COUNTS, Cost
from tests.unit.loop_cost.sized import Sized, measure

MOST = Cost(
    steps=400_000, pages=20_000, rows=8000, bytes=8 << 20, parsed=12 << 20, calls=100_000, entries=1000, wrong=15_000
)
"""Of one round of the loop: a third to a half of 50 ms each, on a slow core of 2020 (a call takes it 0.2 us, an error
1.7, a byte of JSON 2 ns, a row 3 us with its decoding). What takes it 100 ms takes more than one of them."""


def too_much(told: Cost) -> dict[str, int]:
    return {one: getattr(told, one) for one in COUNTS if getattr(told, one) > getattr(MOST, one)}


@pytest.mark.timeout(600)
def test_every_route_takes_its_bodies_and_none_holds_the_loop(tmp_path: Path):
    """One test, as what is measured takes a core for half a minute: several were given to several workers, and each
    measured it anew."""
    counted = measure(tmp_path / "box")
    check_that_none_holds_the_loop(counted)
    check_that_they_are_taken(counted)
    # asked.CHANGES has an example of each route with a body, and sized.WITHOUT those that do not grow.
    assert sized.with_bodies(tmp_path) <= counted.routes | {
        (method, route) for method in ("POST", "PUT", "PATCH") for route in sized.WITHOUT
    }


def check_that_none_holds_the_loop(counted: Sized) -> None:
    held = {name: found for name, told in counted.told.items() if (found := too_much(told.round))}
    unneeded = [pattern for pattern in HOLDS if not any(re.search(pattern, name) for name in held)]
    wrong = {name: found for name, found in held.items() if not any(re.search(one, name) for one in HOLDS)}
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())
    assert not unneeded, f"these hold it no more: {unneeded}"


def check_that_they_are_taken(counted: Sized) -> None:
    """Large ones, too: what is refused at once costs nothing, and shows nothing."""
    assert not {name: status for name, status in counted.statuses.items() if status >= 500}
    refused = {name for name, status in counted.statuses.items() if name.endswith("as it is") and status >= 400}
    assert refused <= {
        "PATCH /admin/v1/jobs/{job_id} as it is",
        "POST /admin/v1/jobs/{job_id}/profile as it is",
        "POST /admin/v1/session-keys as it is",
    }
    assert len(counted.taken) > 200
    for place in (
        "/v1/fine_tuning/alpha/graders/run .item any numbers",
        "/v1/evals .testing_criteria[].labels items",
        "/v1/evals/{eval_id}/runs .data_source.source.content items",
        "/v1/uploads/{upload_id}/complete .part_ids items",
        "/v1/responses .input items",
    ):
        assert any(one.endswith(place) for one in counted.taken), place


def test_what_grows_follows_from_the_schema_and_from_the_body():
    schema = {
        "type": "object",
        "properties": {
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "parts": {"type": "array", "items": {"$ref": "#/components/schemas/Part"}},
            "train": {"type": "object", "additionalProperties": True},
        },
    }
    definitions = {"Part": {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}}
    found = {one.name: one for one in growing(schema, definitions, {"train": {"model": "m", "wanted": [{"a": "b"}]}})}
    assert {" unknown", ".name text", ".parts items", ".parts[] unknown", ".train keys", ".train.model text"} <= set(
        found
    )
    assert {".train.wanted items", ".train.wanted[].a text", ".train.* any deep"} <= set(found)
    made = found[".parts items"].of(3)
    assert made == {"parts": [{"size": 1}] * 3, "train": {"model": "m", "wanted": [{"a": "b"}]}}
    bound = sized.Bound(10_000, 10_000)
    for one in found.values():
        text = sized._text(one.of(largest(one.of, bound)))
        assert len(text) <= bound.nbytes, one.name
