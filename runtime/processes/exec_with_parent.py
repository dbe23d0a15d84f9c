"""Runs a command that ends with its parent process, for parents that are not our code.

    python -S exec_with_parent.py COMMAND...

Start it by path and without site-packages; it imports nothing of this project, so it costs a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = os.getppid()
    # The kernel forgets the request after a fork, but not after an exec (prctl(2)).
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() == parent:
        os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
