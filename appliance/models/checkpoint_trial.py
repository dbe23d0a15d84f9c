"""Has a checkpoint compared with what transformers makes of it, in a process that can be killed.

`train.convert.checkpoint_trial` says what is compared. On a box the process is forked by the warm parent of training,
which has its imports; elsewhere it is started before it is needed, because they take seconds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from appliance.models.errors import ENDED, TrialEnded
from runtime.errors import WarmParentError
from runtime.processes.child import Child
from weights.checkpoint.errors import NotACheckpoint

WALL_S = 3600.0
MODULE = "train.convert.checkpoint_trial"


@dataclass(frozen=True)
class WarmParent:
    """Where the warm parent of training listens, and where its children log."""

    socket: str
    log_path: Path


class Trial(Protocol):
    def result(self, directory: Path, arch: str) -> Mapping[str, Any]:
        """What the comparison says of the checkpoint in `directory`. Raises NotACheckpoint, TrialEnded."""


@contextmanager
def begun(warm: WarmParent | None) -> Iterator[Trial]:
    """A trial that ends with the block."""
    if warm is not None:
        yield _Forked(warm)
        return
    started = _Started()
    try:
        yield started
    finally:
        started.end()


class _Forked:
    def __init__(self, warm: WarmParent):
        self._warm = warm

    def result(self, directory: Path, arch: str) -> Mapping[str, Any]:
        try:
            event, how = asyncio.run(self._ask({"path": str(directory), "arch": arch}))
        except WarmParentError:  # it is being started again
            with begun(None) as other:
                return other.result(directory, arch)
        except TimeoutError as error:
            raise _late() from error
        if event is None:
            raise TrialEnded("config.json", f"the process that compares its tensors {how}")
        if event["event"] != "compared":
            raise _failed(str(event.get("message")))
        return _fit(event["found"])

    async def _ask(self, args: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        name = f"checkpoint-{uuid.uuid4().hex[:8]}"
        child = await Child.spawn(self._warm.socket, f"{MODULE}:forked", args, log_path=self._warm.log_path, name=name)
        how = ""
        try:
            async with asyncio.timeout(WALL_S):
                event = await child.next_event()
        finally:
            await child.kill_and_wait()
        if event is None:
            how = await child.how_it_ended()
        return event, how


class _Started:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, directory: Path, arch: str) -> Mapping[str, Any]:
        asked = json.dumps({"path": str(directory), "arch": arch})
        try:
            said, errors = self._process.communicate(asked + "\n", timeout=WALL_S)
            found = json.loads(said.splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            raise _late() from error
        except (IndexError, ValueError) as error:
            if self._process.returncode == -signal.SIGKILL:
                raise TrialEnded("config.json", ENDED) from error
            raise _failed((errors.strip().splitlines() or ["it gave no reason"])[-1]) from error
        return _fit(found)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _fit(found: Mapping[str, Any]) -> Mapping[str, Any]:
    if "unfit" in found:
        raise NotACheckpoint("config.json", found["unfit"])
    return found


def _late() -> TrialEnded:
    return TrialEnded("config.json", f"comparing tensors took more than {WALL_S:.0f} s: try again")


def _failed(reason: str) -> NotACheckpoint:
    return NotACheckpoint(
        "config.json", f"the architecture that it describes cannot be compared with the tensors: {reason[:300]}"
    )
