"""Grades in other processes: first the caller's side, with a fair queue of owners, and below it the worker.

For each request, the worker receives one end of a socket and forks a child, so it never holds an owner's data. The
child writes its pid, with which the caller can kill it; confines itself to computing
(runtime/processes/confinement.py); reads the request as lines of JSON, {"kind", ...} and a line for each row; and
writes the result of each row as a line.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import resource
import signal
import site
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from pydantic import TypeAdapter

from runtime.processes.confinement import confine, missing
from runtime.processes.confinement import prepare as prepare_confinement
from runtime.processes.kernel import DiesAs, die_with_parent, dies_as
from train.graders.errors import GradingErrors, GradingFailed
from train.graders.graders import Grader, ModelAnswer, Python, leaves, parse
from train.graders.grading import Graded, grade
from train.graders.templates import Sample

MAX_BUSY = 4
"""The number of owners whose samples are graded at the same time."""
NICENESS = 10
"""Higher than the niceness of the box's work, so that users' code yields to it."""
TIME_S = 120
"""Seconds for each python grader; this and the memory are the limits of OpenAI's API."""
OWN_TIME_S = 60
"""Seconds for grading without code."""
MOST_BROKEN = 3
"""If this many first calls end without a result, the request makes no more calls: otherwise a job's devices would wait
two minutes for each answer."""
START_S = 60.0
"""Seconds for the worker to fork a child, after it has imported packages for a second or more."""
RETRY_S = 1.0
"""Seconds before the only retry: by then the ended worker is reaped, and memory may be free again."""
_RESULT_BYTES = 256 << 10  # limit for the result of one sample
_REAPED_S = 0.1  # time within which the kernel reaps an ended worker
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
_BEGIN = f"import sys; sys.path.insert(0, {_ROOT!r}); from train.graders.sandbox import main; main()"
_GRADED = TypeAdapter(Graded)
LOADED = {
    "bleu": ("nltk.translate.bleu_score",),
    "gleu": ("nltk.translate.gleu_score",),
    "meteor": ("nltk.translate.meteor_score",),
    "deepdiff": ("deepdiff",),
    "jsonschema": ("jsonschema",),
    "pandas": ("pandas",),
    "rouge_score": ("rouge_score.rouge_scorer",),
    "scipy": ("scipy.stats", "scipy.spatial.distance"),
    "sklearn": ("sklearn.metrics", "sklearn.feature_extraction.text"),
    "sympy": ("sympy",),
}
"""Modules that take 0.1 to 2 s of CPU to import, by a word of the requests that may need them. The worker imports them
before its first fork for such a request."""
_DETAIL_CHARACTERS = 2000
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null")


class WorkerBroke(Exception):
    """The worker ended without an answer; the request is not at fault."""


class ForkBroke(WorkerBroke):
    """The request crashed the process that handled it, or took too long."""


