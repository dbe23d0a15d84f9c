"""The conversion of a GGUF file, in a process of its own.

The process prints one JSON object per line: its progress, and at the end {"event": "done", …}. It dies with the caller.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from appliance.models.errors import NotEnoughMemory
from runtime.processes.ended import how_it_ended
from weights.checkpoint.errors import CheckpointRefused

Report = Callable[[float, float | None, str, str], None]


class MakerFailed(Exception):
    """The process ended without a result; the text has its exit status and the end of what it wrote to stderr."""


def convert_gguf(file: Path, out: Path, report: Report) -> dict[str, Any]:
    """Writes the model in `file` as a checkpoint directory into the new directory `out`; returns what the file says of
    itself. Raises CheckpointRefused, NotEnoughMemory."""

    def on_event(event: dict[str, Any]) -> None:
        report(event["done"], event["total"], "tensors", "dequantising")

    report(0, None, "", f"reading {file.name}")
    try:
        result = _run("train.convert.gguf", [str(file), str(out)], on_event)
    except MakerFailed as error:
        raise CheckpointRefused(file.name, f"its conversion {error}") from None
    if "refused" in result:
        raise CheckpointRefused(file.name, result["refused"])
    if "needed_bytes" in result:
        raise NotEnoughMemory(file.name, result["needed_bytes"], result["available_bytes"])
    return result


def _run(module: str, options: Sequence[str], on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    result = None
    # Threads that wait for each other sleep. When they spun, two took three times the processor time of one for the
    # same steps, from whoever else is at work on the box.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *options],
            # A library that asks whether to run a model's own code gets no answer.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event.pop("event") == "done":
                    result = event
                else:
                    on_event(event)
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        if process.returncode != 0 or result is None:
            said = errors.read().strip()[-1000:]
            raise MakerFailed(how_it_ended(process.returncode) + (f": {said}" if said else ""))
    return result
