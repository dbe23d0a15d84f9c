"""Sets the order in which the kernel kills processes when memory runs out, through `oom_score_adj`.

A process's score is its share of all memory in thousandths plus this number. The steps are deliberately small: they
only order the box's own processes, and a foreign program that uses a third of the machine still dies before all of
them. The death of what tries somebody's file or code (TRIAL) costs an error; that of a rank costs the job the steps
since its last snapshot; that of a sleeping engine costs a start, of an awake engine its streams, of a supervisor what
it supervises, and of the main process everything.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from pathlib import Path

from runtime.processes.kernel import group_pids

log = logging.getLogger(__name__)


class DiesAs(IntEnum):
    """`oom_score_adj` of each kind of process. The main process keeps the value from its unit or shell."""

    TRIAL = 400
    RANK = 300
    ASLEEP = 250
    ENGINE = 150
    SUPERVISOR = 100
    GATEWAY = 60
    CONTROLLER = 30


def dies_as(kind: DiesAs, pid: int | str = "self") -> bool:
    """Set one process's place in the order. False if the process is gone or the kernel refuses: an unprivileged process
    may not go below a value that a privileged process set."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(int(kind)))
    except OSError as error:
        log.info("cannot set oom_score_adj of process %s to that of %s: %s", pid, kind.name.lower(), error.strerror)
        return False
    return True


def group_dies_as(kind: DiesAs, pgid: int) -> None:
    """`dies_as` for every process of a group; processes that they fork later inherit it."""
    for pid in group_pids(pgid):
        dies_as(kind, pid)


def kills_so_far() -> int:
    """Number of processes, of any user, OOM-killed since boot; 0 if the kernel does not report it."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
