"""Work of ours that a command has done in a process of its own."""

from __future__ import annotations

import sys


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of ours in a process of its own: importing it would take longer than all else."""
    # -P: a folder here that is called `train` or `serve` must not hide ours.
    return [sys.executable, "-P", "-m", module, *arguments]
