"""Has a checkpoint compared with what transformers makes of it, in a process that can be killed.

`train.convert.checkpoint_trial` says what is compared. The process is started before it is needed, because its imports
take seconds.
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


class Trial:
    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def result(self, directory: Path, arch: str) -> Mapping[str, Any]:
        """What the comparison says of the checkpoint in `directory`. Raises NotACheckpoint, TrialEnded."""
        asked = json.dumps({"path": str(directory), "arch": arch})
        try:
            said, errors = self._process.communicate(asked + "\n", timeout=WALL_S)
            found = json.loads(said.splitlines()[-1])
        except subprocess.TimeoutExpired as error:
            why = f"comparing tensors took more than {WALL_S:.0f} s: try again"
            raise TrialEnded("config.json", why) from error
        except (IndexError, ValueError) as error:
            if self._process.returncode == -signal.SIGKILL:
                raise TrialEnded("config.json", ENDED) from error
            reason = (errors.strip().splitlines() or ["it gave no reason"])[-1][:300]
            why = f"the architecture that it describes cannot be compared with the tensors: {reason}"
            raise NotACheckpoint("config.json", why) from error
        if "unfit" in found:
            raise NotACheckpoint("config.json", found["unfit"])
        return found


@contextmanager
def begun() -> Iterator[Trial]:
    """A trial that ends with the block."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-m", MODULE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield Trial(process)
        finally:
            process.kill()
