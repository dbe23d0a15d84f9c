"""Checks what is inside a body: how deep it is, its structured output (schemas, expressions, choices, tools that must
be called), its images and sounds. Pure.

Engines compile schemas within limits of their own (serve.vllm.grammars). This module bounds their size and refuses
schemas of formats with keywords that no engine enforces. Text grammars and structural tags are refused: they reach more
of an engine than answers need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError
from serve.core.keywords import counted, defined, unenforced

Form = tuple[str, Any]
# Its place in the request, and what it is.

_MOST: Final = (
    ("bytes of schemas, expressions and choices", lambda form: len(orjson.dumps(form)), 256 * 1024),
    ("items in all `minItems` and `maxItems`", counted, 10_000),
    ("definitions", defined, 256),
)
"""Bounds of all forms of a request together. llguidance takes 0.5 s for this many bytes."""
_OTHERS: Final = ("grammar", "structural_tag", "whitespace_pattern")
_FIELDS: Final = frozenset({"response_format", "text", "output_config", "structured_outputs", "tools"})
# Where a URL may be in a message: OpenAI's and vLLM's short forms, and what engines take instead of one.
_URLS: Final = frozenset("image_url video_url audio_url file_url image_embeds audio_embeds image_pil".split())
_INLINE: Final = re.compile(r"data:(image|audio)/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)
_IMAGE_TOKENS: Final = 1_024
_SOUND_CHARS: Final = 1_700
"""Of base64 per token: speech encoders make some 25 tokens of a second, which has 32,000 bytes."""
# Lists and objects in one body; 1,024 tools with fifty properties each have as many.
_MOST_NESTED: Final = 1 << 16


def check_depth(root: Any, most: int, param: str | None = None) -> None:
    """Raises HttpError 400. Without recursion, because a client chooses the depth."""
    level, found = [root], 0
    for _ in range(most):
        level = [
            value
            for node in level
            for value in (node.values() if isinstance(node, dict) else node)
            if isinstance(value, (dict, list))
        ]
        found += len(level)
        if found > _MOST_NESTED:
            raise errors.bad_request(
                f"The request body holds more than {_MOST_NESTED} lists and objects. Send several smaller requests.",
                param=param,
                code="too_many_values",
            )
        if not level:
            return
    raise errors.bad_request(f"The request body is nested deeper than {most} levels.", param=param, code="invalid_json")


def check_structure(data: dict[str, Any], json_depth: int) -> None:
    """Raises HttpError 400 for structured output that engines do not enforce, or that is too large."""
    if _FIELDS.isdisjoint(data):
        return
    schemas = [*_formats(data), *_outputs(data.get("structured_outputs", {}), json_depth)]
    schemas = [(place, schema) for place, schema in schemas if schema is not None]
    for place, schema in schemas:
        if path := next(unenforced(schema), ""):
            raise errors.bad_request(
                f"`{place}.{path}`: this server does not enforce the keyword `{path.rpartition('.')[2]}` here. "
                "Take it out, and check answers yourself.",
                param=f"{place}.{path}",
                code="unsupported_schema_keyword",
            )
    forms = [*schemas, *_enforced_tools(data)]
    for what, measure, most in _MOST:
        sizes = [measure(form) for _, form in forms]
        if sum(sizes) > most:
            raise errors.bad_request(
                f"The request has {sum(sizes)} {what} that an engine compiles, at most {most} are allowed. "
                "Ask for a simpler form.",
                param=forms[sizes.index(max(sizes))][0].partition(".")[0],
                code="structure_too_complex",
            )


def _formats(data: dict[str, Any]) -> Iterator[Form]:
    formats = {
        "response_format": data.get("response_format"),
        "text.format": data.get("text", {}).get("format"),
        "output_config.format": data.get("output_config", {}).get("format"),
    }
    for place, given in formats.items():
        if isinstance(given, dict):  # of others an engine says what it expects
            if given.get("type") in _OTHERS:
                raise _unsupported(place, f"the type `{given['type']}`")
            if isinstance(named := given.get("json_schema"), dict):
                yield f"{place}.json_schema.schema", named.get("schema")
            yield f"{place}.schema", given.get("schema")


def _outputs(given: dict[str, Any], json_depth: int) -> Iterator[Form]:
    name = "structured_outputs"
    for key in _OTHERS:
        if given.get(key) is not None:
            raise _unsupported(name, f"`{key}`")
    schema = given.get("json")
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise errors.bad_request(f"`{name}.json` is not JSON: {error}", param=f"{name}.json") from None
        check_depth([schema], json_depth, f"{name}.json")
    yield f"{name}.json", schema
    for key, keyword in (("regex", "const"), ("choice", "enum")):
        yield f"{name}.{key}", {keyword: given[key]} if key in given else None


def _enforced_tools(data: dict[str, Any]) -> Iterator[Form]:
    """Schemas of strict tools; those whose call is demanded are strict (normalize.py)."""
    for at, tool in _each_tool(data.get("tools", [])):
        # In `function` (chat), or in the tool itself (Responses, Anthropic): an engine may read either.
        for where, holder in ((at, tool), (f"{at}.function", tool.get("function"))):
            if isinstance(holder, dict) and holder.get("strict"):
                names = [name for name in ("parameters", "input_schema") if holder.get(name) is not None]
                yield from ((f"{where}.{name}", holder[name]) for name in names)


def _each_tool(tools: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """All tools with their places, those of namespaces too."""
    for place, tool in enumerate(tools):
        yield f"tools[{place}]", tool
        if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            yield from ((f"tools[{place}].tools[{at}]", one) for at, one in enumerate(tool["tools"]))


def _unsupported(name: str, what: str) -> HttpError:
    return errors.bad_request(
        f"`{name}`: {what} is not accepted by this server, expected a JSON schema, a regular expression or choices.",
        param=name,
        code="unsupported_parameter",
    )


# -- images and sounds


def media_in(prompts: Any) -> tuple[int, int]:
    """Characters of base64 in messages, items or prompts, and tokens that a model makes of them. A file's size in bytes
    says nothing of its tokens: vision models resize large images. Raises HttpError 400 for media that are not inline,
    and for parts that name what an engine keeps of media."""
    chars, tokens = 0, 0
    stack = [prompts]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(one for one in node if isinstance(one, (dict, list)))
        elif isinstance(node, dict):
            for kind, data in _media(node):
                chars += len(data)
                tokens += _IMAGE_TOKENS if kind == "image" else len(data) // _SOUND_CHARS
            if node.get("type") != "tool_use":  # whose arguments may have any names
                stack.extend(value for value in node.values() if isinstance(value, (dict, list)))
    return chars, tokens


def _media(part: dict[str, Any]) -> list[tuple[str, str]]:
    """Kind ("image", "audio") and base64 of the media in a part. Raises HttpError 400."""
    found: list[tuple[str, str]] = []
    for name in _URLS & part.keys():
        url = part[name].get("url") if isinstance(part[name], dict) else part[name]
        inline = _INLINE.match(url) if isinstance(url, str) else None
        if inline is not None and name.startswith(inline[1].lower()):
            found.append((inline[1].lower(), url[inline.end() :]))
        elif url is not None:
            raise _remote(name)
    if part.get("type") == "url" and "url" in part:
        raise _remote("source.url")
    if "uuid" in part:
        # vLLM keeps what it made of an image or a sound under this name, whoever's it was.
        raise errors.bad_request(
            "A part has a `uuid`, which this server does not take: send the image or sound itself.",
            param="uuid",
            code="unsupported_parameter",
        )
    data, media_type = part.get("data"), part.get("media_type")
    if isinstance(data, str) and isinstance(media_type, str) and media_type[:6] in ("image/", "audio/"):
        found.append((media_type[:5], data))  # Anthropic's source
    elif isinstance(data, str) and isinstance(part.get("format"), str) and "type" not in part:
        found.append(("audio", data))  # OpenAI's input_audio
    return found


def _remote(param: str) -> HttpError:
    return errors.bad_request(
        f"`{param}`: only inline images and audio (data:image/…, data:audio/…) are accepted; "
        "this server fetches nothing, opens no files and decodes no video.",
        param=param,
        code="remote_media_refused",
    )
