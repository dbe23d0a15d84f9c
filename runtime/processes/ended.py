"""Describes how a process ended, and runs a command to its end."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess


def how_it_ended(status: int) -> str:
    """Completes "the process …". status: as subprocess has it, negative for a signal.

    A kill is said to be for memory most likely: nothing in the box kills such a process, and the kernel leaves no other
    trace of it where we can read. "ended with code -9" sent people looking for a fault of the program.
    """
    if status == -signal.SIGKILL:
        return (
            "was killed (SIGKILL), most likely by the kernel for want of memory: `appliance doctor` says who has it; "
            "try again"
        )
    if status == -signal.SIGILL:
        return "was ended by SIGILL, by an instruction that this machine refuses: `appliance doctor` has its features"
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def status_of(process: BaseProcess) -> int:
    """The status of a child whose sentinel is ready. That is so a moment before it can be reaped."""
    while (status := process.exitcode) is None:
        time.sleep(0.001)
    return status


async def run_command(
    *command: str, within_s: float | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, bytes, bytes]:
    """Run a command, and return its exit status, output and errors. It is killed if it does not end in time, or if this
    is cancelled. Raises TimeoutError."""
    null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=null, stdout=pipe, stderr=pipe, env=env)
    try:
        async with asyncio.timeout(within_s):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return int(process.returncode or 0), output, errors
