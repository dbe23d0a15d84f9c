"""Ranks tell each other JSON: nothing that they receive is unpickled."""

import ast
import json
from pathlib import Path

import train
from weights.format.errors import StoreFull, error_as_json, error_from_json


def test_no_collective_of_ours_pickles():
    found = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in Path(train.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list", "_objects"))
    ]
    assert found == []


def test_an_error_of_the_store_is_the_same_error_on_every_rank():
    full = StoreFull(needed_bytes=5, used_bytes=1, budget_bytes=None, free_bytes=3)
    error = error_from_json(json.loads(json.dumps(error_as_json(full))))
    assert type(error) is StoreFull and (error.needed_bytes, error.free_bytes) == (5, 3)