class NotRun(ForkBroke):
    """The call was skipped, because all calls before it crashed or took too long."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """time_s: seconds for each result, including waiting. The other fields limit a process; the limit of CPU time,
    unlike time_s, does not depend on how busy the machine is."""

    time_s: float
    cpu_s: int
    memory_bytes: int = 2 << 30
    nice: int = NICENESS


CHECK = Bounds(time_s=30, cpu_s=30)
SCHEMA = Bounds(time_s=300, cpu_s=15)


class GraderHosts:
    """Holds the worker and its queue; the caller must call `stop`. One owner's requests run one at a time, in one slot
    of the queue. Checks of code and schemas do not wait for grading, which may take minutes."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._free = asyncio.Semaphore(MAX_BUSY)

    async def grade(
        self,
        owner: str,
        grader: Grader,
        samples: Sequence[tuple[Sample, Any]],
        answers: Sequence[dict[str, ModelAnswer]],
        waited_for: bool = False,
    ) -> list[Graded]:
        """Grade samples, in their order; a sample that crashes its process gets a flag and no reward. waited_for: other
        work of the box waits for the rewards, so grading has the same priority. Raises WorkerBroke."""
        head = {"kind": "grade", "grader": grader.as_given()}
        rows = [
            {"sample": asdict(sample), "item": item, "answers": {name: asdict(of) for name, of in by_name.items()}}
            for (sample, item), by_name in zip(samples, answers, strict=True)
        ]
        nice = 0 if waited_for else NICENESS
        calls = sum(isinstance(leaf, Python) for leaf in leaves(grader).values())
        time_s = calls * TIME_S or OWN_TIME_S
        async with self._turn(owner, "grade"), self._free:
            with suppress(ForkBroke):  # one sample may have crashed the shared process: then each gets its own
                if not calls:
                    return await self._together(head, rows, Bounds(time_s, time_s * max(1, len(rows)), nice=nice))
            results = await self._apart(head, rows, Bounds(time_s, time_s, nice=nice))
        return [_without_reward(result, calls) if isinstance(result, ForkBroke) else result for result in results]

    async def unusable(self, owner: str, sources: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return (path, why) of each source that cannot grade. sources: {path: code}. Raises WorkerBroke."""
        async with self._turn(owner, "check"):
            reasons = await self._apart({"kind": "code"}, list(sources.values()), CHECK)
        return [(path, str(why)) for path, why in zip(sources, reasons, strict=True) if why]

    async def refused_items(
        self, owner: str, schema: Any, items: Sequence[Any], bounds: Bounds = SCHEMA
    ) -> list[tuple[int, str]]:
        """Return (index, why) of each item that does not follow a JSON schema; (-1, why) if the schema is invalid.
        Raises WorkerBroke, or ForkBroke beyond the bounds."""
        async with self._turn(owner, "check"):
            verdicts = await self._together({"kind": "jsonschema", "schema": schema}, items, bounds)
        if verdicts and verdicts[0][0]:
            return [(-1, verdicts[0][1])]
        return [(place, why) for place, (_, why) in enumerate(verdicts) if why]

    async def refused_schema(self, owner: str, schema: Mapping[str, Any]) -> str:
        """Return why `schema` is not a JSON schema, "" if it is valid. Raises WorkerBroke."""
        # The item {} may not follow the schema: only the verdict on the schema counts here.
        refused = await self.refused_items(owner, dict(schema), [{}])
        return next((why for place, why in refused if place < 0), "")

    async def stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # the worker's children die with it
            await self._process.wait()
        self._process = self._control = None

    def _turn(self, owner: str, lane: str) -> asyncio.Lock:
        return self._turns.setdefault((owner, lane), asyncio.Lock())

    async def _apart(self, head: dict[str, Any], rows: Sequence[Any], bounds: Bounds) -> list[Any]:
        """Run each row in its own child; return each row's result, or its ForkBroke: then users' code and models'
        answers cannot change other rows' results. Raises WorkerBroke."""
        results: list[Any] = []
        for row in rows:
            if len(results) == MOST_BROKEN and all(isinstance(result, ForkBroke) for result in results):
                why = f"it was not run, because the first {MOST_BROKEN} calls all ended without a result"
                return results + [NotRun(why)] * (len(rows) - MOST_BROKEN)
            try:
                results += await self._together(head, [row], bounds)
            except ForkBroke as error:
                results.append(error)
        return results

    async def _together(self, head: dict[str, Any], rows: Sequence[Any], bounds: Bounds) -> list[Any]:
        """Run all rows in one child of the worker; return each row's result. Raises ForkBroke, WorkerBroke."""
        try:
            return await self._results(head, rows, bounds)
        except ForkBroke:
            raise
        except WorkerBroke:  # another owner's request may have crashed the worker
            await asyncio.sleep(RETRY_S)
            return await self._results(head, rows, bounds)

    async def _results(self, head: dict[str, Any], rows: Sequence[Any], bounds: Bounds) -> list[Any]:
        """Do what `_together` does, without a retry."""
        # Encode in a thread and line by line, so that coroutines run meanwhile: a request may have 64 MiB of items.
        lines = await asyncio.to_thread(lambda: [json.dumps(row).encode() + b"\n" for row in (head, *rows)])
        read: Callable[[bytes], Any] = _GRADED.validate_json if head["kind"] == "grade" else json.loads
        loads = [name for name in LOADED if name.encode() in lines[0]]
        message = {"loads": loads, "nice": bounds.nice, "memory_bytes": bounds.memory_bytes, "cpu_s": bounds.cpu_s}
        control, worker = await self._started()
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [json.dumps(message).encode()], [theirs.fileno()])
            except OSError as error:
                mine.close()
                raise WorkerBroke(f"the grading process ended: {error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=mine, limit=_RESULT_BYTES)
        child, results = None, []
        try:
            async with asyncio.timeout(START_S):
                # The child waits for its request, so the pid cannot belong to another process yet.
                child = os.pidfd_open(int(await reader.readuntil()))
            writer.writelines(lines)
            writer.write_eof()
            for _ in rows:
                async with asyncio.timeout(bounds.time_s):
                    results.append(read(await reader.readuntil()))
            return results
        except TimeoutError:
            if child is None:
                raise WorkerBroke(f"no grading process started within {START_S:g} s") from None
            raise ForkBroke(f"it took longer than {bounds.time_s:g} s") from None
        except asyncio.LimitOverrunError:
            raise ForkBroke(f"its result is larger than {_RESULT_BYTES >> 10} KiB") from None
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            await asyncio.sleep(_REAPED_S)
            if child is None or worker.returncode is not None:
                raise WorkerBroke(f"the grading process ended: {error}") from None
            limits = f"it may use {bounds.memory_bytes >> 30} GiB of memory and {bounds.cpu_s:g} s of CPU"
            raise ForkBroke(f"its process ended without a result; {limits}") from None
        finally:
            writer.close()
            if child is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                os.close(child)

    async def _started(self) -> tuple[socket.socket, asyncio.subprocess.Process]:
        async with self._starting:
            if self._control is None or self._process is None or self._process.returncode is not None:
                if self._control is not None:
                    self._control.close()
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        *(sys.executable, "-I", "-c", _BEGIN, str(theirs.fileno())),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        # Users' code can read folder and environment, so these reveal nothing of the box.
                        cwd="/",
                        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
                    )
            return self._control, self._process


