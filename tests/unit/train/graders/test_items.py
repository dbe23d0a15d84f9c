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
        ((of_schema, why),) = refused_items({"$id": "http://a/b", keyword: reference}, [{"a": 1}])
        assert of_schema and "leads nowhere" in why and "'secret'" not in why


def test_refused_items_takes_a_reference_within_the_schema() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    found = list(refused_items(schema, [{"a": 1}, {"a": "x"}]))
    assert found == [(False, ""), (False, "item.a: 'x' is not of type 'integer'")]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself without end"),
        ({"pattern": "(("}, "is not a 'regex'"),
        ({"type": "object", "properties": {"a": {"required": True}}}, "at properties.a.required"),
    ],
)
def test_refused_items_faulty_schema_is_named(schema: dict[str, Any], why: str) -> None:
    ((of_schema, reason),) = refused_items(schema, ["a"])
    assert of_schema and why in reason
