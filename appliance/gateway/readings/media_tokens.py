"""Estimates how many tokens a model makes of the images and sounds in a body, whose size in bytes says nothing of it.

Vision models cut an image into patches of some 28 × 28 pixels after resizing large ones. The real usage is charged when
the engine reports it.
"""

from __future__ import annotations

import base64
import io
from typing import Any, Final

_PATCH_PIXELS: Final = 28 * 28
_MOST_IMAGE_TOKENS: Final = 16_384
UNKNOWN_IMAGE_TOKENS: Final = 1_024
"""For an image of unreadable size."""
_SOUND_CHARS: Final = 1_700
"""Of base64 per token: speech encoders make some 25 tokens of a second, which has 32,000 bytes."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HEAD_CHARS: Final = 64 * 1024


def media_in(root: Any) -> tuple[int, int]:
    """Characters of base64 in a body, and tokens that a model makes of them."""
    chars, tokens = 0, 0
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(one for one in node if isinstance(one, dict | list))
        elif isinstance(node, dict):
            stack.extend(value for value in node.values() if isinstance(value, dict | list))
            kind, data = _medium(node)
            chars += len(data)
            tokens += image_tokens(data) if kind == "image" else len(data) // _SOUND_CHARS
    return chars, tokens


def _medium(node: dict[str, Any]) -> tuple[str, str]:
    """The kind ("image", "audio") and base64 of the medium in a part, both empty without one."""
    for name in ("url", "image_url", "audio_url"):
        url = node.get(name)
        if isinstance(url, str) and url.startswith(("data:image/", "data:audio/")):
            return url[5:10], url.partition(",")[2]
    data, media_type = node.get("data"), node.get("media_type")
    if isinstance(data, str) and isinstance(media_type, str) and media_type[:6] in ("image/", "audio/"):
        return media_type[:5], data  # Anthropic's source
    if isinstance(data, str) and isinstance(node.get("format"), str) and "type" not in node:
        return "audio", data  # OpenAI's input_audio
    return "", ""


def image_tokens(data: str) -> int:
    """data: base64 of the file."""
    from PIL import Image  # for the first image of a gateway

    head = data[:_HEAD_CHARS]
    try:
        # Reads the head alone: nothing is decompressed.
        width, height = Image.open(io.BytesIO(base64.b64decode(head[: len(head) & ~3])), formats=_FORMATS).size
    except (OSError, ValueError, SyntaxError):
        return UNKNOWN_IMAGE_TOKENS
    return min(_MOST_IMAGE_TOKENS, max(1, width * height // _PATCH_PIXELS))
