"""The process that grades, started by hosts.py, which sends it one end of a socket for each request.

It forks a handler, which reads the request, so that this process never holds an owner's data. The handler forks a child
for each sample (for all samples at once where the grader has no code), confined to computing
(runtime/processes/confinement.py), and kills it at a limit, or when the client leaves.

A request is lines of JSON: {"kind", "nice", ...}, a line for each sample, and an empty line. The answer is
one such line: {"result": ...}, or {"broke": why} if the request ended its child.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import resource
import select
import signal
import site
import socket
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pydantic import TypeAdapter

from runtime.processes.confinement import confine, missing
from runtime.processes.confinement import prepare as prepare_confinement
from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as
from train.graders.errors import GradingErrors, GradingFailed
from train.graders.graders import Grader, Python, TextSimilarity, leaves, parse
from train.graders.grading import Graded, ModelAnswer, grade
from train.graders.templates import Sample

LOADED = {
    "deepdiff": ("deepdiff",),
    "jsonschema": ("jsonschema",),
    "nltk": ("nltk.translate.bleu_score", "nltk.translate.gleu_score", "nltk.translate.meteor_score"),
    "pandas": ("pandas",),
    "rouge_score": ("rouge_score.rouge_scorer",),
    "scipy": ("scipy.stats", "scipy.spatial.distance"),
    "sklearn": ("sklearn.metrics", "sklearn.feature_extraction.text"),
    "sympy": ("sympy",),
}
"""Packages that take 0.1 to 2 s of CPU to import, by the names that code imports: imported before the first fork that
needs them, for all later ones."""
TIME_S = 120
"""Seconds of the wall clock and of CPU for each python grader, as in OpenAI's API, like the memory."""
OWN_TIME_S = 60
"""Seconds for a request without code."""
CHECK_S = 30
MEMORY_BYTES = 2 << 30
HANDLER_BYTES = 4 << 30
SCHEMA_BYTES = 1 << 30
SCHEMA_S = 300
"""Of the clock: its CPU is what bounds a check of items, so that a busy machine refuses no honest one."""
THREADS = 64
"""With small stacks, 2 GiB could hold more threads than the machine has ids for: then no other process could start."""
MOST_TIMEOUTS = 3
"""If this many calls run out of time before any returns, the request makes no more of them: otherwise a job's devices
would wait two minutes for each of its answers."""
_POLL_S = 0.02
_RESULT_BYTES = 256 << 10  # of one sample
_DETAIL_CHARACTERS = 2000
_ITEMS_SHOWN = 20
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null")
_GRADED = TypeAdapter(list[Graded])


class Broke(Exception):
    """A child ended without its result."""

    late = False


class TookTooLong(Broke):
    late = True


def refusal() -> str:
    """Why no code runs on this machine, in words; empty if it does."""
    lack = missing()
    return f"python graders do not run on this machine: {lack}. Nothing else can confine them here" if lack else ""


def loads_of(grader: Grader) -> set[str]:
    """The packages of LOADED that the grader needs or may import."""
    each = leaves(grader).values()
    code = [leaf.source for leaf in each if isinstance(leaf, Python)]
    found = {name for name in LOADED if any(name in source for source in code)}
    metrics = {leaf.evaluation_metric for leaf in each if isinstance(leaf, TextSimilarity)}
    return found | ({"nltk"} if metrics & {"bleu", "gleu", "meteor"} else set())


