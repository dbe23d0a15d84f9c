"""Checks a whole inference body for its nesting depth and for media that would have to be fetched. Pure: takes a parsed
body, returns nothing or raises HttpError."""

from __future__ import annotations

import re
from typing import Any, Final

from appliance.gateway.core import errors
from appliance.gateway.core.errors import HttpError

# Where a URL may stand in a message: OpenAI's, vLLM's short forms, Anthropic's `source.url`, tool servers.
_MEDIA_KEYS = frozenset(
    {"image_url", "video_url", "audio_url", "file_url", "server_url", "image_embeds", "audio_embeds", "image_pil"}
)
_DATA_IMAGE = re.compile(r"data:image/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)
_DATA_AUDIO = re.compile(r"data:audio/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)

_NESTED: Final = frozenset({dict, list})
_KIND: Final[Any] = type


def check_depth(root: Any, max_depth: int) -> None:
    """Raises HttpError 400. Without recursion, because an attacker may choose the depth."""
    level: list[Any] = [root]
    for _ in range(max_depth):
        level = _inside(level)
        if not level:
            return
    raise errors.bad_request(f"The request body is nested deeper than {max_depth} levels.", code="invalid_json")


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
    found: list[Any] = []
    for node in level:
        values = node.values() if isinstance(node, dict) else node
        if not _NESTED.isdisjoint(map(_KIND, values)):  # C code scans millions of token ids
            found += [value for value in values if isinstance(value, dict | list)]
    return found


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
