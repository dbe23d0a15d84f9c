"""How a process ended, in words for people."""

from __future__ import annotations

import signal


def how_it_ended(status: int) -> str:
    """Completes "the process …". status: as subprocess has it, negative for a signal.

    A kill is said to be for memory most likely: nothing in the box kills such a process, and the kernel leaves no other
    trace of it where we can read. "ended with code -9" sent people looking for a fault of the program.
    """
    if status == -signal.SIGKILL:
        return "was killed, most likely by the kernel for want of memory: `appliance doctor` says who has it; try again"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"
