"""Every key of `appliance.toml` as Markdown, for docs/operations.md.

    python -m appliance.config_reference

What a key means is said once, beside its definition: in its `description`, in the text under it, or in the comment
above it. A test compares the document with this.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from appliance.config import BoxConfig


def reference() -> str:
    """One table per section, in the order of `BoxConfig`."""
    parts = []
    for title, kind in _sections(BoxConfig, ()):
        rows = [f"| `{name}` | {shape} | {default} | {text} |" for name, shape, default, text in _keys(kind)]
        about = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
        parts.append(
            "\n".join(
                [f"#### [{title}]", "", about, "", "| key | type | default | meaning |", "|---|---|---|---|", *rows]
            )
        )
    return "\n\n".join(parts) + "\n"


def _sections(kind: type, path: tuple[str, ...]) -> Iterator[tuple[str, type]]:
    if path:
        yield ".".join(path), kind
    for name, annotation, _ in _fields(kind):
        if _is_section(annotation):
            yield from _sections(annotation, (*path, name))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and (issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation))


def _fields(kind: type) -> list[tuple[str, Any, Any]]:
    """(name, type, default) of each field."""
    if issubclass(kind, BaseModel):
        return [(name, field.annotation, field.default) for name, field in kind.model_fields.items()]
    hints = typing.get_type_hints(kind)
    return [(field.name, hints[field.name], field.default) for field in dataclasses.fields(kind)]


def _keys(kind: type) -> Iterator[tuple[str, str, str, str]]:
    said = _said(kind)
    for name, annotation, default in _fields(kind):
        if _is_section(annotation):
            continue
        assert default not in (PydanticUndefined, dataclasses.MISSING), f"{kind.__name__}.{name} has no default"
        yield name, _shape(annotation), _literal(default), said.get(name, "")


def _said(kind: type) -> dict[str, str]:
    """What the source says of each field: its description, else the text under it, else the comment above it."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    body = typing.cast(ast.ClassDef, ast.parse("\n".join(lines)).body[0]).body
    found: dict[str, str] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        comments: list[str] = []
        line = node.lineno - 2
        while line >= 0 and re.match(r"\s*#(?! ---)", lines[line]):
            comments.insert(0, lines[line].strip().removeprefix("#").strip())
            line -= 1
        text = " ".join(comments)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        if issubclass(kind, BaseModel):
            text = kind.model_fields[node.target.id].description or text
        found[node.target.id] = text.replace("|", "\\|")
    if issubclass(kind, BaseModel):  # fields of a base class stand in other source
        for name, field in kind.model_fields.items():
            found.setdefault(name, (field.description or "").replace("|", "\\|"))
    return found


def _shape(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if origin is typing.Annotated:
        return _shape(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_shape(option) for option in typing.get_args(annotation) if option is not type(None))
    if origin is list:
        return f"list of {_shape(typing.get_args(annotation)[0])}s"
    if origin is dict:
        return "table"
    return {str: "text", int: "whole number", float: "number", bool: "true, false"}[annotation]


def _literal(value: Any) -> str:
    if value is None:
        return "not set"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(reference(), end="")
