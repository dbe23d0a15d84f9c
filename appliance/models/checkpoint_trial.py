"""Has a checkpoint compared with what transformers makes of it, in a process that can be killed.

`train.convert.checkpoint_trial` says what is compared.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.models.errors import ENDED, TrialEnded
from weights.checkpoint.errors import NotACheckpoint

WALL_S = 3600.0
MODULE = "train.convert.checkpoint_trial"


class CheckpointTrial:
    """A process that has begun to import what the comparison needs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, directory: Path, arch: str) -> Mapping[str, Any]:
        """What the process says of the checkpoint in `directory`. Raises NotACheckpoint, TrialEnded."""
        asked = json.dumps({"path": str(directory), "arch": arch})
        try:
            said, errors = self._process.communicate(asked + "\n", timeout=WALL_S)
            found = json.loads(said.splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            raise TrialEnded(
                "config.json", f"comparing its tensors took more than {WALL_S:.0f} s: try again"
            ) from error
        except (IndexError, ValueError) as error:
            if self._process.returncode == -signal.SIGKILL:
                raise TrialEnded("config.json", ENDED) from error
            last = (errors.strip().splitlines() or ["it gave no reason"])[-1]
            raise NotACheckpoint(
                "config.json", f"the architecture that it describes cannot be compared with the tensors: {last[:300]}"
            ) from error
        if "unfit" in found:
            raise NotACheckpoint("config.json", found["unfit"])
        return found

    def end(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def begun() -> Iterator[CheckpointTrial]:
    """A trial that ends with the block."""
    trial = CheckpointTrial()
    try:
        yield trial
    finally:
        trial.end()
