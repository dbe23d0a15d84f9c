"""Every key of `appliance.toml` as Markdown: `python -m appliance.config_reference`.

What a key means is said once, beside its definition: in its `description` or in the text under it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from appliance.config import BoxConfig

Schema = dict[str, Any]
NAMES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false", "object": "table"}


def reference() -> str:
    """One table per section, in the order of `BoxConfig`."""
    schema = BoxConfig.model_json_schema()
    return "\n\n".join(_table(title, kind) for title, kind in _sections(schema["$defs"], schema, "")) + "\n"


def _sections(known: Schema, kind: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    if path:
        yield path, kind
    for name, field in kind["properties"].items():
        if "$ref" in field:
            yield from _sections(known, known[field["$ref"].rpartition("/")[2]], f"{path}.{name}".lstrip("."))


def _table(title: str, kind: Schema) -> str:
    rows = []
    for name, field in kind["properties"].items():
        if "$ref" not in field:
            text = " ".join(field.get("description", "").split()).replace("|", "\\|")
            rows.append(f"| `{name}` | {_shape(field)} | {_literal(field['default'])} | {text} |")
    about = kind["description"].split("\n\n")[0].replace("\n", " ")
    head = [f"#### [{title}]", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows])


def _shape(field: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_shape(option) for option in field["anyOf"] if option.get("type") != "null")
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        return f"list of {_shape(field['items'])}s"
    return NAMES[field["type"]]


def _literal(value: Any) -> str:
    if value is None:
        return "not set"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
