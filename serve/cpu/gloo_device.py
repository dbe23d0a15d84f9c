"""Gives all process groups of a process one shared gloo device on loopback.

By default gloo listens on the address of the machine's host name, even in an engine of one process, and accepts any
connection. An engine runs on one node, so loopback suffices.

torch gives each group its own device, with a thread that wakes a hundred times a second. The eight groups of an idle
engine, asleep or not, used 1.8 % of a core; with one device they use 0.3 %.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d


class OfOneDevice(ProcessGroupGloo):
    """Create a group on the process's one device. Takes the arguments that torch passes to `ProcessGroupGloo`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
        options = ProcessGroupGloo._Options()
        options._devices = [_device(os.getpid())]
        options._timeout = timeout
        super().__init__(store, rank, size, options)


def apply() -> None:
    """Call before the process, or a process forked from it, creates its first group."""
    distributed_c10d.ProcessGroupGloo = OfOneDevice


@cache
def _device(pid: int) -> Any:
    """Cached per process, because the device's thread does not survive a fork."""
    return ProcessGroupGloo.create_device(hostname="127.0.0.1")