def _without_reward(why: ForkBroke, calls: int) -> Graded:
    """Return the result of a sample that crashed its process. calls: number of calls of users' code per sample."""
    errors = GradingErrors(other_error=True)
    if calls and not isinstance(why, NotRun):
        errors = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=str(why))
    return Graded(0.0, False, errors=errors, messages=[str(why)])


# --- the worker


def refusal() -> str:
    """Return why users' code cannot run on this machine; "" if it can."""
    lack = missing()
    return f"python graders do not run on this machine, which cannot confine them: {lack}" if lack else ""


def main() -> None:
    die_with_parent()
    dies_as(DiesAs.TRIAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children do not become zombies
    # Import what most graders use, and prepare the rules that confine a child, once for all forks. numpy imports its
    # random module lazily, which would take half of a fork's time.
    import numpy.random  # noqa: F401
    from rapidfuzz import fuzz  # noqa: F401

    prepare_confinement()
    _readable()
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not descriptors:
            return
        bounds = json.loads(message)
        _load(bounds.pop("loads"))
        if os.fork() == 0:
            serve(descriptors[0], **bounds)
        os.close(descriptors[0])


def _load(names: Iterable[str]) -> None:
    for module in (module for name in names for module in LOADED[name]):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - code that imports the module gets the error again
            print(f"{module} cannot be imported: {error!r}", file=sys.stderr)


def serve(client: int, nice: int, memory_bytes: int, cpu_s: int) -> NoReturn:
    """Answer the request from the socket `client`, and end this process, a fork of the worker."""
    try:
        die_with_parent()
        os.nice(nice)
        os.dup2(client, 3)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))
        os.closerange(4, 1 << 16)  # close the worker's files
        with open(3, "wb", closefd=False) as out, open(3, "rb", closefd=False) as lines:
            out.write(b"%d\n" % os.getpid())
            out.flush()
            unconfined = _confine(memory_bytes, cpu_s)
            for result in results(json.loads(next(lines)), map(json.loads, lines), unconfined):
                text = json.dumps(result, default=asdict, ensure_ascii=False)
                # JSON and users' code may contain a lone surrogate, which UTF-8 cannot encode.
                out.write(text.encode(errors="replace") + b"\n")
                out.flush()
    finally:
        os._exit(0)


def _confine(memory_bytes: int, cpu_s: int) -> str:
    """Confine this process; return why that failed, or "". CPU and memory limits hold in any case."""
    try:
        confine(_readable(), memory_bytes, cpu_s)
        return ""
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        return f"python graders cannot be confined here: {error.strerror or error}"


