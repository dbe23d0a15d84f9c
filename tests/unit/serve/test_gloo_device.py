"""All groups of a process share a gloo device, and still compute; a forked process makes its own."""

import subprocess
import sys

SCRIPT = """
import os
from pathlib import Path
import torch
from torch import distributed
from serve.cpu import gloo_device

def loops():
    # A thread has its name once it runs.
    while not (found := running_loops()):
        pass
    return found

def running_loops():
    return sum((task / "comm").read_text().startswith("gloo_tcp_loop") for task in Path("/proc/self/task").iterdir())

def listens_at():
    mine = {fd.stat().st_ino for fd in Path("/proc/self/fd").iterdir() if fd.exists()}
    rows = [line.split() for table in ("tcp", "tcp6") for line in open(f"/proc/self/net/{table}").readlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[9]) in mine}

def groups():
    distributed.init_process_group("gloo", init_method="file://{folder}/" + str(os.getpid()), rank=0, world_size=1)
    made = [distributed.new_group([0], backend="gloo") for _ in range(4)]
    for group in made:
        total = torch.ones(3)
        distributed.all_reduce(total, group=group)
        assert total.tolist() == [1.0] * 3
    return loops()

gloo_device.apply()
assert groups() == 1, loops()
assert listens_at() == {"0100007F"}, "on loopback alone, whatever the machine's name leads to"
distributed.destroy_process_group()
child = os.fork()
if child == 0:
    os._exit(0 if groups() == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_has_one_device_for_all_its_groups_on_loopback(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{folder}", str(tmp_path))], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
