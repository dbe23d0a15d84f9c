"""Engines on a box whose devices differ."""

from __future__ import annotations

import itertools

import pytest

from appliance.controller.engines.engine_sizes import EngineSizes
from appliance.store.objects import models
from scheduler.core.workload import Device
from serve.core.config import EngineConfig
from serve.core.model_settings import ModelSettings

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


def test_an_engine_may_be_placed_on_any_device_and_is_sized_for_the_smallest(size):
    alone = size(SMALL)
    for devices in itertools.permutations([LARGE, LARGE, SMALL]):
        assert size(*devices) == alone
    assert alone.memory.device_bytes <= 24 * GIB < size(LARGE).memory.device_bytes
    assert alone.max_num_seqs < size(LARGE).max_num_seqs
