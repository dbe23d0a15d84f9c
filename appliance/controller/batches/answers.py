"""Stores the answered lines of one batch on disk: each exactly once, and durable against kill -9.

`<folder>/<batch id>.output.jsonl` and `.error.jsonl` are appended to and synced before a line counts as answered. A
crash can leave one torn line at the end, which opening cuts off. When the batch ends, they become files of the box.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

_TOKENS = ("input_tokens", "output_tokens", "total_tokens", "cached_tokens", "reasoning_tokens")
_RENAMED = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
"""Counters of chat completions."""


class Answers:
    """Create it and call `append` on a thread; after an OSError open them anew. custom_ids: of the answered lines.
    tokens: of those that succeeded. paths: of "output" and "error". Raises OSError."""

    def __init__(self, folder: Path, batch_id: str):
        self.paths = {name: folder / f"{batch_id}.{name}.jsonl" for name in ("output", "error")}
        self.custom_ids: set[str] = set()
        self.completed = self.failed = 0
        self.tokens = Counter[str]()
        self._lock = threading.Lock()
        self._handles = {name: self._opened(path) for name, path in self.paths.items()}  # empty once it is closed

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Each {"id", "custom_id", "response", "error"}; synced on return. One that is answered already is left out: a
        write goes on where its batch was cancelled or expired meanwhile. Raises OSError."""
        with self._lock:
            lines = [line for line in lines if line["custom_id"] not in self.custom_ids]
            for name, handle in self._handles.items():
                mine = [line for line in lines if _is_good(line) == (name == "output")]
                data = memoryview(b"".join(orjson.dumps(line) + b"\n" for line in mine))
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
                for line in mine:
                    self._count(line)

    def close(self) -> None:
        """Waits for a write in progress."""
        with self._lock:
            for handle in self._handles.values():
                os.close(handle)
            self._handles = {}

    def remove(self) -> None:
        for path in self.paths.values():
            path.unlink(missing_ok=True)

    def _opened(self, path: Path) -> int:
        """Count the answers that exist already, and cut off a torn one."""
        handle, whole = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), 0
        with open(path, "rb") as source:
            for line in source:
                if line.endswith(b"\n"):
                    self._count(orjson.loads(line))
                    whole += len(line)
        os.ftruncate(handle, whole)
        return handle

    def _count(self, line: dict[str, Any]) -> None:
        self.custom_ids.add(line["custom_id"])
        if not _is_good(line):
            self.failed += 1
            return
        self.completed += 1
        self.tokens.update(_usage_of(line["response"]["body"]))


def _usage_of(body: Any) -> dict[str, int]:
    """The tokens that an answer reports, by the names of /v1/responses."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return {}
    details = [usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion", "input", "output")]
    counted = {_RENAMED.get(name, name): tokens for part in (usage, *details) for name, tokens in part.items()}
    return {name: counted.get(name) or 0 for name in _TOKENS}


def _is_good(line: dict[str, Any]) -> bool:
    response = line["response"]
    return response is not None and response["status_code"] == 200
