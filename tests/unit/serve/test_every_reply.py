"""Calls of all workers of a tensor-parallel engine, by vLLM's executor over queues without processes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from serve.vllm import patches

SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Workers:
    """Reply to each call with the next of their lines, in order; one whose line is empty never replies."""

    def __init__(self, *lines):
        self.lines, self.queues = [deque(line) for line in lines], [deque() for _ in lines]

    def enqueue(self, call):
        for line, queue in zip(self.lines, self.queues, strict=True):
            if line and (call[3] is None or queue is self.queues[call[3]]):
                queue.append(line.popleft())

    def executor(self):
        def dequeue(queue):
            def take(timeout=None):
                if not queue:
                    assert timeout is not None, "it would wait for ever"
                    raise TimeoutError
                return queue.popleft()

            return SimpleNamespace(dequeue=take)

        queues = [dequeue(queue) for queue in self.queues]
        return SimpleNamespace(rpc_broadcast_mq=self, response_mqs=queues, futures_queue=deque(), is_failed=False)


def test_a_worker_that_fails_in_a_step_to_which_another_replies_ends(monkeypatch):
    """It only logged that: the other one waited for it in a collective, and the engine was dead after five minutes."""
    ended, replied = list[int](), list[object]()
    monkeypatch.setattr(patches.os, "_exit", ended.append)
    monkeypatch.setattr(patches.logging, "shutdown", lambda: None)
    run = patches.ends_out_of_step(WorkerProc._execute_worker_rpc)

    def step(fails):
        if fails:
            raise RuntimeError("no memory")
        return "tokens"

    def worker(rank):
        return SimpleNamespace(rank=rank, worker=SimpleNamespace(execute_model=step), handle_output=replied.append)

    run(worker(1), ("execute_model", (False,), {}, 0))
    run(worker(0), ("execute_model", (False,), {}, 0))
    assert replied == ["tokens"] and not ended
    run(worker(0), ("execute_model", (True,), {}, 0))
    run(worker(1), ("execute_model", (True,), {}, None))
    assert [str(one) for one in replied[1:]] == ["no memory", "no memory"] and not ended, "these are replied"
    run(worker(1), ("execute_model", (True,), {}, 0))
    assert ended == [patches.OUT_OF_STEP] and len(replied) == 3


def call(workers, executor, method, **more):
    return patches.with_every_reply(MultiprocExecutor.collective_rpc)(executor, method, **more)


def test_a_call_that_fails_on_all_workers_leaves_no_reply_for_the_next():
    workers = Workers(
        [(FAILURE, "no memory on 0"), (SUCCESS, "fine 0")], [(FAILURE, "no memory on 1"), (SUCCESS, "fine 1")]
    )
    executor = workers.executor()
    with pytest.raises(RuntimeError, match="no memory on 0"):
        call(workers, executor, "update_weights")
    assert call(workers, executor, "start_weight_update") == ["fine 0", "fine 1"]
    assert not any(workers.queues)


def test_engine_ends_if_a_worker_fails_and_another_is_silent(monkeypatch):
    class Ended(Exception):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(patches, "LATE_REPLY_S", 0.0)
    monkeypatch.setattr(patches.os, "_exit", end)
    monkeypatch.setattr(patches.logging, "shutdown", lambda: None)
    workers = Workers([(SUCCESS, None)], [(FAILURE, "lost its device")], [])
    with pytest.raises(Ended, match=str(patches.OUT_OF_STEP)):
        call(workers, workers.executor(), "sleep")


def test_a_call_in_time_one_too_late_and_one_of_a_single_worker_are_as_vllm_has_them():
    workers = Workers([(SUCCESS, 1), (SUCCESS, 3), (SUCCESS, 4)], [(SUCCESS, 2)])
    executor = workers.executor()
    assert call(workers, executor, "first", timeout=60.0) == [1, 2]
    assert call(workers, executor, "execute_model", unique_reply_rank=0) == 3
    with pytest.raises(TimeoutError, match="second"):
        call(workers, executor, "second", timeout=0.0)