@cache
def _readable() -> tuple[Path, ...]:
    """Return the folders of Python, its packages and shared libraries."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(Path(path) for path in (*sorted(paths), *site.getsitepackages(), *_LIBRARIES))


def results(request: dict[str, Any], rows: Iterable[Any], unconfined: str) -> Iterator[Any]:
    """Yield the result of each row of a request. unconfined: why no users' code may run here, or "". Rows by "kind":

    grade: {"sample", "item", "answers"} by "grader" -> Graded.
    code: a source -> why it cannot grade, "" if it can.
    jsonschema: an item by "schema" -> refused_items.
    """
    match request["kind"]:
        case "jsonschema":
            yield from refused_items(request["schema"], rows)
        case "code":
            yield from (unconfined or why_unusable(source) for source in rows)
        case _:
            grader, run = parse(request["grader"]), partial(run_python, unconfined)
            for row in rows:
                answers = {name: ModelAnswer(**of) for name, of in row["answers"].items()}
                yield grade(grader, Sample(**row["sample"]), row["item"], answers, run)


def refused_items(schema: Any, items: Iterable[Any]) -> Iterator[tuple[bool, str]]:
    """Yield for each item: whether the schema itself is invalid, and why the item does not follow it, or "".

    Patterns can take for ever, and references can be circular: only a child may call this."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    fault = ""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path))[:200]
        fault = f"it is not a JSON schema{' at ' + where if where else ''}: {error.message[:500]}"
    # Without a registry, `$ref` would open files of the box and addresses that only the box can reach.
    validator = jsonschema.Draft202012Validator(schema, registry=Registry())
    for item in items:
        try:
            error = None if fault else next(validator.iter_errors(item), None)
            path = "".join(f".{step}" for step in error.absolute_path) if error else ""
            yield bool(fault), f"item{path}: {error.message[:500]}" if error else fault
        except RecursionError:
            yield True, "the schema refers to itself without end, or the schema or an item is nested too deep"
        except Unresolvable as error:
            yield True, f"the reference {error.ref[:200]!r} leads nowhere; expected a place in the schema"


def run_python(unconfined: str, source: str, sample: dict[str, Any], item: Any) -> float:
    """Return the number that `grade(sample, item)` returns. Call it only in a confined child. Raises GradingFailed."""
    if unconfined:
        flags = GradingErrors(python_grader_server_error=True, python_grader_server_error_type=unconfined)
        raise GradingFailed(unconfined, flags)
    try:
        reward = _function(source)(sample, item)
        # numpy's numbers and True are accepted too.
        if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
            raise _Unfit(f"grade() returned {type(reward).__name__}; expected a number")
        return float(reward)
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; it is reported
        why = _described(error)
        flags = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=why)
        raise GradingFailed(why, flags) from None


class _Unfit(Exception):
    """The code cannot grade; the message says why."""


def why_unusable(source: str) -> str:
    """Return why the source cannot grade; "" if its module runs and has a function `grade(sample, item)`."""
    try:
        function = _function(source)
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise _Unfit("`grade` is a coroutine or a generator; expected a function that returns a number")
        with suppress(ValueError):  # a builtin may have no signature
            signature = inspect.signature(function)
            try:
                signature.bind({}, {})
            except TypeError as error:
                raise _Unfit(f"`grade` is called as `grade(sample, item)`: {error}") from None
    except BaseException as error:  # noqa: BLE001 - as above
        return _described(error)
    return ""


def _function(source: str) -> Callable[..., Any]:
    """Return the function `grade` of a source. Raises _Unfit, and any error of the code."""
    import random

    import numpy as np

    random.seed()
    np.random.seed()
    # Register the module, since dataclasses, pydantic and pickle look it up by the module name in its classes. Compile
    # it without this file's `annotations` import.
    sys.modules["grader"] = module = ModuleType("grader")
    exec(compile(source, "grader.py", "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, "grade", None)
    if not callable(function):
        raise _Unfit("the source defines no function `grade(sample, item)`")
    return function


def _described(error: BaseException) -> str:
    if isinstance(error, _Unfit):
        return str(error)
    read = traceback.TracebackException.from_exception(error)  # str() of a ValueError's own text cannot fail
    places = [f" (line {frame.lineno})" for frame in read.stack if frame.filename == "grader.py"]
    return f"{type(error).__name__}: {read}"[:_DETAIL_CHARACTERS] + "".join(places[-1:])
