"""Runs `train.data.check` of a large file in its own process: `python -m train.methods.check_process METHOD FILE
[CHAT_FILE]`, METHOD being `-` as long as no job says which.

JSON parsing and bracket matching block all other threads of a process: for most of a second with one 16 MiB example.
This process prints the report as JSON, runs at low priority, ends with its parent, and is killed beyond its CPU and
memory limits.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from runtime.processes.kernel import die_with_parent
from train.data.check import DataReport, check_training_file
from train.methods.methods import convert, method_of

# An 8 GiB file of chats takes some minutes of CPU.
CPU_S, MEMORY_BYTES = 3600, 4 << 30
_NICENESS = 10
ANY = "-"


def check_apart(path: Path, chat_path: Path | None = None, method: str = ANY) -> DataReport:
    """As `check_training_file` with the method's conversion, or that of all methods. A file that takes more than
    the limits is a bad one. Raises OSError."""
    chat = [str(chat_path)] if chat_path else []
    command = [sys.executable, "-m", "train.methods.check_process", method, str(path), *chat]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)
        return DataReport(**{**found, "errors": [(line, reason) for line, reason in found["errors"]]})
    except (ValueError, TypeError, KeyError):
        if not path.exists():
            raise FileNotFoundError(f"{path} was deleted while it was checked") from None
        report = DataReport()
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        limits = f"{CPU_S} s of CPU and {MEMORY_BYTES >> 30} GiB of memory"
        report.add_error(1, f"the file could not be checked with {limits} (the check ended with {how})")
        return report


def main() -> None:
    die_with_parent()
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))  # not AS: a large array is mapped whole
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    method, path, *chat = sys.argv[1:]
    how = convert if method == ANY else method_of(method).convert
    print(json.dumps(asdict(check_training_file(path, chat_path=chat[0] if chat else None, convert=how))))


if __name__ == "__main__":
    main()
