"""Ranks tell each other JSON: nothing that they receive is unpickled."""

import ast
from pathlib import Path

import train


def test_no_collective_of_ours_pickles():
    found = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in Path(train.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.endswith(("_object", "_object_list", "_objects"))
    ]
    assert found == []
