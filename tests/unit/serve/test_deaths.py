"""Why an engine's core ended, with real processes and without vLLM."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time

import pytest

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
    """A process that has run this."""
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
def test_cause_of_a_core_that_crashed_names_the_signal(by, kind):
    cause = deaths.cause(ended(lambda: os.kill(os.getpid(), by)))
    assert type(cause) is kind and by.name in str(cause)


def test_cause_of_a_core_that_raised_is_its_error():
    cause = deaths.cause(ended(fails_to_start))
    assert type(cause) is EngineStartFailed and str(cause).startswith("JSONDecodeError: ")


def test_cause_is_no_error_that_a_core_survives():
    CORE.error("Invocation of %s method failed", "shm_load", exc_info=RuntimeError("no memory"))
    assert str(deaths.cause(ended(lambda: os._exit(3)))) == "its core ended with exit code 3"


def core_with_workers(*bodies):
    """A core that forks these workers, and has vLLM's executor end them."""
    workers = [FORK.Process(target=body, name=f"VllmWorker-{number}") for number, body in enumerate(bodies)]
    for worker in workers:
        worker.start()
    if len(bodies) > 1:
        workers[-1].join()
    ShmExecutor._ensure_worker_termination(workers)


def test_executor_ends_the_core_with_a_worker_that_died():
    waits, crashes = (lambda: time.sleep(0.5)), (lambda: os.kill(os.getpid(), signal.SIGILL))
    core = ended(lambda: core_with_workers(waits, crashes))
    assert core.exitcode == deaths.OUT_OF_STEP
    assert str(deaths.cause(core)).startswith("its worker VllmWorker-1 was ended by SIGILL")
