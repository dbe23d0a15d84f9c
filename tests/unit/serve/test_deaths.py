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

from runtime.processes.kernel import die_with_parent
from serve.core.errors import CoreDied, CoreKilled, EngineStartFailed
from serve.vllm import deaths

FORK = multiprocessing.get_context("fork")
WITHIN_S = 60.0


class Manager:
    """Forks one core, as vLLM's CoreEngineProcManager does."""

    def __init__(self, body):
        self.processes = [FORK.Process(target=body, name="EngineCore")]
        self.processes[0].start()

    def sentinels(self):
        return [process.sentinel for process in self.processes]

    def shutdown(self):
        self.processes[0].terminate()


def end(by):
    """End this process by a signal or with an exit code."""
    if isinstance(by, signal.Signals):
        os.kill(os.getpid(), by)
        time.sleep(WITHIN_S)
    os._exit(by)


@pytest.fixture
def followed(monkeypatch, tmp_path):
    """Returns CoreDeath, the manager that forks this core, and what was told of its end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fork(body):
        told, happened = [], threading.Event()
        death = deaths.CoreDeath(lambda cause: (told.append(cause), happened.set()))
        manager = type("Followed", (Manager,), {})
        death.follow(manager)
        return death, manager(body), told, happened

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
    def fails():
        deaths.leaves_word(lambda: json.loads("{"))()

    _, _, told, happened = followed(fails)
    assert happened.wait(WITHIN_S)
    assert type(told[0]) is EngineStartFailed and str(told[0]).startswith("JSONDecodeError: ")


def test_core_death_in_order_is_not_told(followed, monkeypatch):
    monkeypatch.setattr(deaths, "CAUSE_WITHIN_S", 0.05)
    death, manager, told, _ = followed(lambda: time.sleep(WITHIN_S))
    manager.shutdown()
    manager.processes[0].join(WITHIN_S)
    assert death.cause() is None and told == []


def test_core_death_before_vllm_ends_it_is_told(followed):
    """vLLM ends what is left of an engine whose core has died, which is not in order."""
    death, manager, told, happened = followed(lambda: end(3))
    multiprocessing.connection.wait(manager.sentinels())
    manager.shutdown()
    assert happened.wait(WITHIN_S) and [death.cause()] == told


def core_with_workers(bodies, close):
    """A core that forks these workers; close: whether it ends them in order first."""

    class Handle:
        def __init__(self, number, body):
            self.proc = FORK.Process(target=body, name=f"VllmWorker-{number}")
            self.proc.start()
            _, self.death_writer = FORK.Pipe(duplex=False)

    def ready(handles):
        if close:
            for handle in handles:
                handle.death_writer.close()
                handle.proc.kill()
                handle.proc.join()
            os._exit(0)
        time.sleep(WITHIN_S)  # as a call of all workers, one of whom is dead

    deaths.follow_workers(ready)([Handle(*pair) for pair in enumerate(bodies)])


def test_core_ends_with_a_worker_that_dies(followed):
    def lives():
        die_with_parent()  # as each process of an engine: it holds the sentinel of its parent open
        time.sleep(WITHIN_S)

    _, manager, told, happened = followed(lambda: core_with_workers([lives, lambda: end(signal.SIGSEGV)], close=False))
    assert happened.wait(WITHIN_S)
    assert str(told[0]) == "its worker VllmWorker-1 was ended by SIGSEGV" and type(told[0]) is CoreDied
    assert manager.processes[0].exitcode == deaths.WORKER_DIED


def test_core_that_ends_its_workers_in_order_ends_by_itself(followed):
    _, manager, _, happened = followed(lambda: core_with_workers([lambda: time.sleep(WITHIN_S)], close=True))
    assert happened.wait(WITHIN_S)
    assert manager.processes[0].exitcode == 0
