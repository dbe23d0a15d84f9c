"""The order in which the kernel kills processes when memory runs out."""

import os
import subprocess
import sys
from pathlib import Path

from runtime.processes.kernel import DiesAs, group_dies_as

TWO = "import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()"


def score(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_oom_score_applies_to_group_and_its_forks():
    parent = subprocess.Popen([sys.executable, "-c", TWO], stdout=subprocess.PIPE, start_new_session=True)
    try:
        child = int(parent.stdout.readline())
        group_dies_as(DiesAs.ENGINE, parent.pid)
        assert (score(parent.pid), score(child)) == (150, 150)
        group_dies_as(DiesAs.ASLEEP, parent.pid)
        assert (score(parent.pid), score(child)) == (250, 250)
        group_dies_as(DiesAs.ENGINE, parent.pid)  # a wake lowers the score again, as far as allowed without privilege
        assert (score(parent.pid), score(child)) == (150, 150)
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
        parent.stdout.close()
