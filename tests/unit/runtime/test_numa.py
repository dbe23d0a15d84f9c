"""Which processors a process is bound to, and that a forked one is, with all it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.processes import kernel
from runtime.processes.child import Child

SOCKETS = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
ALL = frozenset(range(8))


def node_tree(root: Path, cpulists: dict[int, str]) -> Path:
    """What /sys/devices/system/node looks like."""
    for node, cpulist in cpulists.items():
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}" / "cpulist").write_text(f"{cpulist}\n")
    (root / "possible").write_text("0-1\n")
    return root


@pytest.mark.parametrize(
    ("nodes", "cpus_of", "allowed", "expected"),
    [
        ([1], SOCKETS, ALL, SOCKETS[1]),
        ([0, 1], SOCKETS, ALL, None),  # over both sockets: all of them, as it is
        ([1], SOCKETS, frozenset({2, 3, 4}), frozenset({4})),  # a container's share of the machine
        ([1], SOCKETS, frozenset({0, 1}), None),  # none of it beside the device: far is better than nowhere
        ([0], {0: ALL}, ALL, None),  # one node
        ([None], SOCKETS, ALL, None),
        ([7], SOCKETS, ALL, None),
    ],
)
def test_beside_where_that_is_known_and_possible(nodes, cpus_of, allowed, expected):
    assert kernel.cpus_beside(nodes, cpus_of, allowed) == expected


def test_the_kernels_list_format():
    assert kernel.parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert kernel.parse_list("\n") == frozenset()


def two_nodes(root: Path) -> tuple[Path, int, int]:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a machine with one processor has nothing to choose from")
    rest = ",".join(map(str, cpus[1:]))
    return node_tree(root, {0: str(cpus[0]), 1: rest}), cpus[0], cpus[1]


async def test_a_forked_process_and_what_it_forks_run_beside_its_device(tmp_path):
    root, first, _ = two_nodes(tmp_path / "node")
    everything = os.sched_getaffinity(0)
    socket_path, log = tmp_path / "w.sock", tmp_path / "w.log"
    program = (
        "import pathlib, sys\n"
        "from runtime.processes import kernel, warm_parent\n"
        f"kernel.NUMA_NODES = pathlib.Path({str(root)!r})\n"
        f"sys.exit(warm_parent.main(['--socket', {str(socket_path)!r}, '--preload', 'tests.unit.runtime.entries', "
        f"'--log', {str(log)!r}]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not socket_path.exists():
            assert parent.poll() is None, log.read_text()
        for nodes, expected in (([0], {first}), ([1], everything - {first}), ([None], everything), ([], everything)):
            child = await Child.spawn(
                socket_path,
                "tests.unit.runtime.entries:echo",
                {},
                numa_nodes=nodes,
                log_path=tmp_path / "c.log",
                name="c",
            )
            assert os.sched_getaffinity(child.pid) == expected, nodes
            assert os.sched_getaffinity(await child.call("fork")) == expected
            await child.kill_and_wait()
        assert os.sched_getaffinity(parent.pid) == everything
        assert "near NUMA node [0]" in (tmp_path / "c.log").read_text()
    finally:
        parent.kill()
        parent.wait()
