"""What an engine says of a version that it cannot take while it runs: whether another way than a new engine is left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from serve.core.config import EngineConfig
from serve.core.errors import EngineFailed, NotReloadable, ReloadFailed, SwapFailed, VersionBroken
from serve.core.spec import ReplicaSpec
from serve.engine.control import EngineControl

GOOD = {"tokens": [1, 2], "logprobs": [-0.5, -0.25]}
OTHER = {"tokens": [1, 2], "logprobs": [-9.5, -0.25]}
NONE = {"tokens": [1, 2], "logprobs": [float("nan"), -0.25]}


class Engine:
    """vLLM as EngineControl knows it. `loads`: what each load answers or raises, in turn."""

    model_config = SimpleNamespace(get_vocab_size=lambda: 100)

    def __init__(self, *loads, refusal=None):
        self.loads, self.refusal, self.paused = list(loads), refusal, False
        self.engine_core = self
        self.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0))

    async def collective_rpc(self, method, args=()):
        if method == "shm_check":
            facts = {"layerwise_reason": "quantised", "bytes": 1, "alike": []}
            return [{"refused": self.refusal} if self.refusal else facts]
        return [True]

    async def call_utility_async(self, method, *args):
        loaded = self.loads.pop(0)
        if isinstance(loaded, Exception):
            raise loaded
        reports = [{"how": "layerwise", "bytes_read": 1, "load_s": 0.1}]
        return {"answer": loaded, "fingerprint_s": 0.0, "reports": reports}

    async def wake_up(self, tags):
        pass

    async def pause_scheduler_async(self, mode, clear_cache):
        self.paused = True

    async def resume_generation(self):
        self.paused = False


@pytest.fixture
def control(tmp_path):
    """Makes the control of an engine that serves v1; v2 is another directory. Both have answered `GOOD` before."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.json").write_text("{}")
        (tmp_path / version / "model.safetensors").write_bytes(version.encode())

    def make(engine, state="ready"):
        spec = ReplicaSpec(
            replica_id="r1",
            model="m",
            version="v1",
            version_path=str(tmp_path / "v1"),
            socket_path="/tmp/r1.sock",
            devices=(0,),
            kind="cuda",
            shm_root=str(tmp_path),
            node="n0",
            kv_cache_bytes=1,
        )
        app_state = SimpleNamespace(openai_serving_models=SimpleNamespace(base_model_paths=[]), _state={})
        made = EngineControl(engine, app_state, spec, EngineConfig().model_dump(), 1)
        made.state = state
        for version in ("v1", "v2"):
            record = made._record_of(str(tmp_path / version))
            record.keep(record.check(GOOD, "load"))
        return made

    make.path = str(tmp_path / "v2")
    return make


RAISED = RuntimeError("ModelWeightParameter has no attribute output_dim")
FULL = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("loads", "error"),
    [
        ((RAISED, GOOD), SwapFailed),
        ((OTHER, GOOD), SwapFailed),
        ((NONE, GOOD), VersionBroken),
        ((RAISED, RAISED), ReloadFailed),
        ((NONE, OTHER), ReloadFailed),
        ((RAISED, FULL), EngineFailed),
        ((RAISED, EngineDeadError()), EngineFailed),
        ((EngineDeadError(),), EngineFailed),
    ],
)
async def test_a_swap_that_fails_says_who_may_take_the_version(control, loads, error):
    """Of the loads the first is the trial with the served version."""
    engine = Engine(GOOD, *loads)
    made = control(engine)
    with pytest.raises(error) as failed:
        await made.swap("m", "v2", control.path)
    assert type(failed.value) is error and made.version == "v1"
    assert (made.state, engine.paused) == (("ready", False) if loads[-1] is GOOD else ("failed", True))
    assert not engine.loads


@pytest.mark.parametrize("again", [OTHER, RAISED])
async def test_a_reload_that_does_not_answer_as_the_first_load_did_takes_no_other_version(control, again):
    """vLLM's INT8 kernel for processors answered nonsense, without an error, and a new version has no record."""
    made = control(Engine(again, GOOD))
    with pytest.raises(ReloadFailed, match="v1, served before, cannot be loaded again"):
        await made.swap("m", "v2", control.path)


async def test_a_reload_is_tried_once_and_not_after_a_wake_that_shows_the_same(control):
    engine = Engine(GOOD, GOOD, GOOD)
    made = control(engine)
    await made.swap("m", "v2", control.path)
    await made.swap("m", "v1", made.spec.version_path)
    assert (made.version, engine.loads) == ("v1", [])
    woken = control(engine, "asleep")
    engine.loads = [GOOD, GOOD]
    await woken.wake("m", "v1", woken.spec.version_path)
    await woken.swap("m", "v2", control.path)
    assert (woken.version, engine.loads) == ("v2", [])


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (RAISED, ReloadFailed),
        (OTHER, ReloadFailed),
        (NONE, EngineFailed),
        (FULL, EngineFailed),
        (EngineDeadError(), EngineFailed),
    ],
)
async def test_a_wake_that_fails_does_too(control, load, error):
    made = control(Engine(load), "asleep")
    with pytest.raises(EngineFailed) as failed:
        await made.wake("m", "v2", control.path)
    assert type(failed.value) is error and made.state == "failed"


@pytest.mark.parametrize("state", ["ready", "asleep"])
async def test_what_no_running_engine_takes_is_refused_before_anything_is_touched(control, state):
    made = control(Engine(refusal=["NotReloadable", "INT8 on processors"]), state)
    with pytest.raises(NotReloadable, match="INT8"):
        await (made.swap if state == "ready" else made.wake)("m", "v2", control.path)
    assert made.state == state
