"""Files of examples, and checks of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from train.data_checks.check import Check
from train.data_checks.process import CHECKS, report_on


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def repeats(path: Path) -> dict[int, int]:
    """By the index of each (near) duplicate that of the example before it."""
    check = Check(CHECKS)
    with patch("train.data_checks.check._MOST_SHOWN", 10**6):
        check.report(path, "")
    found = [one for name in ("duplicates", "near_duplicates") for one in check.found[name].first]
    return {one["line"] - 1: one["of"] - 1 for one in found}


def checked(path: Path, **options: Any) -> dict[str, Any]:
    return report_on(path, str(path), **options)
