"""Files of examples, and checks of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from train.data_checks.check import Check
from train.data_checks.process import CHECKS, carried_out


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
    return carried_out({"file": str(path), "check": {name: _plain(value) for name, value in options.items()}})


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
