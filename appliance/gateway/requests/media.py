"""Finds the images and sounds of a body: refuses those that would have to be fetched, counts the others. Pure.

A file's size in bytes says nothing of its tokens: vision models resize large images. The real usage is charged when the
engine reports it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from appliance.gateway.core import errors

# Where a URL may be in a message: OpenAI's and vLLM's short forms, and what engines take instead of one.
_URLS: Final = frozenset("image_url video_url audio_url file_url image_embeds audio_embeds image_pil".split())
_INLINE: Final = re.compile(r"data:(image|audio)/[a-z0-9.+-]{1,40}(?:;[a-z0-9=.+-]{1,40}){0,4},", re.IGNORECASE)
_IMAGE_TOKENS: Final = 1_024
_SOUND_CHARS: Final = 1_700
"""Of base64 per token: speech encoders make some 25 tokens of a second, which has 32,000 bytes."""


def media_in(prompts: Any) -> tuple[int, int]:
    """Characters of base64 in messages, items or prompts, and tokens that a model makes of them. Raises HttpError 400
    for media that are not inline, and for parts that name what an engine keeps of media."""
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


def _remote(param: str) -> errors.HttpError:
    return errors.bad_request(
        f"`{param}`: only inline images and audio (data:image/…, data:audio/…) are accepted; "
        "this server fetches nothing, opens no files and decodes no video.",
        param=param,
        code="remote_media_refused",
    )
