"""All groups of a process share a gloo device, and still compute; a forked process makes its own."""

import os
import socket
import subprocess
import sys

SCRIPT = """
import os
from pathlib import Path
import torch
from torch import distributed
from serve import gloo_device

def loops():
    return sum((task / "comm").read_text().startswith("gloo_tcp_loop") for task in Path("/proc/self/task").iterdir())

def groups():
    distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
    made = [distributed.new_group([0], backend="gloo") for _ in range(4)]
    for group in made:
        total = torch.ones(3)
        distributed.all_reduce(total, group=group)
        assert total.tolist() == [1.0] * 3
    return loops()

gloo_device.apply()
assert groups() == 1, loops()
distributed.destroy_process_group()
child = os.fork()
if child == 0:
    os._exit(0 if groups() == 1 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_process_has_one_device_for_all_its_groups():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{port}", str(port))], env=environment, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
