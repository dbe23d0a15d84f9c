"""Files of examples, and scans of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.data_checks.options import CheckOptions
from train.data_checks.process import carried_out
from train.data_checks.scan import Scan
from train.methods.methods import convert


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def scanned(path: Path, **options: Any) -> Scan:
    scan = Scan(CheckOptions(**options), convert, None, None)
    scan.read(path)
    scan.compare()
    return scan


def checked(*paths: Path, **options: Any) -> dict[str, Any]:
    return carried_out({"files": list(map(str, paths)), "check": {key: _plain(v) for key, v in options.items()}})


def prepared(*paths: Path, out: Path, check: dict[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    return carried_out(
        {
            "files": list(map(str, paths)),
            "check": {key: _plain(value) for key, value in (check or {}).items()},
            "prepare": asked,
            "target": str(out),
            "validation": str(out.with_suffix(".valid.jsonl")) if "split" in asked else None,
            "lineage": str(out.with_suffix(".lineage.json")),
        }
    )


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