def main() -> None:
    die_with_parent()
    dies_as(DiesAs.TRIAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # handlers leave no zombies
    _preload()
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        names, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not descriptors:
            return
        _load(names.decode().split())
        try:
            forked = os.fork()
        except OSError as error:  # the client gets no answer and may retry
            print(f"no handler of a request can start: {error!r}", file=sys.stderr)
        else:
            if forked == 0:
                control.close()
                _handle(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _preload() -> None:
    """Import what most graders use, so that no fork has to."""
    import random  # noqa: F401
    import re  # noqa: F401
    import statistics  # noqa: F401

    # numpy imports it only on demand, which every fork has: that took half of its time.
    import numpy.random  # noqa: F401
    from rapidfuzz import fuzz  # noqa: F401

    prepare()


def prepare() -> None:
    """Make what each fork needs to confine itself."""
    prepare_confinement()
    _readable()


def _load(names: Collection[str]) -> None:
    for module in (module for name in names for module in LOADED[name]):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the code that imports it gets the error again
            print(f"{module} cannot be imported: {error!r}", file=sys.stderr)


def _handle(client: socket.socket) -> NoReturn:
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, (HANDLER_BYTES, HANDLER_BYTES))
        lines = client.makefile("rb")
        request = json.loads(lines.readline())
        os.nice(request["nice"])
        samples = [json.loads(line) for line in iter(lines.readline, b"\n")]
        try:
            answered = {"result": answer(request, samples, client)}
        except Broke as error:
            answered = {"broke": str(error)}
        client.sendall(_written(answered) + b"\n")
    except BaseException as error:  # noqa: BLE001 - this process ends here
        traceback.print_exception(error)
    finally:
        os._exit(0)


def answer(request: dict[str, Any], samples: list[Any], client: socket.socket | None = None) -> Any:
    """The result of a request, by its "kind":

    grade: of "grader", {"sample", "item", "answers"} each -> a Graded each.
    code: "sources" by path -> [(path, why)] of those that cannot grade.
    schema: "schema", "cpu_s", items -> [(place, why)] of the items refused (refused_items).

    Raises Broke.
    """
    match request["kind"]:
        case "schema":
            work, cpu_s = (lambda _: refused_items(request["schema"], samples)), request["cpu_s"]
            return _in_child(work, SCHEMA_S, client, SCHEMA_BYTES, cpu_s=cpu_s)
        case "code":
            found = [(path, _why_unusable(source, client)) for path, source in request["sources"].items()]
            return [(path, why) for path, why in found if why]
    grader = parse(request["grader"])
    given = [
        (Sample(**one["sample"]), one["item"], {name: ModelAnswer(**of) for name, of in one["answers"].items()})
        for one in samples
    ]
    return _grade(grader, given, client)


def _grade(
    grader: Grader, samples: list[tuple[Sample, Any, dict[str, ModelAnswer]]], client: socket.socket | None
) -> list[Graded]:
    """A sample whose child breaks has no reward and a flag; samples without code that break together go alone."""
    calls = sum(isinstance(leaf, Python) for leaf in leaves(grader).values())
    time_s, graded, late, returned = TIME_S * calls or OWN_TIME_S, list[Graded](), 0, False
    groups = [[one] for one in samples] if calls else [samples]
    while groups:
        group = groups.pop(0)
        if late >= MOST_TIMEOUTS and not returned:
            graded.append(_broken(f"it was not run: its first {MOST_TIMEOUTS} calls all ran out of time", code=False))
            continue
        try:
            work, read = partial(_graded, grader, group), partial(_read, len(group))
            graded += _in_child(work, time_s, client, read=read, most_bytes=_RESULT_BYTES * len(group))
            returned = True
        except Broke as error:
            late += error.late
            if len(group) > 1:
                groups += [[one] for one in group]
            else:
                graded.append(_broken(str(error), code=bool(calls)))
    return graded


def _graded(grader: Grader, samples: list[tuple[Sample, Any, dict[str, ModelAnswer]]], unconfined: str) -> list[Graded]:
    def run(source: str, sample: dict[str, Any], item: Any) -> float:
        if unconfined:
            flags = GradingErrors(python_grader_server_error=True, python_grader_server_error_type=unconfined)
            raise GradingFailed(unconfined, flags)
        return run_python(source, sample, item)

    return [grade(grader, sample, item, answers, run) for sample, item, answers in samples]


def _read(count: int, written: bytes) -> list[Graded]:
    """Raises ValueError."""
    found = _GRADED.validate_json(written)
    if len(found) != count:
        raise ValueError(f"{len(found)} results of {count} samples")
    return found


def _broken(why: str, *, code: bool) -> Graded:
    ran = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=why)
    return Graded(0.0, False, errors=ran if code else GradingErrors(other_error=True), messages=[why])


def _in_child(
    work: Callable[[str], Any],
    time_s: float,
    client: socket.socket | None,
    memory_bytes: int = MEMORY_BYTES,
    cpu_s: float | None = None,
    read: Callable[[bytes], Any] = json.loads,
    most_bytes: int = _RESULT_BYTES,
) -> Any:
    """What `work` returns in a confined fork; it is told why the fork is not confined, "" if it is.

    Code may write anything in place of its result: `read` raises ValueError for what is none. cpu_s: `time_s` without
    it. most_bytes: of the result; a longer one is cut. Raises Broke.
    """
    cpu_s = time_s if cpu_s is None else cpu_s
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(writing, work, memory_bytes, round(cpu_s) or 1)
    os.close(writing)
    try:
        result = _result(reading, most_bytes, time.monotonic() + time_s, pid, client)
    finally:
        os.close(reading)
        # It is not waited for yet, so the pid is still its own.
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if result is None:
        raise TookTooLong(f"it took longer than {time_s:g} s")
    try:
        return read(bytes(result))
    except (ValueError, RecursionError):
        ended = f" with {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else ""
        kind = TookTooLong if ended.endswith("SIGXCPU") else Broke
        limits = f"it may use {memory_bytes >> 30} GiB of memory and {cpu_s:g} s of CPU"
        raise kind(f"its process ended{ended} without a result; {limits}") from None


