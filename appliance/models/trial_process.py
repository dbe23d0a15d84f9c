"""A trial of foreign files in a process of its own, which can be killed: a module of ours that prints JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from appliance.models.errors import TrialEnded
from runtime.processes.ended import how_it_ended

ENDED = "its trial was ended from outside, as the kernel does where memory is short: try again"


class TrialFailed(Exception):
    """The process ended without a result; the text is the end of what it wrote to stderr, or how it ended."""


class TrialProcess:
    """Started at once, because imports take seconds. subject: the file that a refusal names."""

    def __init__(self, subject: str, module: str, *options: str):
        self._subject, self._errors = subject, tempfile.TemporaryFile("w+")
        # Threads that wait for each other sleep: when they spin, they take their time from whoever else is at work.
        quiet = {"OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **quiet, "RUST_BACKTRACE": "0"},
        )

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def result(self, given: str = "", *, limit_s: float) -> dict[str, Any]:
        """The JSON in the last line that it prints. given: for its standard input. Raises TrialEnded, TrialFailed."""
        try:
            said, _ = self._process.communicate(given, timeout=limit_s)
            return json.loads(said.splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            raise TrialEnded(self._subject, f"its trial took more than {limit_s:.0f} s: try again") from error
        except (IndexError, ValueError) as error:
            raise self._failure() from error

    def events(self, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Reads JSON by lines up to the event "done", which is the result. Raises TrialEnded, TrialFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # a library that asks whether to run a model's own code gets no answer
        self._process.stdin = None
        for line in self._process.stdout:
            event = json.loads(line)
            if event.pop("event") == "done":
                return event
            on_event(event)
        self._process.wait()
        raise self._failure()

    def _failure(self) -> Exception:
        self._errors.seek(0)
        said, code = self._errors.read().strip()[-1000:], self._process.returncode
        if code == -signal.SIGKILL:
            return TrialEnded(self._subject, ENDED)
        return TrialFailed(how_it_ended(code) + (f": {said}" if said else ""))
