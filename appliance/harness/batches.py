"""Requests whose answers somebody waits for, answered by the box as a batch: while its engines are idle."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from appliance.cli import output, paths
from appliance.cli.client import Client
from appliance.cli.errors import CliError, CommandFailed, Unreachable

LINES = 20_000
"""Of one batch. The box takes 50,000."""
LOOK_EVERY_S = 1.0
AWAY_S = 300.0
"""A box that restarts is waited for this long."""
_GOES_ON = frozenset({"validating", "in_progress", "finalizing"})
_PINNED = re.compile(r"@v\d+$")


class Batches:
    """Asks a box. A batch of the same lines that is on its way is not made twice, nor one whose model is a version: a
    command that was ended goes on where it was. What a name answered before may be another version's answer."""

    def __init__(self, client: Client, look_every_s: float = LOOK_EVERY_S):
        self._client, self._look_every_s = client, look_every_s

    def answers(self, url: str, bodies: Sequence[dict[str, Any]], about: str) -> list[dict[str, Any]]:
        """The body of each answer, in the order of the requests. about: for the line of progress.

        Raises CommandFailed if a line was not answered, or the batch came to no good end; CliError.
        """
        found: list[dict[str, Any]] = []
        for first in range(0, len(bodies), LINES):
            found += self._answered(url, bodies[first : first + LINES], about)
        return found

    def _answered(self, url: str, bodies: Sequence[dict[str, Any]], about: str) -> list[dict[str, Any]]:
        lines = [
            json.dumps({"custom_id": str(n), "method": "POST", "url": url, "body": body})
            for n, body in enumerate(bodies)
        ]
        content = "\n".join(lines) + "\n"
        name = hashlib.sha256(content.encode()).hexdigest()
        pinned = all(_PINNED.search(body["model"]) for body in bodies)
        batch = self._earlier(name, pinned) or self._made(url, content, name, about)
        batch = self._ended(batch, about)
        if batch["status"] != "completed":
            errors = (batch.get("errors") or {}).get("data") or [{"message": "no reason given"}]
            raise CommandFailed(f"{batch['id']} is {batch['status']}: {errors[0]['message']}")
        if batch["request_counts"]["failed"]:
            error = self._rows(batch["error_file_id"])[0]
            reason = error["error"] or error["response"]["body"]["error"]
            raise CommandFailed(
                f"{batch['request_counts']['failed']} of {len(bodies)} requests of {batch['id']} were not answered; "
                f"the first: {reason['message']}"
            )
        by_id = {row["custom_id"]: row["response"]["body"] for row in self._rows(batch["output_file_id"])}
        return [by_id[str(n)] for n in range(len(bodies))]

    def _earlier(self, name: str, done_too: bool) -> dict[str, Any] | None:
        """A batch of the same lines that is on its way, or also one that is done."""
        wanted = {*_GOES_ON, "completed"} if done_too else _GOES_ON
        for batch in self._client.listed("/v1/batches", most=1000)["data"]:
            same = (batch["metadata"] or {}).get("harness") == name
            if same and batch["status"] in wanted and not batch["request_counts"]["failed"]:
                return dict(batch)
        return None

    def _made(self, url: str, content: str, name: str, about: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "harness.jsonl"
            path.write_text(content)
            output.say(f"{about}: sending {content.count(chr(10)):,} requests as a batch")
            file_id = self._client.upload(path, "batch", lambda piece: None)["id"]
        body = {
            "input_file_id": file_id,
            "endpoint": url,
            "completion_window": "24h",
            "metadata": {"harness": name, "about": about[:512]},
        }
        try:
            return dict(self._client.post("/v1/batches", body))
        except Unreachable:  # it may have been taken
            raise
        except CliError:
            with suppress(CliError):  # the first error is the one to tell
                self._client.delete(paths.file(file_id))
            raise

    def _ended(self, batch: dict[str, Any], about: str) -> dict[str, Any]:
        away_since_s: float | None = None
        with output.progress(batch["id"]) as meter:
            while batch["status"] in _GOES_ON:
                counts = batch["request_counts"]
                waits = f", waits: {batch['waiting_for']}" if batch.get("waiting_for") else ""
                done = counts["completed"] + counts["failed"]
                meter.update(f"{about} ({batch['id']}{waits})", done=done, total=counts["total"] or None)
                time.sleep(self._look_every_s)
                try:
                    batch = self._client.get(paths.batch(batch["id"]))
                    away_since_s = None
                except Unreachable:
                    now_s = time.monotonic()
                    away_since_s = now_s if away_since_s is None else away_since_s
                    if now_s - away_since_s > AWAY_S:
                        raise
        return batch

    def _rows(self, file_id: str) -> list[dict[str, Any]]:
        with tempfile.TemporaryFile() as out:
            self._client.download(f"{paths.file(file_id)}/content", out)
            out.seek(0)
            return [json.loads(line) for line in out if line.strip()]
