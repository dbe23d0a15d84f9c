"""Checks a whole body for its depth, its number of lists and objects, and media that would have to be fetched. Pure:
takes a parsed body, returns nothing or raises HttpError."""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

# Where a URL may stand in a message: OpenAI's, vLLM's short forms, Anthropic's `source.url`, tool servers.
_MEDIA_KEYS = frozenset(
    {"image_url", "video_url", "audio_url", "file_url", "server_url", "image_embeds", "audio_embeds", "image_pil"}
)
_DATA_IMAGE = re.compile(r"data:image/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)
_DATA_AUDIO = re.compile(r"data:audio/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)

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
    """Raises HttpError 400 for JSON within a text, such as a call's arguments, that is nested deeper than `most`
    levels: what parses it goes down by recursion. A text that is no JSON passes."""
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


def check_media(root: Any) -> None:
    """Raises HttpError 400 for media that would have to be fetched, anywhere in a body."""
    level: list[Any] = [root]
    while level:
        for node in level:
            if isinstance(node, dict):
                for key, value in node.items():
                    if key in _MEDIA_KEYS:
                        _media(key, value)
                    elif key == "url" and node.get("type") == "url":
                        raise _remote("source.url")
        level = _inside(level)


def _inside(level: list[Any]) -> list[Any]:
    """The lists and objects in these."""
    return [
        value
        for node in level
        for value in (node.values() if isinstance(node, dict) else node)
        if isinstance(value, _NESTED)
    ]


def _media(key: str, value: Any) -> None:
    url = value.get("url") if isinstance(value, dict) else value
    if url is None:
        return
    # A JSON schema may well have a property called "image_url": its value is a schema, an object without "url".
    if isinstance(value, dict) and not isinstance(url, str):
        return
    if isinstance(url, str):
        if key == "image_url" and _DATA_IMAGE.match(url):
            return
        if key == "audio_url" and _DATA_AUDIO.match(url):
            return
    raise _remote(key)


def _remote(param: str) -> HttpError:
    return errors.bad_request(
        f"`{param}`: only inline images and audio (data:image/…, data:audio/…) are accepted; "
        "this server fetches nothing, opens no files and decodes no video.",
        param=param,
        code="remote_media_refused",
    )
