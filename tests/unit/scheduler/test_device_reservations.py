"""DeviceReservations without Ray: giving back is idempotent, also for two who do it at once."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.core.errors import EffectFailed
from scheduler.core.inventory import Holder, Lease
from scheduler.ray import device_reservations
from scheduler.ray.device_reservations import DeviceReservations


@pytest.fixture
def groups(monkeypatch):
    """Names of placement groups that live; one vanishes a moment after it was removed, as Ray's do."""
    alive = {"1:job:j": ["n1/0", "n1/1"]}

    async def table():
        await asyncio.sleep(0)
        return {name: ("CREATED", devices) for name, devices in alive.items()}

    def found(name):
        if name not in alive:
            raise ValueError(f"Failed to look up placement group with name {name}")
        return name

    class Freed:
        @staticmethod
        def available_resources():
            return {"device:n1/0": 1.0, "device:n1/1": 1.0}

        class util:
            get_placement_group = staticmethod(found)

    monkeypatch.setattr(device_reservations, "_table", table)
    monkeypatch.setattr(device_reservations, "ray", Freed)
    monkeypatch.setattr(device_reservations, "remove_placement_group", lambda name: alive.pop(name, None))
    return alive


async def test_a_lease_is_given_back_once_whoever_is_second(groups):
    reservations = DeviceReservations()
    # A hand-over's release and a look at the world after its node was lost; the second once ended the controller.
    released = [reservations.release("1:job:j") for _ in range(2)]
    await asyncio.gather(*released, reservations.leases(["n0/0"]))
    assert groups == {}
    await reservations.release("1:job:j")


async def test_a_node_lost_while_its_devices_are_waited_for_fails_the_step_and_not_the_controller(groups, monkeypatch):
    class Group:
        @staticmethod
        def wait(timeout_s):
            raise Exception("Placement group PlacementGroupID(03) does not exist.")  # noqa: TRY002 (as Ray does)

    monkeypatch.setattr(device_reservations, "placement_group", lambda *_, **__: Group)
    with pytest.raises(EffectFailed, match="does not exist"):
        await DeviceReservations().acquire(Lease("2:job:k", Holder("job", "k"), ("n1/0",)))
