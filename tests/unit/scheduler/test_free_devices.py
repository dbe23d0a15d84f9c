from __future__ import annotations

from scheduler.core.workload import Device
from scheduler.plan.free_devices import FreeDevices
from tests.unit.scheduler.fakes import box_of


def linked(pairs: list[tuple[int, int]], count: int = 8) -> list[Device]:
    def peers(i: int) -> frozenset[str]:
        return frozenset(f"n0/{b if a == i else a}" for a, b in pairs if i in (a, b))

    return [Device(f"n0/{i}", "n0", i, "cuda", numa_node=i // 4, linked=peers(i)) for i in range(count)]


def test_best_fit_over_nodes_keeps_whole_nodes_free() -> None:
    free = FreeDevices(box_of(8, nodes=3))
    free.take(["n1/0", "n1/1", "n1/2", "n1/3"])
    assert free.choose(4) == ("n1/4", "n1/5", "n1/6", "n1/7")
    assert free.choose(5) == ("n0/0", "n0/1", "n0/2", "n0/3", "n0/4")


def test_one_numa_node_if_it_fits() -> None:
    free = FreeDevices(box_of(8))
    free.take(["n0/0", "n0/1"])
    assert free.choose(4) == ("n0/4", "n0/5", "n0/6", "n0/7")
    assert free.choose(2) == ("n0/2", "n0/3"), "the tightest NUMA node that fits"


def test_nvlink_bridges_win_over_numa() -> None:
    free = FreeDevices(linked([(0, 5), (1, 4), (2, 7), (3, 6)]))
    assert free.choose(2) == ("n0/0", "n0/5")
    free.take(["n0/0"])
    assert free.choose(2) == ("n0/1", "n0/4")
    four = free.choose(4)
    assert four is not None
    assert len({frozenset(p) & frozenset(four) for p in (("n0/1", "n0/4"), ("n0/2", "n0/7"), ("n0/3", "n0/6"))}) == 3


def test_what_a_holder_has_is_taken_again() -> None:
    free = FreeDevices(box_of(8, nodes=2))
    assert free.choose(2, near=("n1/5", "n1/6", "n1/7", "n1/4")) == ("n1/4", "n1/5")
    assert set(free.choose(4, near=("n1/2", "n1/3")) or ()) >= {"n1/2", "n1/3"}


def test_wholly_on_one_of_the_nodes_named() -> None:
    free = FreeDevices(box_of(8, nodes=3))
    free.take([f"n0/{i}" for i in range(6)] + ["n1/0"])
    assert free.choose(2, nodes=("n1", "n2")) == ("n1/1", "n1/2"), "tighter than n2, and n0 is not named"
    assert free.choose(8, nodes=("n0", "n1")) is None
    assert free.choose(4, nodes=("n0", "n2"), near=("n2/5", "n2/6")) == ("n2/4", "n2/5", "n2/6", "n2/7")
    idle = FreeDevices(box_of(8, nodes=3))
    idle.take([f"n1/{i}" for i in range(8)])
    assert free.choose(3, nodes=("n1", "n2"), only=idle) == ("n2/0", "n2/1", "n2/2"), "nobody has to leave n2"
