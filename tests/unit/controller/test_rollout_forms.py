"""The form of a job's rollouts is one that its ranks enforce."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.controller.grading.given import form_of
from appliance.controller.interfaces.errors import BadRequest


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def test_form_of_parts_that_ranks_enforce_is_taken() -> None:
    for more in ({"type": "object"}, {}):
        wanted = form({"properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], **more})
        assert form_of(wanted, "p") == wanted


@pytest.mark.parametrize("schema", [{"type": "string", "pattern": "a"}, {"type": "integer", "multipleOf": 5}])
def test_form_that_the_engine_alone_enforces_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        form_of(form(schema), "p")
    assert (caught.value.param, caught.value.code) == ("p", "unsupported_value")
