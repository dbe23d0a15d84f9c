"""Has a checkpoint compared with what transformers makes of it: `train.convert.checkpoint_trial`, which says how."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.models.trial_process import TrialFailed, TrialProcess
from weights.checkpoint.errors import NotACheckpoint

WALL_S = 3600.0


class Trial:
    def __init__(self, process: TrialProcess):
        self._process = process

    def result(self, directory: Path, arch: str) -> Mapping[str, Any]:
        """What the comparison says of the checkpoint in `directory`. Raises NotACheckpoint, TrialEnded."""
        try:
            found = self._process.result(json.dumps({"path": str(directory), "arch": arch}) + "\n", limit_s=WALL_S)
        except TrialFailed as error:
            reason = str(error).splitlines()[-1][:300]
            raise NotACheckpoint(
                "config.json", f"the architecture that it describes cannot be compared with the tensors: {reason}"
            ) from error
        if "unfit" in found:
            raise NotACheckpoint("config.json", found["unfit"])
        return found


@contextmanager
def begun() -> Iterator[Trial]:
    """A trial that ends with the block; it starts before it is needed."""
    with TrialProcess("config.json", "train.convert.checkpoint_trial") as process:
        yield Trial(process)
