from __future__ import annotations

import dataclasses

import pytest

from scheduler.core.errors import DeviceHeld, InvalidWorkload, LeaseMismatch, UnknownDevice
from scheduler.core.inventory import Holder, Lease, Ledger

R1, R2, J1 = Holder("replica", "r1"), Holder("replica", "r2"), Holder("job", "j1")


def test_one_holder_per_device() -> None:
    ledger = Ledger(["a", "b"]).acquire(Lease("l1", R1, ("a",)))
    with pytest.raises(DeviceHeld, match="lease l2 asks for device a, which lease l1 holds"):
        ledger.acquire(Lease("l2", J1, ("b", "a")))
    assert ledger.free == {"b"}, "a refused lease must not take half of its devices"
    assert ledger.lease_on("a") == Lease("l1", R1, ("a",))


def test_two_leases_in_one_call_conflict_too() -> None:
    with pytest.raises(DeviceHeld):
        Ledger(["a"]).acquire(Lease("l1", R1, ("a",)), Lease("l2", R2, ("a",)))


def test_acquire_and_release_are_idempotent() -> None:
    lease = Lease("l1", R1, ("a",))
    ledger = Ledger(["a", "b"]).acquire(lease)
    assert ledger.acquire(lease) == ledger
    empty = ledger.release("l1")
    assert empty.free == {"a", "b"} and empty.release("l1") is empty


def test_a_lease_id_means_one_thing() -> None:
    ledger = Ledger(["a", "b"]).acquire(Lease("l1", R1, ("a",)))
    with pytest.raises(LeaseMismatch):
        ledger.acquire(Lease("l1", R1, ("b",)))


def test_a_ledger_never_changes() -> None:
    ledger = Ledger(["a"])
    with pytest.raises(AttributeError):
        ledger._lease_of = {}
    with pytest.raises(TypeError):
        ledger.leases["x"] = Lease("x", R1, ("a",))  # type: ignore[index]
    ledger.acquire(Lease("l1", R1, ("a",)))
    assert ledger.free == {"a"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        Lease("l1", R1, ("a",)).device_ids = ("b",)  # type: ignore[misc]


def test_unknown_devices_and_empty_leases_are_named() -> None:
    with pytest.raises(UnknownDevice, match="'z'"):
        Ledger(["a"]).acquire(Lease("l1", R1, ("z",)))
    with pytest.raises(InvalidWorkload, match="different device ids"):
        Lease("l1", R1, ("a", "a"))
    with pytest.raises(InvalidWorkload):
        Lease("l1", R1, ())


def test_held_devices_outlive_their_node() -> None:
    ledger = Ledger(["a", "b"]).acquire(Lease("l1", R1, ("b",))).resized(["a", "c"])
    assert ledger.free == {"a", "c"} and ledger.lease_on("b") is not None
    assert ledger.release("l1").of(R1) is None
