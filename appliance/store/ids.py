"""Identifiers as OpenAI writes them: a prefix that tells the kind, then random letters and digits."""

from __future__ import annotations

import secrets
import string

_ALPHABET = string.ascii_letters + string.digits
_RANDOM_LENGTH = 24  # 142 bits


def new_id(prefix: str, length: int = _RANDOM_LENGTH) -> str:
    """For example `new_id("file-")` -> "file-9mWkQz…"; `length` random characters of 62 kinds each."""
    return prefix + "".join(secrets.choice(_ALPHABET) for _ in range(length))
