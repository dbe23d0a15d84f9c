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


class Answers:
    """Create it and call `append` on a thread. custom_ids: of the answered lines. Raises OSError."""

    def __init__(self, folder: Path, batch_id: str):
        self.output_path, self.error_path = (folder / f"{batch_id}.{kind}.jsonl" for kind in ("output", "error"))
        self.custom_ids: set[str] = set()
        self.completed = self.failed = 0
        self._usage = Counter[str]()
        self._lock = threading.Lock()
        self._output, self._error = self._opened(self.output_path), self._opened(self.error_path)

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Each {"id", "custom_id", "response", "error"}; synced on return. Skips lines that exist already. Raises
        OSError; no partial line remains then, and the caller may pass the same lines again."""
        with self._lock:
            if self._output < 0:
                return  # the controller is ending: these lines are asked again
            new = {line["custom_id"]: line for line in lines if line["custom_id"] not in self.custom_ids}
            for handle, good in ((self._output, True), (self._error, False)):
                mine = [line for line in new.values() if _is_good(line) is good]
                if mine:
                    _write_all(handle, b"".join(orjson.dumps(line) + b"\n" for line in mine))
                for line in mine:  # now: if the other file has no room, these are not written twice
                    self._count(line)

    def close(self) -> None:
        """Waits for a write in progress."""
        with self._lock:
            for handle in (self._output, self._error):
                if handle >= 0:
                    os.close(handle)
            self._output = self._error = -1

    def remove(self) -> None:
        for path in (self.output_path, self.error_path):
            path.unlink(missing_ok=True)

    def usage_object(self) -> dict[str, Any]:
        """The usage object of the API, over the lines that succeeded."""
        used = self._usage
        return {
            "input_tokens": used["input_tokens"],
            "input_tokens_details": {"cached_tokens": used["cached_tokens"]},
            "output_tokens": used["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": used["reasoning_tokens"]},
            "total_tokens": used["total_tokens"],
        }

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
        self._usage.update(_tokens_of(line["response"]["body"]))


_COUNTED = {
    "prompt_tokens": "input_tokens",
    "completion_tokens": "output_tokens",
    **{name: name for name in ("input_tokens", "output_tokens", "total_tokens", "cached_tokens", "reasoning_tokens")},
}
"""Names of counters, as chat completions and responses have them."""


def _tokens_of(body: Any) -> dict[str, int]:
    """The token usage that an answer reports, whichever endpoint it came from."""
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return {}
    details = [usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion", "input", "output")]
    counters = {name: tokens for part in (usage, *details) for name, tokens in part.items()}
    return {ours: counters[name] for name, ours in _COUNTED.items() if isinstance(counters.get(name), int)}


def _is_good(line: dict[str, Any]) -> bool:
    response = line["response"]
    return response is not None and response["status_code"] == 200


def _write_all(handle: int, data: bytes) -> None:
    """Write all of it, synced, or nothing: half a line on a full disk would be joined to the next one."""
    before, view = os.fstat(handle).st_size, memoryview(data)
    try:
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, before)
        raise
