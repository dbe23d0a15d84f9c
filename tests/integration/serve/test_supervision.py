"""A supervisor's reports of an engine that starts, fails to start, or fails to load a version while it runs."""

import asyncio
from types import SimpleNamespace

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from serve.core import errors
from serve.core.config import EngineConfig
from serve.core.errors import EngineFailed, EngineRefused, EngineStartFailed, ReloadFailed, VersionBroken
from serve.engine import replica
from serve.engine.control import EngineControl
from tests.unit.serve.specs import spec


class Process:
    """A stand-in for an engine's process, whose first event is the result of the future `said`."""

    pid, name, alive, fatal, starved, log_path = 1 << 22, "engine r", True, None, False, "/nowhere"

    def __init__(self) -> None:
        self.said, self.killed = asyncio.Future(), asyncio.Event()

    async def next_event(self):
        return await self.said

    async def closed(self):
        await self.killed.wait()

    async def kill_and_wait(self):
        self.alive = False
        self.killed.set()

    def how_it_ended(self):
        return "was ended by SIGSEGV"

    def log_end(self):
        return "\n".join(f"line {n}" for n in range(9))


@pytest.fixture
async def process(monkeypatch):
    made = Process()

    async def spawn(*_, **__):
        return made

    monkeypatch.setattr(replica.Child, "spawn", spawn)
    monkeypatch.setattr(replica, "group_dies_as", lambda *_: None)
    monkeypatch.setattr(replica, "_remove_leftovers", lambda spec: None)
    return made


@pytest.fixture
def supervisor(process, tmp_path):
    return replica.Replica("/w", str(tmp_path), EngineConfig())


async def test_status_of_starting_engine_returns_at_once(process, supervisor):
    starting = asyncio.create_task(supervisor.start(spec()))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        status = await supervisor.status()
    assert (status["state"], status["model"], status["devices"], status["pid"]) == ("starting", "m", [3], process.pid)
    process.said.set_result(None)
    with pytest.raises(EngineStartFailed):
        await starting
    assert (await supervisor.status())["state"] == "dead"


async def refusal(process, supervisor, kinds=(), message=""):
    """The error of a start at which the process reports this fatal error, or ends without an event."""
    event = {"event": "fatal", "type": kinds[0], "kinds": list(kinds), "message": message} if kinds else None
    process.said.set_result(event)
    with pytest.raises(EngineStartFailed) as failed:
        await supervisor.start(spec())
    return failed.value


async def test_start_crash_reports_signal_and_log(process, supervisor):
    first, _, rest = str(await refusal(process, supervisor)).partition("\n")
    assert "its process was ended by SIGSEGV" in first and rest.endswith("line 8")


@pytest.mark.parametrize(
    ("kind", "message", "refused"),
    [
        (errors.EngineStartFailed, "its core was ended by SIGILL", True),
        (errors.CoreKilled, "its core was ended by SIGKILL", False),
        (ValueError, "Unknown quantization method: mxfp5", True),
        (RuntimeError, "Engine core initialization failed", True),
        (FileNotFoundError, "/dev/shm/x", False),
        (OSError, "[Errno 28] No space left on device", False),
        (RuntimeError, "CUDA error: uncorrectable ECC error encountered", False),
    ],
)
async def test_start_error_kind_decides_engine_refused(process, supervisor, kind, message, refused):
    error = await refusal(process, supervisor, [one.__name__ for one in kind.__mro__], message)
    assert isinstance(error, EngineRefused) == refused


GOOD, NAN = -0.5, float("nan")
RAISED = RuntimeError("ModelWeightParameter has no attribute output_dim")
FULL = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Engine:
    """A stand-in for vLLM behind EngineControl. `load`: the log-probability that the loaded weights give, or the error
    of the load. `done`: state-changing calls, in order."""

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
    """A factory of EngineControls that serve v1; `path` is v2's directory."""
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


async def test_swap_checks_token_before_scheduling_resumes(control):
    engine = Engine()
    made = control(engine)
    swapped = await made.swap("m2", "v2", control.path)
    assert engine.done == ["pause", "load", "ask", "resume"]
    assert (made.model, made.version, made.state) == ("m2", "v2", "ready")
    assert swapped["fingerprint"] == {"verdict": "unrecorded"}


FAILURES = [(RAISED, ReloadFailed), (NAN, VersionBroken), (FULL, EngineFailed), (EngineDeadError(), EngineFailed)]


@pytest.mark.parametrize(("load", "error"), FAILURES)
@pytest.mark.parametrize("state", ["ready", "asleep"])
async def test_failed_load_raises_error_by_cause(control, state, load, error):
    made = control(Engine(load), state)
    with pytest.raises(EngineFailed) as failed:
        await (made.swap if state == "ready" else made.wake)("m", "v2", control.path)
    assert type(failed.value) is error and made.state == "failed"
