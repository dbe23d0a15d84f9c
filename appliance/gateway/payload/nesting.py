"""Checks a body for its depth, its number of lists and objects, and media that would have to be fetched. Pure."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

# Where a URL may stand in a message: OpenAI's and vLLM's short forms, and what engines take instead of one.
_MEDIA: Final = frozenset("image_url video_url audio_url file_url image_embeds audio_embeds image_pil".split())
_INLINE: Final = re.compile(r"data:(image|audio)/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)
# Lists and objects in one body; 1,024 tools with fifty properties each have as many.
_MOST_NESTED: Final = 1 << 16
_NESTED: Final = (dict, list)  # `dict | list` is made anew for each value, and takes twice the time


def check_depth(root: Any, most: int) -> None:
    """Raises HttpError 400. Without recursion, because a client chooses the depth."""
    level: list[Any] = [root]
    found = 0
    for _ in range(most):
        level = _inside(level)
        found += len(level)
        if found > _MOST_NESTED:
            raise errors.bad_request(
                f"The request body holds more than {_MOST_NESTED} lists and objects. Send several smaller requests.",
                code="too_many_values",
            )
        if not level:
            return
    raise errors.bad_request(f"The request body is nested deeper than {most} levels.", code="invalid_json")


def check_text_depth(name: str, text: Any, most: int) -> None:
    """Raises HttpError 400 for JSON within a text that is nested deeper than `most` levels: what parses it goes down by
    recursion. A text that is no JSON passes."""
    if not isinstance(text, str) or text.count("[") + text.count("{") <= most:
        return
    try:
        check_depth([orjson.loads(text)], most + 1)
    except orjson.JSONDecodeError as error:
        if "depth limit" not in str(error):
            return
    except HttpError as error:
        if error.code != "invalid_json":
            raise
    else:
        return
    raise errors.bad_request(f"`{name}` holds JSON nested deeper than {most} levels.", param=name, code="invalid_json")


def check_media(prompts: list[Any]) -> None:
    """Raises HttpError 400 for media in messages, items or parts that would have to be fetched, and for parts that name
    what an engine keeps of media."""
    level = _inside([prompts])
    while level:
        for node in level:
            if isinstance(node, dict):
                _check_part(node)
        level = _inside([node for node in level if not (isinstance(node, dict) and node.get("type") == "tool_use")])


def _check_part(part: dict[str, Any]) -> None:
    for name in _MEDIA & part.keys():
        url = part[name].get("url") if isinstance(part[name], dict) else part[name]
        inline = _INLINE.match(url) if isinstance(url, str) else None
        if url is not None and not (inline and name.startswith(inline[1].lower())):
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


def _inside(level: list[Any]) -> list[Any]:
    """The lists and objects in these."""
    return [
        value
        for node in level
        for value in (node.values() if isinstance(node, dict) else node)
        if isinstance(value, _NESTED)
    ]


def _remote(param: str) -> HttpError:
    return errors.bad_request(
        f"`{param}`: only inline images and audio (data:image/…, data:audio/…) are accepted; "
        "this server fetches nothing, opens no files and decodes no video.",
        param=param,
        code="remote_media_refused",
    )
