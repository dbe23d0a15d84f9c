"""The caller's side of grading in another process (worker.py), in turns of owners."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakValueDictionary

from pydantic import TypeAdapter, ValidationError

from train.graders.errors import GradingErrors
from train.graders.graders import Grader, Python, leaves
from train.graders.grading import Graded, ModelAnswer
from train.graders.templates import Sample
from train.graders.worker import loads_of

MAX_BUSY = 4
"""How many owners' samples are graded at the same time; others wait for one of them."""
NICENESS = 10
"""Higher than that of the box's work, so that users' code yields to it."""
TIME_S = 120
"""Seconds for each python grader, as in OpenAI's API, like the memory."""
OWN_TIME_S = 60
"""Seconds for grading without code."""
MOST_BROKEN = 3
"""If this many calls of code end without a result before any returns, the request makes no more of them: otherwise a
job's devices would wait two minutes for each of its answers."""
START_S = 60.0
"""For the worker, which imports packages for a second or more, to fork a child."""
RETRY_S = 1.0
"""Before a retry: the ended process is reaped meanwhile, and a machine without memory may have some."""
_RESULT_BYTES = 256 << 10  # of one sample
_REAPED_S = 0.1
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
_BEGIN = "from train.graders.worker import main; main()"
_GRADED = TypeAdapter(list[Graded])


class WorkerBroke(Exception):
    """The worker ended; the request has no answer, and is not at fault."""


