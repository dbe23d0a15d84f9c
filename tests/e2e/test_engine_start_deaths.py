"""A process of an engine dies during its start: the start fails within seconds and reports the death."""

import json
import time

import pytest

from runtime.processes.kernel import group_pids
from serve.core.errors import EngineRefused, EngineStartFailed
from serve.engine import replica as replica_module
from tests.e2e import dying_engine
from tests.e2e.dying_engine import DIED_AT, FRONTEND, PHASES, PLAN

BY = ("SIGKILL", "SIGILL", "SIGSEGV", "3")
WITHIN_S = 5.0


@pytest.fixture
def dying(engine_box, replicas, monkeypatch):
    """Start an engine in which a process dies in this phase and way; return the error."""
    monkeypatch.setattr(replica_module, "ENTRY", dying_engine.ENTRY)

    async def start(phase, by, devices=1):
        (engine_box.root / PLAN).write_text(json.dumps({"phase": phase, "by": by, "rank": devices - 1}))
        replica = replicas()
        spec = engine_box.spec(
            f"dies{devices}", engine_box.version("a", seed=1), devices=tuple(range(devices)), tensor_parallel=devices
        )
        with pytest.raises(EngineStartFailed) as failed:
            await replica.start(spec)
        took_s = time.monotonic() - float((engine_box.root / DIED_AT).read_text())
        assert took_s < WITHIN_S and group_pids(replica._child.pid) == []
        return failed.value

    return start


def checked(error, phase, by):
    first = str(error).partition("\n")[0]
    killed = by == "3" and phase == "while the application is built"  # killed from outside, so by a signal
    assert ("SIGKILL" if killed else f"exit code {by}" if by.isdigit() else by) in first
    assert ("process" if phase in FRONTEND else "core") in first
    if by == "SIGKILL" or phase in FRONTEND:
        assert not isinstance(error, EngineRefused), "a kill says nothing of the settings"
    return first


# Each phase with one way to die, and each way in at least one phase.
@pytest.mark.parametrize(("phase", "by"), [(phase, BY[n % len(BY)]) for n, phase in enumerate(PHASES)])
async def test_start_reports_death_of_process(dying, phase, by):
    checked(await dying(phase, by), phase, by)


@pytest.mark.parametrize("phase", ["loads", "makes the cache"])
async def test_start_reports_death_of_worker(dying, phase):
    error = await dying(phase, "SIGSEGV", devices=2)
    assert "its worker VllmWorker-1 was ended by SIGSEGV" in str(error).partition("\n")[0]
