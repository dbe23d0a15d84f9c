"""Names of the checks, and the error for an option that makes no sense."""

from __future__ import annotations

from typing import Literal, get_args

CheckName = Literal["bad_lines", "empty", "duplicates", "near_duplicates", "too_long", "contaminated", "personal_data"]
CHECKS: tuple[CheckName, ...] = get_args(CheckName)
"""In the order of a report."""


class BadOption(ValueError):
    """An option that makes no sense; the text is shown."""
