"""Who dies first when the kernel runs out of memory and kills: its own choice, moved by `oom_score_adj`.

A process's score is its share of all memory in thousandths plus this number. The steps are small on purpose: they order
processes of the box among each other, and a foreign program that took a third of the machine still goes before all of
them. A rank costs a job the steps since its last snapshot, a sleeping engine a start, an awake one its streams, a
supervisor what it supervises, and the main process everything.
"""

from __future__ import annotations

import logging
from enum import IntEnum
from pathlib import Path

from runtime.processes.kernel import group_pids

log = logging.getLogger(__name__)


class DiesAs(IntEnum):
    """`oom_score_adj` by what a process is. The main process stays as its unit or shell made it."""

    RANK = 300
    ASLEEP = 250
    ENGINE = 150
    SUPERVISOR = 100
    GATEWAY = 60
    CONTROLLER = 30


def dies_as(kind: DiesAs, pid: int | str = "self") -> bool:
    """Give one process its place; False if the kernel does not allow it (going below where a privileged hand set it) or
    the process is gone."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(int(kind)))
    except OSError as error:
        log.info("process %s does not die as %s: %s", pid, kind.name.lower(), error.strerror)
        return False
    return True


def group_dies_as(kind: DiesAs, pgid: int) -> None:
    """The same for every process of a group; those it forks later inherit it."""
    for pid in group_pids(pgid):
        dies_as(kind, pid)


def kills_so_far() -> int:
    """How many processes the kernel has killed for want of memory since it started, whoever's they were; 0 where it
    does not say."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