def _result(reading: int, most_bytes: int, until_s: float, pid: int, client: socket.socket | None) -> bytearray | None:
    """What the child writes until it closes its end or exceeds `most_bytes`; None if it takes too long. Raises Broke
    for too many threads."""
    result, watched = bytearray(), [reading, *([client] if client else [])]
    while time.monotonic() < until_s:
        # Neither seccomp nor a limit of its own counts them: RLIMIT_NPROC is of all that the box's user runs.
        if (threads := os.stat(f"/proc/{pid}/task").st_nlink - 2) > THREADS:
            raise Broke(f"it had {threads} threads at once; at most {THREADS} are allowed")
        ready = select.select(watched, [], [], _POLL_S)[0]
        if client in ready:  # which sends nothing more, so that it has left
            os._exit(0)
        if reading in ready:
            more = os.read(reading, 1 << 16)
            result += more
            if not more or len(result) > most_bytes:
                return result
    return None


def _child(writing: int, work: Callable[[str], Any], memory_bytes: int, cpu_s: int) -> NoReturn:
    try:
        die_with_parent()
        _only_these_files(writing)
        unconfined = refusal()
        try:
            if unconfined:
                resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
                resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
            else:
                confine(_readable(), memory_bytes, cpu_s)
        except OSError as error:
            unconfined = f"python graders cannot be confined here: {error}"
        with open(3, "wb", closefd=False) as out:
            out.write(_written(work(unconfined)))
    finally:
        os._exit(0)


def _only_these_files(writing: int) -> None:
    """3: where the result goes; 0 to 2: nothing. All others are closed: one of them leads to the client."""
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


def _written(value: Any) -> bytes:
    # A lone surrogate, which JSON and users' code may contain, cannot be sent as text.
    return json.dumps(value, default=asdict, ensure_ascii=False).encode(errors="replace")


def refused_items(schema: Any, items: list[Any]) -> list[tuple[int, str]]:
    """(place, why) of the first few items that do not follow the schema; place -1: it is not a schema.

    Its patterns can take for ever and its references go in circles: only a child does this."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        # Without a registry it opens whatever `$ref` names: files of the box, and addresses that only the box can
        # reach.
        validator = jsonschema.Draft202012Validator(schema, registry=Registry())
        found = ((place, next(validator.iter_errors(item), None)) for place, item in enumerate(items))
        refused = ((place, error) for place, error in found if error is not None)
        return [
            (place, f"item{''.join(f'.{step}' for step in error.absolute_path)}: {error.message[:500]}")
            for place, error in islice(refused, _ITEMS_SHOWN)
        ]
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path))[:200]
        return [(-1, f"it is no JSON schema{' at ' + where if where else ''}: {error.message[:500]}")]
    except RecursionError:
        return [(-1, "the schema refers to itself without end, or it or an item is nested too deep")]
    except Unresolvable as error:
        return [(-1, f"the reference {error.ref[:200]!r} leads nowhere; one may only lead to a place in the schema")]


def run_python(source: str, sample: dict[str, Any], item: Any) -> float:
    """The number that `grade(sample, item)` returns; in a confined child alone. Raises GradingFailed."""
    try:
        reward = _function(source)(sample, item)
        # Also what numpy calls a number, and True.
        if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
            raise _Unfit(f"grade() returned {type(reward).__name__}; expected a number")
        return float(reward)
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; it is reported
        why = _told(error)
        flags = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=why)
        raise GradingFailed(why, flags) from None


class _Unfit(Exception):
    """What is wrong with the code, in words."""


def _why_unusable(source: str, client: socket.socket | None = None) -> str:
    """Why the source cannot grade; empty if its module runs and has a function `grade(sample, item)`."""

    def work(unconfined: str) -> str:
        if unconfined:
            return unconfined
        try:
            function = _function(source)
            if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
                raise _Unfit("`grade` is a coroutine or a generator; expected a function that returns a number")
            try:
                inspect.signature(function).bind({}, {})
            except TypeError as error:
                raise _Unfit(f"`grade` is called as `grade(sample, item)`: {error}") from None
            except ValueError:  # a builtin, which has no signature
                pass
        except BaseException as error:  # noqa: BLE001 - as above
            return _told(error)
        return ""

    try:
        return str(_in_child(work, CHECK_S, client))
    except Broke as error:
        return str(error)


def _function(source: str) -> Callable[..., Any]:
    """Its `grade`. Raises _Unfit, and whatever the code raises."""
    import random

    import numpy as np

    random.seed()
    np.random.seed()
    # Registered like any other module: dataclasses, pydantic and pickle look it up by the name in its classes. It is
    # compiled without this file's `annotations` import, which the code need not have.
    sys.modules["grader"] = module = ModuleType("grader")
    exec(compile(source, "grader.py", "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, "grade", None)
    if not callable(function):
        raise _Unfit("the source defines no function `grade(sample, item)`")
    return function


def _told(error: BaseException) -> str:
    if isinstance(error, _Unfit):
        return str(error)
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


if __name__ == "__main__":
    main()
