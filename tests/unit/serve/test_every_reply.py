"""Calls of all workers of a tensor-parallel engine, by vLLM's executor over queues without processes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import WorkerProc

from serve.vllm import executor as executor_module

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
        made = object.__new__(executor_module.ShmExecutor)
        vars(made).update(rpc_broadcast_mq=self, response_mqs=queues, futures_queue=deque(), is_failed=False)
        return made

    def shutdown(self):
        """As a queue that the executor shuts down."""


def test_a_call_that_fails_on_all_workers_leaves_no_reply_for_the_next():
    workers = Workers(
        [(FAILURE, "no memory on 0"), (SUCCESS, "fine 0")], [(FAILURE, "no memory on 1"), (SUCCESS, "fine 1")]
    )
    executor = workers.executor()
    with pytest.raises(RuntimeError, match="no memory on 0"):
        executor.collective_rpc("update_weights")
    assert executor.collective_rpc("start_weight_update") == ["fine 0", "fine 1"]
    assert not any(workers.queues)


def test_engine_ends_if_a_worker_fails_and_another_is_silent(monkeypatch):
    class Ended(Exception):
        pass

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(executor_module, "LATE_REPLY_S", 0.0)
    monkeypatch.setattr(executor_module.os, "_exit", end)
    monkeypatch.setattr(executor_module.logging, "shutdown", lambda: None)
    workers = Workers([(SUCCESS, None)], [(FAILURE, "lost its device")], [])
    with pytest.raises(Ended, match=str(executor_module.OUT_OF_STEP)):
        workers.executor().collective_rpc("sleep")
