"""Sends requests whose answers somebody waits for to the box as a batch, which it answers while its engines are
idle."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from appliance.cli import output
from appliance.cli.command import Session
from appliance.cli.errors import CommandFailed
from appliance.cli.jobs.batch import begin, begun_before, refuse_unfinished, rows, wait_for_end

LINES = 20_000
"""Requests of one batch. The box takes up to 50,000."""
METADATA = "harness"
_PINNED = re.compile(r"@v\d+$")


class Batches:
    """Asks a box. It makes no second batch of lines that a batch under way has, nor of lines that a version of a model
    has answered, so a command that was ended goes on where it was. Answers of a mere name are not used again: they may
    be of another version."""

    def __init__(self, session: Session):
        self._session = session

    def answers(self, url: str, bodies: Sequence[dict[str, Any]], about: str) -> list[dict[str, Any]]:
        """Returns the body of each answer, in the order of the requests. about: what is asked, for the person who
        waits.

        Raises CommandFailed if a line was not answered or the batch failed, and CliError.
        """
        found: list[dict[str, Any]] = []
        for first in range(0, len(bodies), LINES):
            found += self._answered(url, bodies[first : first + LINES], about)
        return found

    def _answered(self, url: str, bodies: Sequence[dict[str, Any]], about: str) -> list[dict[str, Any]]:
        key = hashlib.sha256(json.dumps([url, bodies]).encode()).hexdigest()
        pinned = all(_PINNED.search(body["model"]) for body in bodies)
        batch = begun_before(self._session, METADATA, key, done_too=pinned)
        if batch is None or batch["request_counts"]["failed"]:
            output.say(f"{about}: {len(bodies):,} requests go as a batch")
            questions = ((str(n), body) for n, body in enumerate(bodies))
            batch = begin(self._session, url, questions, METADATA, key)
        batch = wait_for_end(self._session, batch, None)
        refuse_unfinished(batch)
        if failed := batch["request_counts"]["failed"]:
            error = next(rows(self._session, batch["error_file_id"]))
            reason = error["error"] or error["response"]["body"]["error"]
            raise CommandFailed(
                f"{failed} of {len(bodies)} requests of {batch['id']} were not answered; the first: {reason['message']}"
            )
        by_id = {row["custom_id"]: row["response"]["body"] for row in rows(self._session, batch["output_file_id"])}
        return [by_id[str(n)] for n in range(len(bodies))]
