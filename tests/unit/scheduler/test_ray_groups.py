"""Which ranks a restarted controller may adopt."""

from __future__ import annotations

import pytest

from scheduler.ray_groups import is_whole
from scheduler.ray_node import stored_bytes


def place(rank, size=3, alive=True, done=False):
    return {"job_id": "j", "rank": rank, "world_size": size, "alive": alive, "done": done}


@pytest.mark.parametrize(
    "places, whole",
    [
        ([place(2), place(0), place(1)], True),
        ([place(0, alive=False, done=True), place(1), place(2)], True),  # rank 0 left first, the others follow
        ([place(0), place(1)], False),  # the controller died before it had started the third
        ([place(0), place(1, alive=False), place(2)], False),  # one died
        ([place(0, 1), place(0), place(1)], False),  # two worlds of one job
        ([place(0), place(0), place(1)], False),
    ],
)
def test_a_world_is_whole_when_every_rank_of_it_is_there(places, whole):
    assert is_whole(places) is whole


def test_what_a_start_reads_is_told_by_the_manifest_or_not_at_all(tmp_path):
    assert stored_bytes(tmp_path / "none") is None
    (tmp_path / "manifest.json").write_text("{}")
    assert stored_bytes(tmp_path) is None, "a step is not failed for its history"
