"""The pretraining of the small model `starter`, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from appliance.models.errors import StarterFailed


def run(out: Path, minutes: float, report: Callable[[float, float | None, str, str], None]) -> dict[str, Any]:
    """Makes a checkpoint in the new directory `out` and passes progress on; returns what the pretraining says of it.
    The process dies with this call. Raises StarterFailed."""
    vocabulary = resources.files("appliance") / "demo_data" / "gsm8k_train.jsonl"
    options = ["--out", str(out), "--minutes", str(minutes), "--vocabulary-text", str(vocabulary), "--die-with-parent"]
    command = [sys.executable, "-m", "train.starter.main", *options]
    result = None
    # Threads that wait for each other sleep. When they spun, two took three times the processor time of one for the
    # same steps, from whoever else is at work on the box.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = json.loads(line)
                if event.pop("event") == "done":
                    result = event
                else:
                    report(event["fraction"], 1.0, "fraction", _message(event))
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        if process.returncode != 0 or result is None:
            raise StarterFailed(f"pretraining ended with code {process.returncode}: {errors.read().strip()[-1000:]}")
    return {key: value for key, value in result.items() if key != "path"}


def _message(event: Mapping[str, Any]) -> str:
    if "loss" in event:
        return f"pretraining: step {event['step']}, loss {event['loss']:.2f}, {event['tokens_per_s']} tokens/s"
    return {"tokenizer": "making the vocabulary", "threads": "beginning to pretrain", "save": "saving"}[event["stage"]]
