"""Forms of answers as engines read them: every schema in one place, whatever field the client put it into. Pure."""

from __future__ import annotations

from typing import Any, Final

Object = dict[str, Any]

GUIDED: Final = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
"""vLLM's older names, which its clients still send -> its fields of `structured_outputs`."""


def formats_as_meant(data: Object) -> None:
    """Rewrites the body in place: a schema beside `json_object` is followed, and older names are understood."""
    for older, newer in GUIDED.items():
        if older in data and not data.get("structured_outputs"):
            value = data.pop(older)
            if value is not None:
                data["structured_outputs"] = {newer: value}
        elif data.get(older, 0) is None:
            del data[older]
    wanted = data.get("response_format")
    if isinstance(wanted, dict):
        data["response_format"] = _chat_format(wanted)
    text = data.get("text")
    if isinstance(text, dict) and isinstance(text.get("format"), dict):
        data["text"] = {**text, "format": _response_format(text["format"])}
    _one_form(data)


def _schema_in(wanted: Object) -> Any:
    """The schema that a format has outside the place that its type has for it."""
    if isinstance(wanted.get("schema"), dict):
        return wanted["schema"]
    inner = wanted.get("json_schema")
    if isinstance(inner, dict) and inner:
        return inner["schema"] if isinstance(inner.get("schema"), dict) else inner
    return None


def _chat_format(wanted: Object) -> Object:
    kind, schema = wanted.get("type"), _schema_in(wanted)
    inner = wanted.get("json_schema")
    whole = isinstance(inner, dict) and ("schema" in inner or "name" in inner)
    if not isinstance(schema, dict) or kind not in ("json_object", "json_schema") or (kind == "json_schema" and whole):
        return wanted
    own = inner if isinstance(inner, dict) and whole else {}
    return {"type": "json_schema", "json_schema": {"name": "answer", **own, "schema": schema}}


def _response_format(wanted: Object) -> Object:
    kind, schema = wanted.get("type"), _schema_in(wanted)
    if not isinstance(schema, dict) or kind not in ("json_object", "json_schema"):
        return wanted
    if kind == "json_schema" and isinstance(wanted.get("schema"), dict) and isinstance(wanted.get("name"), str):
        return wanted
    inner = wanted.get("json_schema")
    own = inner if isinstance(inner, dict) else {}
    told = {key: own.get(key, wanted.get(key)) for key in ("name", "description", "strict")}
    return {"type": "json_schema", "name": "answer", "schema": schema} | {
        k: v for k, v in told.items() if v is not None
    }


def _one_form(data: Object) -> None:
    """`structured_outputs` beside a format that asks for less: an engine takes one of both."""
    own = data.get("structured_outputs")
    if not isinstance(own, dict) or not any(value is not None for value in own.values()):
        return
    wanted = data.get("response_format")
    if isinstance(wanted, dict) and wanted.get("type") in ("json_object", "text"):
        del data["response_format"]
    text = data.get("text")
    wanted = text.get("format") if isinstance(text, dict) else None
    if isinstance(wanted, dict) and wanted.get("type") in ("json_object", "text"):
        data["text"] = {name: value for name, value in text.items() if name != "format"}  # type: ignore[union-attr]
