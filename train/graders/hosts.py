"""The caller's side of grading in another process (worker.py), with a fair queue of owners."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

from pydantic import TypeAdapter

from train.graders.errors import GradingErrors
from train.graders.graders import Grader, ModelAnswer, Python, leaves
from train.graders.grading import Graded
from train.graders.templates import Sample
from train.graders.worker import LOADED

MAX_BUSY = 4
"""How many owners' samples are graded at the same time; others wait for one of them."""
NICENESS = 10
"""Higher than that of the box's work, so that users' code yields to it."""
TIME_S = 120
"""Seconds for each python grader, as in OpenAI's API, like the memory."""
OWN_TIME_S = 60
"""Seconds for grading without code."""
MOST_BROKEN = 3
"""If this many calls end without a result before any returns, the request makes no more of them: otherwise a job's
devices would wait two minutes for each of its answers."""
START_S = 60.0
"""For the worker, which imports packages for a second or more, to fork a child."""
RETRY_S = 1.0
"""Before the one retry: the ended worker is reaped meanwhile, and a machine without memory may have some."""
_RESULT_BYTES = 256 << 10  # of one sample
_REAPED_S = 0.1  # after which it is known whether the worker has ended
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
_BEGIN = f"import sys; sys.path.insert(0, {_ROOT!r}); from train.graders.worker import main; main()"
_GRADED = TypeAdapter(Graded)


class WorkerBroke(Exception):
    """The worker ended; the request has no answer, and is not at fault."""


class ForkBroke(WorkerBroke):
    """The request ended the process that handled it, or took too long."""


class NotRun(ForkBroke):
    """The calls before it all ended their processes."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """time_s: of each result. The rest: of a process. The clock also bounds what waits; the CPU limit refuses no honest
    request on a busy machine."""

    time_s: float
    cpu_s: int
    memory_bytes: int = 2 << 30
    nice: int = NICENESS


CHECK = Bounds(time_s=30, cpu_s=30)
SCHEMA = Bounds(time_s=300, cpu_s=15)


class GraderHosts:
    """`stop` it in the end. Requests of an owner wait for each other before they take a place from other owners; checks
    of code and schemas do not wait for grading, which may take minutes."""

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
        """In the order of the samples; one that ends its process has no reward and a flag.

        waited_for: work of the box stands still meanwhile, so that the worker has its priority. Raises WorkerBroke.
        """
        head = {"kind": "grade", "grader": grader.as_given()}
        rows = [
            {"sample": asdict(sample), "item": item, "answers": {name: asdict(of) for name, of in by_name.items()}}
            for (sample, item), by_name in zip(samples, answers, strict=True)
        ]
        nice = 0 if waited_for else NICENESS
        calls = sum(isinstance(leaf, Python) for leaf in leaves(grader).values())
        time_s = calls * TIME_S or OWN_TIME_S
        async with self._turn(owner, "grade"), self._free:
            with suppress(ForkBroke):  # one sample did: the others have a process of their own then
                if not calls:
                    return await self._together(head, rows, Bounds(time_s, time_s * max(1, len(rows)), nice=nice))
            results = await self._apart(head, rows, Bounds(time_s, time_s, nice=nice))
        return [_without_reward(result, calls) if isinstance(result, ForkBroke) else result for result in results]

    async def unusable(self, owner: str, sources: Mapping[str, str]) -> list[tuple[str, str]]:
        """(path, why) of the code, by its path, that cannot grade. Raises WorkerBroke."""
        async with self._turn(owner, "check"):
            reasons = await self._apart({"kind": "code"}, list(sources.values()), CHECK)
        return [(path, str(why)) for path, why in zip(sources, reasons, strict=True) if why]

    async def refused_items(
        self, owner: str, schema: Any, items: Sequence[Any], bounds: Bounds = SCHEMA
    ) -> list[tuple[int, str]]:
        """(place, why) of the items that do not follow a JSON schema; place -1: it is not a schema. Raises WorkerBroke,
        for one that takes more than its bounds ForkBroke."""
        async with self._turn(owner, "check"):
            verdicts = await self._together({"kind": "jsonschema", "schema": schema}, items, bounds)
        if verdicts and verdicts[0][0]:
            return [(-1, verdicts[0][1])]
        return [(place, why) for place, (_, why) in enumerate(verdicts) if why]

    async def refused_schema(self, owner: str, schema: Mapping[str, Any]) -> str:
        """Why it is not a JSON schema, "" if it is one. Raises WorkerBroke."""
        # The empty object may lack what the schema requires: only the verdict on the schema counts here.
        refused = await self.refused_items(owner, dict(schema), [{}])
        return next((why for place, why in refused if place < 0), "")

    async def stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # its forks die with it
            await self._process.wait()
        self._process = self._control = None

    def _turn(self, owner: str, lane: str) -> asyncio.Lock:
        return self._turns.setdefault((owner, lane), asyncio.Lock())

    async def _apart(self, head: dict[str, Any], rows: Sequence[Any], bounds: Bounds) -> list[Any]:
        """As `_together`, each row in a child of its own, or the ForkBroke of one without a result: what users' code or
        a model's answer does to its process changes no other result."""
        results: list[Any] = []
        for row in rows:
            if len(results) == MOST_BROKEN and all(isinstance(result, ForkBroke) for result in results):
                why = f"it was not run: the first {MOST_BROKEN} calls all ended without a result"
                return results + [NotRun(why)] * (len(rows) - MOST_BROKEN)
            try:
                results += await self._together(head, [row], bounds)
            except ForkBroke as error:
                results.append(error)
        return results

    async def _together(self, head: dict[str, Any], rows: Sequence[Any], bounds: Bounds) -> list[Any]:
        """The result of each row, from one child of the worker. Raises WorkerBroke."""
        try:
            return await self._results(head, rows, bounds)
        except ForkBroke:
            raise
        except WorkerBroke:  # maybe at another owner's request
            await asyncio.sleep(RETRY_S)
            return await self._results(head, rows, bounds)

    async def _results(self, head: dict[str, Any], rows: Sequence[Any], bounds: Bounds) -> list[Any]:
        """As `_together`, without a retry."""
        # In a thread and line by line, so that others run in between: the items of a request may be 64 MiB together.
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
                raise WorkerBroke(f"the process that grades ended: {error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=mine, limit=_RESULT_BYTES)
        child, results = None, []
        try:
            async with asyncio.timeout(START_S):
                # It waits for its request, so that the number is its own.
                child = os.pidfd_open(int(await reader.readuntil()))
            writer.writelines(lines)
            writer.write_eof()
            for _ in rows:
                async with asyncio.timeout(bounds.time_s):
                    results.append(read(await reader.readuntil()))
            return results
        except TimeoutError:
            if child is None:
                raise WorkerBroke(f"no process that grades started within {START_S:g} s") from None
            raise ForkBroke(f"it took longer than {bounds.time_s:g} s") from None
        except asyncio.LimitOverrunError:
            raise ForkBroke(f"its result is larger than {_RESULT_BYTES >> 10} KiB") from None
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            await asyncio.sleep(_REAPED_S)
            if child is None or worker.returncode is not None:
                raise WorkerBroke(f"the process that grades ended: {error}") from None
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
                        # Contains nothing of the box's environment or of its data's location: users' code can read it.
                        cwd="/",
                        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
                    )
            return self._control, self._process


def _without_reward(why: ForkBroke, calls: int) -> Graded:
    """calls: of users' code."""
    errors = GradingErrors(other_error=True)
    if calls and not isinstance(why, NotRun):
        errors = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=str(why))
    return Graded(0.0, False, errors=errors, messages=[str(why)])
