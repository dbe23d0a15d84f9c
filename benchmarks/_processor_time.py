"""The processor time of a whole box: which two cores cannot go below, whatever waits for whatever."""

from __future__ import annotations

import psutil

from tests.e2e.box_support import WholeBox


def cpu_of(box: WholeBox) -> float:
    """Seconds that the processes of a box have computed, and those of them that have ended, which whoever waited for
    them counts."""
    spent_s = 0.0
    for pid in [*box.running(), box.main_pid()]:
        try:
            spent_s += sum(psutil.Process(pid).cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return spent_s
