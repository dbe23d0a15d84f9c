"""Calls of all workers of a tensor-parallel engine, by vLLM's executor over queues without processes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import WorkerProc

from serve.vllm.deaths import ShmExecutor

SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Workers:
    """Reply to each call with the next of their lines, in order."""

    def __init__(self, *lines):
        self.lines, self.queues = [deque(line) for line in lines], [deque() for _ in lines]

    def enqueue(self, call):
        for line, queue in zip(self.lines, self.queues, strict=True):
            queue.append(line.popleft())

    def executor(self):
        replies = [SimpleNamespace(dequeue=lambda timeout=None, queue=queue: queue.popleft()) for queue in self.queues]
        made = object.__new__(ShmExecutor)
        vars(made).update(rpc_broadcast_mq=self, response_mqs=replies, futures_queue=deque(), is_failed=False)
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
