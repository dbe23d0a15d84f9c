"""Estimates how many tokens a model makes of the images and sounds in a body, whose size in bytes says nothing of it.

Vision models cut an image into patches of some 28 × 28 pixels after resizing large ones. The real usage is charged when
the engine reports it.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any, Final

PATCH_PIXELS: Final = 28 * 28
MOST_IMAGE_TOKENS: Final = 16_384
UNKNOWN_IMAGE_TOKENS: Final = 1_024
"""For an image of unreadable size."""
SOUND_BYTES: Final = 1_280
"""Per token: speech encoders make some 25 tokens of a second, which has 32,000 bytes."""
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HEAD_CHARS: Final = 64 * 1024
_BASE64_BYTES: Final = 3 / 4


def media_in(root: Any) -> tuple[int, int]:
    """Characters of base64 in a body, and tokens that a model makes of them."""
    chars, tokens = 0, 0
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(one for one in node if isinstance(one, dict | list))
        elif isinstance(node, dict):
            for name, value in node.items():
                if isinstance(value, dict | list):
                    stack.append(value)
                elif isinstance(value, str) and (kind := _kind(node, name, value)):
                    data = value.partition(",")[2] if value.startswith("data:") else value
                    chars += len(data)
                    tokens += image_tokens(data) if kind == "image" else int(len(data) * _BASE64_BYTES / SOUND_BYTES)
    return chars, tokens


def _kind(node: dict[str, Any], name: str, value: str) -> str:
    """ "image", "audio", or empty for a text."""
    if name in ("url", "image_url", "audio_url") and value.startswith(("data:image/", "data:audio/")):
        return value[5:10]
    if name == "data":
        kind = node.get("media_type", node.get("format"))  # Anthropic's source, OpenAI's input_audio
        if node.get("type") == "base64" and isinstance(kind, str) and kind.startswith(("image/", "audio/")):
            return kind[:5]
        return "audio" if "type" not in node and isinstance(node.get("format"), str) else ""
    return ""


def image_tokens(data: str) -> int:
    """data: base64 of the file."""
    from PIL import Image  # for the first image of a gateway

    head = data[:_HEAD_CHARS]
    try:
        # Reads the head alone: nothing is decompressed.
        width, height = Image.open(io.BytesIO(base64.b64decode(head[: len(head) & ~3])), formats=_FORMATS).size
    except (OSError, ValueError, SyntaxError, binascii.Error):
        return UNKNOWN_IMAGE_TOKENS
    return min(MOST_IMAGE_TOKENS, max(1, width * height // PATCH_PIXELS))