class ForkBroke(WorkerBroke):
    """The request ended the process that handled it, or took too long."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one request. The clock also bounds what waits; the CPU limit refuses no honest request on a busy machine."""

    time_s: float
    cpu_s: int
    memory_bytes: int = 2 << 30


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
        answers: Sequence[dict[str, ModelAnswer]] | None = None,
        waited_for: bool = False,
    ) -> list[Graded]:
        """In the order of the samples; one that ends its process has no reward and a flag.

        waited_for: work of the box stands still meanwhile, so that the worker has its priority. Raises WorkerBroke.
        """
        given: Sequence[dict[str, ModelAnswer]] = answers or [{} for _ in samples]
        rows = [
            {"sample": asdict(sample), "item": item, "answers": {name: asdict(of) for name, of in by_name.items()}}
            for (sample, item), by_name in zip(samples, given, strict=True)
        ]
        calls = sum(isinstance(leaf, Python) for leaf in leaves(grader).values())
        graded, broken, returned = list[Graded](), 0, False
        async with self._turn(owner, "grade"), self._free:
            if not calls and len(rows) > 1:
                with suppress(ForkBroke):  # by one of them: then each has a process of its own
                    return await self._graded(grader, rows, calls, waited_for)
            for row in rows:
                if broken >= MOST_BROKEN and not returned:
                    why = f"it was not run: the first {MOST_BROKEN} calls all ended without a result"
                    graded.append(_broken(why, code=False))
                    continue
                try:
                    graded += await self._graded(grader, [row], calls, waited_for)
                    returned = True
                except ForkBroke as error:
                    broken += 1
                    graded.append(_broken(str(error), code=bool(calls)))
        return graded

    async def unusable(self, owner: str, sources: Mapping[str, str]) -> list[tuple[str, str]]:
        """(path, why) of the code, by its path, that cannot grade. Raises WorkerBroke."""
        reasons = []
        async with self._turn(owner, "check"):
            for path, source in sources.items():
                try:
                    why = json.loads(await self._ask({"kind": "code", "source": source}, [], CHECK))
                except ForkBroke as error:
                    why = str(error)
                reasons.append((path, str(why)))
        return [(path, why) for path, why in reasons if why]

    async def refused_items(
        self, owner: str, schema: Any, items: Sequence[Any], bounds: Bounds = SCHEMA
    ) -> list[tuple[int, str]]:
        """(place, why) of the first few items that do not follow a JSON schema; place -1: it is not a schema. Raises
        WorkerBroke, for one that takes more than its bounds ForkBroke."""
        async with self._turn(owner, "check"):
            head = {"kind": "schema", "schema": schema}
            answered = await self._ask(head, items, bounds, loads=["jsonschema"])
        return [(place, why) for place, why in json.loads(answered)]

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

    async def _graded(self, grader: Grader, rows: list[dict[str, Any]], calls: int, waited_for: bool) -> list[Graded]:
        """Raises WorkerBroke."""
        time_s = TIME_S * calls or OWN_TIME_S
        answered = await self._ask(
            {"kind": "grade", "grader": grader.as_given()},
            rows,
            Bounds(time_s, cpu_s=max(1, round(time_s))),
            loads=loads_of(grader),
            nice=0 if waited_for else NICENESS,
        )
        with suppress(ValidationError):
            if len(graded := _GRADED.validate_json(answered)) == len(rows):
                return graded
        raise ForkBroke("its process ended without a result: it wrote something else")  # users' code can

    async def _ask(
        self,
        head: dict[str, Any],
        samples: Sequence[Any],
        bounds: Bounds,
        loads: Collection[str] = (),
        nice: int = NICENESS,
    ) -> bytes:
        """The result of worker.answer, as JSON. loads: names of worker.LOADED. Raises WorkerBroke."""
        message = {"loads": list(loads), "nice": nice, "memory_bytes": bounds.memory_bytes, "cpu_s": bounds.cpu_s}
        for last_try in (False, True):
            try:
                mine = await self._child(json.dumps(message).encode())
                return await self._answered(mine, head, samples, bounds)
            except WorkerBroke as error:  # the worker ended, maybe at another owner's request
                if last_try or isinstance(error, ForkBroke):
                    raise
                await asyncio.sleep(RETRY_S)
        raise AssertionError("the last try returns or raises")

    async def _answered(
        self, mine: socket.socket, head: dict[str, Any], samples: Sequence[Any], bounds: Bounds
    ) -> bytes:
        most_bytes, worker = _RESULT_BYTES * (1 + len(samples)), self._process  # another may take its place meanwhile
        assert worker is not None
        reader, writer = await asyncio.open_unix_connection(sock=mine, limit=most_bytes)
        child = None
        try:
            async with asyncio.timeout(START_S):
                # It waits for its request, so that the number is its own.
                child = os.pidfd_open(int(await reader.readuntil()))
            async with asyncio.timeout(bounds.time_s):
                writer.writelines(await asyncio.to_thread(_lines, head, samples))
                writer.write_eof()
                return await reader.readuntil()
        except TimeoutError:
            if child is None:
                raise WorkerBroke(f"no process that grades started within {START_S:g} s") from None
            raise ForkBroke(f"it took longer than {bounds.time_s:g} s") from None
        except asyncio.LimitOverrunError:
            raise ForkBroke(f"its result is larger than {most_bytes >> 10} KiB") from None
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            if child is None or await _has_ended(worker):
                raise WorkerBroke(f"the process that grades ended: {error}") from None
            limits = f"it may use {bounds.memory_bytes >> 30} GiB of memory and {bounds.cpu_s:g} s of CPU"
            raise ForkBroke(f"its process ended without a result; {limits}") from None
        finally:
            writer.close()
            if child is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                os.close(child)

    async def _child(self, message: bytes) -> socket.socket:
        """The socket of a new child. Raises WorkerBroke."""
        control = await self._started()
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [message], [theirs.fileno()])
            except OSError as error:
                mine.close()
                raise WorkerBroke(f"the process that grades ended: {error}") from None
        return mine

    async def _started(self) -> socket.socket:
        async with self._starting:
            if self._control is None or self._process is None or self._process.returncode is not None:
                if self._control is not None:
                    self._control.close()
                self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-I",
                        "-c",
                        f"import sys; sys.path.insert(0, {_ROOT!r}); {_BEGIN}",
                        str(theirs.fileno()),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        # Contains nothing of the box's environment or of its data's location: users' code can read it.
                        cwd="/",
                        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
                    )
            return self._control


async def _has_ended(worker: asyncio.subprocess.Process) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(worker.wait(), _REAPED_S)
    return worker.returncode is not None


def _broken(why: str, *, code: bool) -> Graded:
    ran = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=why)
    return Graded(0.0, False, errors=ran if code else GradingErrors(other_error=True), messages=[why])


def _lines(head: dict[str, Any], samples: Sequence[Any]) -> list[bytes]:
    """A request. Line by line, so that other threads run in between: the items of one may be 64 MiB together."""
    return [json.dumps(one).encode() + b"\n" for one in (head, *samples)]
