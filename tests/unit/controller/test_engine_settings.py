"""/admin/v1/models/{name}/settings: checks of settings, numbered versions, and restoring of an earlier version."""

from __future__ import annotations

import itertools

import pytest

from appliance.controller.engines.versions import EngineSizes
from appliance.store import models
from scheduler.core.workload import Device
from serve.core.config import EngineConfig
from serve.core.model_settings import ModelSettings
from tests.unit.controller.conftest import ADMIN

PATH = "/admin/v1/models/starter/settings"


async def patch(control, code=200, **body):
    answer = await control.http.patch(PATH, json=body, headers=ADMIN)
    assert answer.status_code == code, answer.text
    return answer.json()


async def test_settings_are_versioned_and_can_be_restored(control):
    first = await patch(control, set={"max_num_seqs": 4, "engine_args": {"block_size": "32", "stream-interval": "1"}})
    assert (first["settings_number"], first["settings"]["engine_args"]) == (
        1,
        {"block-size": "32", "stream-interval": "1"},
    )
    second = await patch(control, set={"max_num_seqs": None, "engine_args": {"stream-interval": None}})
    assert second["settings"] == {"engine_args": {"block-size": "32"}}
    again = await patch(control, set={"engine_args": {"block-size": "32"}})
    assert again["settings_number"] == 2, "nothing changed"
    back = await patch(control, number=1)
    assert (back["settings_number"], back["settings"]) == (3, first["settings"])
    assert (await patch(control, number=0))["settings"] == {}
    shown = (await control.http.get("/admin/v1/models/starter", headers=ADMIN)).json()
    assert shown["settings"] == {} and [row["number"] for row in shown["settings_history"]] == [4, 3, 2, 1]


async def test_rejected_settings_change_nothing(control):
    control.context.settings_check.refuses = "no such attention"
    told = await patch(control, 400, set={"engine_args": {"stream-interval": "1"}})
    assert "no such attention" in told["error"]["message"]
    for body in (
        {"set": {"nosuch": 1}},
        {"set": {"engine_args": {"api-key": "x"}}},
        {"set": {"max_model_len": 10**9}},
        {"set": {"chat_template": "{% for %}"}},
        {"set": {"max_num_seqs": 2}, "number": 1},
    ):
        await patch(control, 400, **body)
    await patch(control, 404, number=7)
    assert models.current_settings(control.db, "starter") is None
    assert len(control.context.settings_check.asked) == 1, "vLLM is asked last"


GIB = 2**30
LARGE = Device("n0/0", "n0", 0, "cuda", "H100", 80 * GIB)
SMALL = Device("n0/1", "n0", 1, "cuda", "RTX 4090", 24 * GIB)


@pytest.fixture
def size(control):
    models.update(control.db, "starter", bytes=8 * GIB)
    row = models.find(control.db, "starter")

    def of(*devices, **settings):
        sizes = EngineSizes(control.db, EngineConfig(), lambda: iter(devices), 2)
        return sizes.size(row, None, 1, ModelSettings(**settings))

    return of


def test_engine_is_sized_for_the_smallest_device(size):
    alone = size(SMALL)
    for devices in itertools.permutations([LARGE, LARGE, SMALL]):
        assert size(*devices) == alone
    assert alone.memory.device_bytes <= 24 * GIB < size(LARGE).memory.device_bytes
    assert alone.max_num_seqs < size(LARGE).max_num_seqs
