"""A profile of a tensor-parallel engine is of its first worker: all of them are told the same file."""

from __future__ import annotations

from types import SimpleNamespace

from serve.vllm.worker import ShmWorker


class Runner:
    def execute_model(self, scheduled):
        return None


def worker(rank):
    made = object.__new__(ShmWorker)
    made.rank = rank
    made.model_runner = Runner()
    return made


def test_one_worker_of_several_is_profiled_and_writes_the_trace(tmp_path):
    workers, path = [worker(rank) for rank in range(2)], tmp_path / "engine.trace.json.gz"
    for one in workers:
        one.shm_profile_begin()
        one.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
    assert [one.shm_profile_steps() for one in workers] == [1, None]
    first, other = (one.shm_profile_end(str(path)) for one in workers)
    assert other is None and first["steps"] == 1 and first["trace"] == str(path) and path.stat().st_size > 0
    written = path.read_bytes()
    workers[0].shm_profile_begin()
    workers[0].shm_profile_end(None)
    assert path.read_bytes() == written
