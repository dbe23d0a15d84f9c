"""Items against an eval's schema, as the worker checks them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.graders.worker import refused_items


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_refused_items_reference_outside_the_schema_is_not_opened(tmp_path: Path, keyword: str) -> None:
    (tmp_path / "secret.json").write_text(json.dumps({"const": "secret"}))
    for reference in (f"file://{tmp_path}/secret.json", "secret.json", "https://json-schema.org/nosuch"):
        ((place, why),) = refused_items({"$id": "http://a/b", keyword: reference}, [{"a": 1}])
        assert place == -1 and "leads nowhere" in why and "'secret'" not in why


def test_a_schema_may_lead_to_a_place_of_its_own() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    assert refused_items(schema, [{"a": 1}, {"a": "x"}]) == [(1, "item.a: 'x' is not of type 'integer'")]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself without end"),
        ({"pattern": "(("}, "is not a 'regex'"),
        ({"type": "object", "properties": {"a": {"required": True}}}, "at properties.a.required"),
    ],
)
def test_what_is_no_schema_is_said_in_words(schema: dict[str, Any], why: str) -> None:
    ((place, told),) = refused_items(schema, ["a"])
    assert place == -1 and why in told
