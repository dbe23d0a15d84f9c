"""Runs a python grader's code: a fork for it alone, confined to computing (runtime/processes/confinement.py), with
limits of time and memory."""

from __future__ import annotations

import inspect
import json
import math
import os
import resource
import select
import signal
import site
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from runtime.processes.confinement import confine, missing
from runtime.processes.confinement import prepare as prepare_confinement
from runtime.processes.kernel import die_with_parent
from train.graders.errors import GradingErrors, GradingFailed, TookTooLong

TIME_S = 120
"""Seconds of the wall clock and, apart from it, of CPU: as OpenAI's API has it, like the memory."""
CHECK_S = 30
MEMORY_BYTES = 2 << 30
THREADS = 64
"""With small stacks, its memory could hold more threads than the machine has ids for: then no other process could
start."""
_POLL_S = 0.02
_RESULT_BYTES = 16 << 10
_CONFINED = b"\n"
"""What the child writes before the code runs: what follows may be the code's, and is not believed about the box."""
_DETAIL_CHARACTERS = 2000
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null")


def refusal() -> str:
    """Why no code runs on this machine, in words; empty if it does."""
    lack = missing()
    return f"python graders do not run on this machine: {lack}. Nothing else can confine them here" if lack else ""


def prepare() -> None:
    """Makes in the worker what each of its forks needs to confine itself."""
    prepare_confinement()
    _readable()


def only_compute(memory_bytes: int, cpu_s: int) -> None:
    """Confine this process, a fork with one thread, as far as this machine can; its CPU is bounded in any case.
    Raises OSError."""
    if missing():
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    else:
        confine(_readable(), memory_bytes, cpu_s)


def run_python(source: str, sample: dict[str, Any], item: Any, time_s: float = TIME_S) -> float:
    """The number that `grade(sample, item)` returns. Raises TookTooLong for more than `time_s` of the wall clock or
    TIME_S of CPU, GradingFailed for all else: no such function, an exception in it, no number, more than MEMORY_BYTES
    or THREADS."""
    return _in_child(time_s, lambda: _graded(source, sample, item))


def why_unusable(source: str) -> str:
    """Why the source cannot grade, in words; empty if its module runs and has a function `grade(sample, item)`."""
    try:
        _in_child(CHECK_S, lambda: _checked(source))
    except GradingFailed as failed:
        return str(failed)
    return ""


def _in_child(time_s: float, work: Callable[[], dict[str, Any]]) -> float:
    """The "reward" that `work` returns in a confined fork, or GradingFailed with its "error"."""
    if why := refusal():
        raise _not_confined(why)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(writing, work)
    os.close(writing)
    try:
        result = _read(reading, time.monotonic() + time_s, pid)
    finally:
        os.close(reading)
        # It is not waited for yet, so the pid is still its own.
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if result is None:
        raise _failed(f"grade() took longer than {time_s:g} s", TookTooLong)
    if result and not result.startswith(_CONFINED):
        raise _not_confined(f"python graders cannot be confined here: {result.decode(errors='replace')}")
    try:
        answer = json.loads(result)
        if "error" in answer:
            raise _failed(str(answer["error"]))
        return float(answer["reward"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # the code may have written it itself
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        raise _failed(_ended(status), TookTooLong if ended == signal.SIGXCPU else GradingFailed) from None


def _ended(status: int) -> str:
    limit = f"; it may use {MEMORY_BYTES >> 30} GiB of memory and {TIME_S} s of CPU"
    if os.WIFSIGNALED(status):
        return f"the process of grade() ended with {signal.Signals(os.WTERMSIG(status)).name}{limit}"
    return f"the process of grade() ended without a reward{limit}"


def _failed(details: str, kind: type[GradingFailed] = GradingFailed) -> GradingFailed:
    return kind(details, GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=details))


def _not_confined(why: str) -> GradingFailed:
    return GradingFailed(why, GradingErrors(python_grader_server_error=True, python_grader_server_error_type=why))


def _read(reading: int, until_s: float, pid: int) -> bytes | None:
    """Everything that the child writes until it closes its end; None if it takes too long. Raises GradingFailed: it has
    too many threads."""
    read = b""
    while (left_s := until_s - time.monotonic()) > 0:
        # Neither seccomp nor a limit of its own counts them: RLIMIT_NPROC is of all that the box's user runs.
        if (threads := os.stat(f"/proc/{pid}/task").st_nlink - 2) > THREADS:
            raise _failed(f"grade() had {threads} threads at once; at most {THREADS} are allowed")
        if not select.select([reading], [], [], min(left_s, _POLL_S))[0]:
            continue
        more = os.read(reading, _RESULT_BYTES)
        read += more
        if not more or len(read) > _RESULT_BYTES:
            return read
    return None


def _child(writing: int, work: Callable[[], dict[str, Any]]) -> None:
    """Never returns."""
    try:
        die_with_parent()
        _only_these_files(writing)
        confine(_readable(), MEMORY_BYTES, TIME_S)
    except BaseException as error:  # noqa: BLE001 - this process ends here
        os.write(3, str(error).encode() or b"no reason")
        os._exit(1)
    os.write(3, _CONFINED)
    try:
        answer = work()
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; it is reported
        answer = {"error": _told(error)}
    os.write(3, json.dumps(answer).encode())
    os._exit(0)


def _function(source: str) -> Callable[..., Any] | None:
    _reseed()
    # Registered like any other module: dataclasses, pydantic and pickle look it up by the name in its classes. It is
    # compiled without this file's `annotations` import, which the code need not have.
    sys.modules["grader"] = module = ModuleType("grader")
    exec(compile(source, "grader.py", "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, "grade", None)
    return function if callable(function) else None


_NO_FUNCTION = {"error": "the source defines no function `grade(sample, item)`"}


def _graded(source: str, sample: dict[str, Any], item: Any) -> dict[str, Any]:
    if (function := _function(source)) is None:
        return _NO_FUNCTION
    reward = function(sample, item)
    # Also what numpy calls a number, and True.
    if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
        return {"error": f"grade() returned {type(reward).__name__}; expected a number"}
    number = float(reward)
    if not math.isfinite(number):
        return {"error": f"grade() returned {number}, which is not a reward"}
    return {"reward": number}


def _checked(source: str) -> dict[str, Any]:
    if (function := _function(source)) is None:
        return _NO_FUNCTION
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return {"error": "`grade` is a coroutine or a generator; expected a function that returns a number"}
    try:
        inspect.signature(function).bind({}, {})
    except TypeError as error:
        return {"error": f"`grade` is called as `grade(sample, item)`: {error}"}
    except ValueError:  # a builtin, which has no signature
        pass
    return {"reward": 0.0}


def _told(error: BaseException) -> str:
    place, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "grader.py":
            place = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    try:
        text = str(error)
    except Exception as hidden:  # noqa: BLE001 - as above
        text = f"its text cannot be had ({type(hidden).__name__})"
    return f"{type(error).__name__}: {text}"[:_DETAIL_CHARACTERS] + place


def _reseed() -> None:
    import random

    random.seed()
    import numpy as np

    np.random.seed()


def _only_these_files(writing: int) -> None:
    """3: where the result goes; 0 to 2: nothing. All others are closed, because one of them carries the worker's
    answers."""
    os.dup2(writing, 3)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.closerange(4, 1 << 16)


@cache
def _readable() -> tuple[Path, ...]:
    """Python's own files and its packages, and shared libraries."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(Path(path) for path in (*sorted(paths), *site.getsitepackages(), *_LIBRARIES))
