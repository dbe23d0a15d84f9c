"""What an engine says of a version that it cannot take while it runs: whether another way than a new engine is left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from serve.core.config import EngineConfig
from serve.core.errors import EngineFailed, ReloadFailed, VersionBroken
from serve.engine.control import EngineControl
from tests.unit.serve.specs import spec

GOOD, NAN = -0.5, float("nan")
RAISED = RuntimeError("ModelWeightParameter has no attribute output_dim")
FULL = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Engine:
    """vLLM as EngineControl knows it. `load`: the log-probability that the loaded weights answer, or what the load
    raises. `done`: the calls that change it, in order."""

    errored = False

    def __init__(self, load=GOOD):
        self.load, self.done = load, []
        self.engine_core = self
        self.renderer = SimpleNamespace(clear_mm_cache_async=lambda: asyncio.sleep(0))
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: 0)

    async def collective_rpc(self, method, args=()):
        if method == "shm_check":
            return [{"bytes": 1}]
        if method == "shm_refusal":
            return [None]
        if method == "shm_load":
            self.done.append("load")
            if isinstance(self.load, Exception):
                raise self.load
            return [{"how": "in-place", "bytes_read": 1, "load_s": 0.1}]
        if method == "shm_unmap":
            raise RuntimeError("a worker did not unmap")
        return [True]

    async def add_request(self, request_id, prompt, params, priority):
        self.done.append("ask")
        chosen = SimpleNamespace(logprobs=[{1: SimpleNamespace(logprob=self.load)}])
        return SimpleNamespace(get=lambda: asyncio.sleep(0, SimpleNamespace(outputs=[chosen])))

    async def wake_up(self, tags=None):
        self.done.append(f"wake {tags}")

    async def pause_scheduler_async(self, mode, clear_cache):
        self.done.append("pause")

    async def resume_generation(self):
        self.done.append("resume")


@pytest.fixture
def control(tmp_path):
    """Makes the control of an engine that serves v1; v2 is another directory."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.json").write_text("{}")
        (tmp_path / version / "model.safetensors").write_bytes(version.encode())

    def make(engine, state="ready"):
        order = spec(version_path=str(tmp_path / "v1"), kind="cuda", shm_root=str(tmp_path), node="n0")
        app_state = SimpleNamespace(openai_serving_models=SimpleNamespace(base_model_paths=[]), _state={})
        made = EngineControl(engine, app_state, order, EngineConfig().model_dump(), 1)
        made.state = state
        return made

    make.path = str(tmp_path / "v2")
    return make


async def test_swap_asks_the_token_before_scheduling_resumes(control):
    engine = Engine()
    made = control(engine)
    swapped = await made.swap("m2", "v2", control.path)
    assert engine.done == ["pause", "load", "ask", "resume"]
    assert (made.model, made.version, made.state) == ("m2", "v2", "ready")
    assert swapped["fingerprint"] == {"verdict": "unrecorded"}


FAILURES = [(RAISED, ReloadFailed), (NAN, VersionBroken), (FULL, EngineFailed), (EngineDeadError(), EngineFailed)]


@pytest.mark.parametrize(("load", "error"), FAILURES)
@pytest.mark.parametrize("state", ["ready", "asleep"])
async def test_failed_load_says_who_may_take_the_version(control, state, load, error):
    made = control(Engine(load), state)
    with pytest.raises(EngineFailed) as failed:
        await (made.swap if state == "ready" else made.wake)("m", "v2", control.path)
    assert type(failed.value) is error and made.state == "failed"
