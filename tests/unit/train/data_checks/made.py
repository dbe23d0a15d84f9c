"""Files of examples, and checks of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.data_checks.check import Check
from train.data_checks.process import carried_out
from train.methods.methods import convert


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def read(path: Path) -> Check:
    check = Check(convert)
    check.read(path)
    return check


def checked(path: Path, **options: Any) -> dict[str, Any]:
    return carried_out({"file": str(path), "check": {name: _plain(value) for name, value in options.items()}})


def prepared(
    path: Path, *, out: Path, drop: tuple[str, ...] = (), mask: bool = False, split: float | None = None
) -> dict[str, Any]:
    return carried_out(
        {
            "file": str(path),
            "check": {},
            "prepare": {"drop": drop, "mask": mask, "split": split},
            "targets": [str(out), *([str(out.with_suffix(".valid.jsonl"))] if split is not None else [])],
            "lineage": str(out.with_suffix(".lineage.json")),
        }
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
