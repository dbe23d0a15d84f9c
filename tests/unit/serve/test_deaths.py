"""The end of an engine's core and workers, with real processes and without vLLM."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time

import pytest

from serve.core.errors import CoreDied, CoreKilled, EngineStartFailed
from serve.vllm import deaths

WITHIN_S = 60.0


def end(by):
    """End this process by a signal or with an exit code."""
    if isinstance(by, signal.Signals):
        os.kill(os.getpid(), by)
        time.sleep(WITHIN_S)
    os._exit(by)


@pytest.fixture
def followed(monkeypatch, tmp_path):
    """Returns CoreDeath, the core that it follows and that runs this, and what was told of its end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fork(body):
        told, happened = [], threading.Event()
        death = deaths.CoreDeath(lambda cause: (told.append(cause), happened.set()))
        core = deaths.forking(death.died)().Process(target=body, name="EngineCore")
        core.start()
        return death, core, told, happened

    return fork


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGILL, signal.SIGSEGV, 3], ids=str)
def test_core_death_by_a_crash_is_told_with_signal_or_code(followed, by):
    death, _, told, happened = followed(lambda: end(by))
    assert happened.wait(WITHIN_S)
    (cause,) = told
    assert (by.name if isinstance(by, signal.Signals) else f"exit code {by}") in str(cause)
    assert type(cause) is (CoreKilled if by == signal.SIGKILL else CoreDied), "a kill says nothing of the settings"
    assert death.cause() is cause


def test_core_death_by_an_error_is_told_with_the_error(followed):
    _, _, told, happened = followed(lambda: json.loads("{"))
    assert happened.wait(WITHIN_S)
    assert type(told[0]) is EngineStartFailed and str(told[0]).startswith("JSONDecodeError: ")


def test_core_death_in_order_is_not_told(followed, monkeypatch):
    monkeypatch.setattr(deaths, "CAUSE_WITHIN_S", 0.05)
    death, core, told, _ = followed(lambda: time.sleep(WITHIN_S))
    core.terminate()
    core.join(WITHIN_S)
    assert death.cause() is None and told == []


def test_core_death_before_vllm_ends_it_is_told(followed):
    """vLLM ends what is left of an engine whose core has died, which is not in order."""
    death, core, told, happened = followed(lambda: end(3))
    multiprocessing.connection.wait([core.sentinel])
    core.terminate()
    assert happened.wait(WITHIN_S) and [death.cause()] == told


def core_with_workers(*bodies):
    """A core that forks these workers, and waits as in a call of all of them."""
    context = deaths.forking(deaths.end_with_worker)()
    workers = [context.Process(target=body, name=f"VllmWorker-{number}") for number, body in enumerate(bodies)]
    for worker in workers:
        worker.start()
    return workers


def test_core_ends_with_a_worker_that_dies(followed):
    def core():
        core_with_workers(lambda: time.sleep(WITHIN_S), lambda: end(signal.SIGSEGV))
        time.sleep(WITHIN_S)

    _, process, told, happened = followed(core)
    assert happened.wait(WITHIN_S)
    assert str(told[0]) == "its worker VllmWorker-1 was ended by SIGSEGV" and type(told[0]) is CoreDied
    assert process.exitcode == deaths.WORKER_DIED


def test_core_error_from_a_dead_worker_names_the_worker(followed):
    def core():
        (worker,) = core_with_workers(lambda: end(3))
        multiprocessing.connection.wait([worker.sentinel])
        raise RuntimeError("WorkerProc initialization failed")

    _, _, told, happened = followed(core)
    assert happened.wait(WITHIN_S)
    assert str(told[0]) == "its worker VllmWorker-0 ended with exit code 3"


@pytest.mark.parametrize("ended", ["kill", "by itself"])
def test_core_that_ends_its_workers_in_order_is_not_told(followed, monkeypatch, ended):
    monkeypatch.setattr(deaths, "CAUSE_WITHIN_S", 0.05)

    def core():
        (worker,) = core_with_workers(lambda: time.sleep(WITHIN_S if ended == "kill" else 0))
        if ended == "kill":
            worker.kill()
        worker.join()

    death, process, told, _ = followed(core)
    process.join(WITHIN_S)
    assert process.exitcode == 0 and death.cause() is None and told == []
