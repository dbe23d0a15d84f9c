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


def walk(root: Any, max_depth: int) -> None:
    """Check depth and media of the whole body without recursion, because an attacker may choose the depth."""
    stack: list[tuple[Any, int]] = [(root, 1)]
    while stack:
        node, depth = stack.pop()
        if depth > max_depth:
            raise errors.bad_request(f"The request body is nested deeper than {max_depth} levels.", code="invalid_json")
        if isinstance(node, dict):
            for key, value in node.items():
                if key in _MEDIA_KEYS:
                    _media(key, value)
                elif key == "url" and node.get("type") == "url":
                    raise _remote("source.url")
                if isinstance(value, dict | list):
                    stack.append((value, depth + 1))
        elif not _NESTED.isdisjoint(map(_KIND, node)):  # C code scans millions of token ids
            stack.extend((value, depth + 1) for value in node if isinstance(value, dict | list))


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
