"""Tries a foreign tokenizer in a process that can be killed: `train.convert.tokenizer_trial`, which says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from appliance.models.errors import ENDED, TrialEnded
from train.convert.tokenizer_trial import CPU_S, MEMORY_BYTES
from weights.checkpoint.errors import TokenizerRefused
from weights.format.names import VOCABULARIES

WALL_S = 600.0
TOKENIZER_FILE = "tokenizer.json"


def try_tokenizer(directory: Path) -> None:
    """Read some texts by the tokenizer in `directory`, in a child process: by its tokenizer.json, and, where it has
    other vocabularies too or none but such, as transformers loads it. Raises TokenizerRefused for one that exceeds the
    limits, and for one without tokenizer.json that cannot be loaded."""
    found = [name for names in VOCABULARIES for name in names if (directory / name).is_file()]
    if TOKENIZER_FILE in found:
        _try(directory / TOKENIZER_FILE, TOKENIZER_FILE)
        found.remove(TOKENIZER_FILE)
    if found:
        _try(directory, found[0])


def _try(path: Path, name: str) -> None:
    command = [sys.executable, "-P", "-m", "train.convert.tokenizer_trial", str(path)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    limits = f"{CPU_S} s of CPU or {MEMORY_BYTES >> 30} GiB of memory"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=WALL_S
        )
        refused = json.loads(done.stdout.splitlines()[-1])["refused"]
    except subprocess.TimeoutExpired as error:
        raise TrialEnded(name, f"reading short texts took more than {WALL_S:.0f} s: try again") from error
    except (IndexError, ValueError) as error:
        if done.returncode == -signal.SIGKILL:
            raise TrialEnded(name, ENDED) from error
        raise TokenizerRefused(name, f"reading short texts took more than {limits}, or ended its process") from error
    if refused:
        raise TokenizerRefused(name, refused)
