"""Causes of the end of a core and its workers, and workers' replies: real processes without vLLM's engine."""

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.executor.multiproc_executor import WorkerProc

from serve.core.errors import CoreKilled, EngineStartFailed
from serve.vllm import deaths
from serve.vllm.deaths import ShmExecutor

FORK = multiprocessing.get_context("fork")
CORE = logging.getLogger("vllm.v1.engine.core")
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def scratch(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deaths.watch()
    yield
    for name in deaths._LOGGERS:
        logging.getLogger(name).removeFilter(deaths._witness)


def ended(body):
    """Run `body` in a process; return the finished process."""
    process = FORK.Process(target=body)
    process.start()
    process.join(WITHIN_S)
    return process


def fails_to_start():
    try:
        json.loads("{")
    except ValueError:
        CORE.exception("EngineCore failed to start.")


@pytest.mark.parametrize(("by", "kind"), [(signal.SIGKILL, CoreKilled), (signal.SIGILL, EngineStartFailed)])
def test_cause_of_crashed_core_names_signal(by, kind):
    cause = deaths.cause(ended(lambda: os.kill(os.getpid(), by)))
    assert type(cause) is kind and by.name in str(cause)


def test_cause_of_failed_core_is_its_error():
    cause = deaths.cause(ended(fails_to_start))
    assert type(cause) is EngineStartFailed and str(cause).startswith("JSONDecodeError: ")


def test_cause_ignores_errors_that_core_survived():
    CORE.error("Invocation of %s method failed", "shm_load", exc_info=RuntimeError("no memory"))
    assert str(deaths.cause(ended(lambda: os._exit(3)))) == "its core ended with exit code 3"


def core_with_workers(*bodies):
    """A core that forks these workers and lets vLLM's executor end them."""
    workers = [FORK.Process(target=body, name=f"VllmWorker-{number}") for number, body in enumerate(bodies)]
    for worker in workers:
        worker.start()
    if len(bodies) > 1:
        workers[-1].join()
    ShmExecutor._ensure_worker_termination(workers)


def test_executor_ends_core_after_worker_death():
    waits, crashes = (lambda: time.sleep(0.5)), (lambda: os.kill(os.getpid(), signal.SIGILL))
    core = ended(lambda: core_with_workers(waits, crashes))
    assert core.exitcode == deaths.OUT_OF_STEP
    assert str(deaths.cause(core)).startswith("its worker VllmWorker-1 was ended by SIGILL")


SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Workers:
    """Stand-ins for workers, each replying to a call with the next item of its line."""

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
        """Does nothing; the executor shuts its queues down."""


def test_collective_rpc_failure_leaves_no_stale_replies():
    workers = Workers(
        [(FAILURE, "no memory on 0"), (SUCCESS, "fine 0")], [(FAILURE, "no memory on 1"), (SUCCESS, "fine 1")]
    )
    executor = workers.executor()
    with pytest.raises(RuntimeError, match="no memory on 0"):
        executor.collective_rpc("update_weights")
    assert executor.collective_rpc("start_weight_update") == ["fine 0", "fine 1"]
    assert not any(workers.queues)
