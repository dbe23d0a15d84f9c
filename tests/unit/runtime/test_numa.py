"""CPU affinity near a device, also for forked processes and their children."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.processes import kernel
from runtime.processes.child import Child

SOCKETS, ALL = ["0-1,2-3", "4-7"], set(range(8))


def node_tree(root: Path, cpulists: list[str]) -> Path:
    """Create a folder like /sys/devices/system/node."""
    for node, cpulist in enumerate(cpulists):
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}" / "cpulist").write_text(f"{cpulist}\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "cpulists", "allowed", "expected"),
    [
        ([1], SOCKETS, ALL, {4, 5, 6, 7}),
        ([0, 1], SOCKETS, ALL, None),  # on both sockets: keep all CPUs
        ([1], SOCKETS, {2, 3, 4}, {4}),  # the CPUs of a container
        ([1], SOCKETS, {0, 1}, None),  # no allowed CPU near the device: keep the far ones
        ([1], ["0-6", "7"], ALL, {7}),
        ([1], ["0-7", ""], ALL, None),  # a node without CPUs
        ([0], ["0-7"], ALL, None),
        ([None], SOCKETS, ALL, None),
        ([], SOCKETS, ALL, None),
        ([7], SOCKETS, ALL, None),
    ],
)
def test_bind_near_selects_cpus_of_the_node(tmp_path, monkeypatch, nodes, cpulists, allowed, expected):
    bound = []
    monkeypatch.setattr(kernel, "NUMA_NODES", node_tree(tmp_path, cpulists))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    assert kernel.bind_near(nodes) == expected
    assert bound == ([] if expected is None else [expected])


async def test_forked_process_and_its_children_run_near_device(tmp_path):
    everything = os.sched_getaffinity(0)
    if len(everything) < 2:
        pytest.skip("a machine with one processor has nothing to choose from")
    first, *rest = sorted(everything)
    root = node_tree(tmp_path / "node", [str(first), ",".join(map(str, rest))])
    socket_path, log = tmp_path / "w.sock", tmp_path / "w.log"
    program = (
        "import pathlib, sys\n"
        "from runtime.processes import kernel, warm_parent\n"
        f"kernel.NUMA_NODES = pathlib.Path({str(root)!r})\n"
        f"sys.exit(warm_parent.main([{str(socket_path)!r}, 'tests.unit.runtime.entries', "
        f"{str(log)!r}]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not socket_path.exists():
            assert parent.poll() is None, log.read_text()
        for nodes, expected in (([0], {first}), ([1], everything - {first}), ([None], everything), ([], everything)):
            written = {"log_path": tmp_path / "c.log", "name": "c"}
            child = await Child.spawn(socket_path, "tests.unit.runtime.entries:echo", {}, numa_nodes=nodes, **written)
            assert os.sched_getaffinity(child.pid) == expected, nodes
            assert os.sched_getaffinity(await child.call("fork")) == expected
            await child.kill_and_wait()
        assert os.sched_getaffinity(parent.pid) == everything
        assert "near NUMA node [0]" in (tmp_path / "c.log").read_text()
    finally:
        parent.kill()
        parent.wait()
