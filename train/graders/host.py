"""The caller's side of grading in a worker process. A worker starts on the first request, ends after a while without
work, and is killed and started again when it takes too long or breaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from train.graders.code import LOADED, named
from train.graders.errors import GradingErrors
from train.graders.graders import Grader, Python, leaves
from train.graders.grading import Graded, ModelAnswer
from train.graders.sandbox import TIME_S
from train.graders.templates import Sample
from train.graders.worker import CHECK_BYTES, CHECK_CPU_S, END, FORK, LENGTH, LOAD, RESULT, WAITED_FOR, graded_of

OWN_TIME_S = 60.0
"""Seconds that a batch may take in addition to the time of its python graders."""
IDLE_S = 300.0
_RESULT_BYTES = 32 << 20
_AT_ONCE_BYTES = 256 << 10


class WorkerBroke(Exception):
    """The worker ended or took too long; the request has no answer."""


class ForkBroke(WorkerBroke):
    """The request ended the process that handled it, for example by its limits."""


class GraderHost:
    """One worker; requests wait for each other. Call `stop` at the end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._loaded = set[str]()
        self._lock = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None

    async def requests(self, grader: Grader, samples: Sequence[tuple[Sample, Any]]) -> list[dict[str, dict[str, Any]]]:
        """The questions to models for each sample, by the name of the grader that asks."""
        reply = await self._ask(await _written(grader, samples, None, only_requests=True), OWN_TIME_S)
        return list(reply["requests"])

    async def grade(
        self,
        grader: Grader,
        samples: Sequence[tuple[Sample, Any]],
        answers: Sequence[dict[str, ModelAnswer]] | None = None,
        waited_for: bool = False,
    ) -> list[Graded]:
        """In the order of the samples. A sample that breaks the worker has no reward, and the flag `other_error`.
        waited_for: work of the box stands still meanwhile; see worker.WAITED_FOR_CPU_S."""
        code = [leaf.source for leaf in leaves(grader).values() if isinstance(leaf, Python)]
        most_s = OWN_TIME_S + TIME_S * len(code) * len(samples)
        try:
            loads = set[str]().union(*map(named, code))
            reply = await self._ask(await _written(grader, samples, answers), most_s, waited_for, loads)
            return [graded_of(one) for one in reply["graded"]]
        except WorkerBroke as error:
            if len(samples) > 1:
                alone = [(one, [answers[place]] if answers else None) for place, one in enumerate(samples)]
                return [graded for one, given in alone for graded in await self.grade(grader, [one], given, waited_for)]
            return [Graded(0.0, False, errors=GradingErrors(other_error=True), messages=[str(error)])]

    async def refused_items(self, schema: Any, items: Sequence[Any], cpu_s: int = CHECK_CPU_S) -> list[tuple[int, str]]:
        """(place, why) of the first few items that do not follow a JSON schema; place -1: it is not a schema. Raises
        WorkerBroke, for one that takes more than `cpu_s` or CHECK_BYTES ForkBroke."""
        try:
            question = {"schema": schema, "items": list(items), "cpu_s": cpu_s}
            reply = await self._ask(json.dumps(question).encode(), OWN_TIME_S)
        except ForkBroke as error:
            limits = f"{cpu_s} s of CPU and {CHECK_BYTES >> 30} GiB of memory"
            raise ForkBroke(f"{error}; to check {len(items)} items, {limits} are allowed") from None
        return [(place, why) for place, why in reply["refused"]]

    async def unusable(self, sources: Mapping[str, str]) -> list[tuple[str, str]]:
        """(path, why) of the code, by its path, that cannot grade (code.py). Raises WorkerBroke, for code that
        cannot be read within its limits ForkBroke."""
        reply = await self._ask(json.dumps({"sources": dict(sources)}).encode(), OWN_TIME_S)
        return [(path, why) for path, why in reply["unusable"]]

    async def stop(self) -> None:
        async with self._lock:
            await self._end()

    async def _ask(
        self, written: bytes, most_s: float, waited_for: bool = False, loads: Collection[str] = ()
    ) -> dict[str, Any]:
        """loads: what of LOADED its code names. Raises WorkerBroke."""
        async with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                async with asyncio.timeout(most_s):
                    reply = await self._exchange(written, waited_for, loads)
            except TimeoutError:
                await self._end()
                raise WorkerBroke(f"grading took longer than {most_s:.0f} s") from None
            except ForkBroke:
                await self._end()
                raise
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                await self._end()
                raise WorkerBroke(f"the process that grades ended: {error}") from None
            except asyncio.CancelledError:
                await self._end()
                raise
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_if_idle)
            return reply

    async def _exchange(self, written: bytes, waited_for: bool, loads: Collection[str]) -> dict[str, Any]:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        for place, name in enumerate(LOADED):
            if name in loads and name not in self._loaded:
                process.stdin.write(LOAD + bytes([place]))
                self._loaded.add(name)
        process.stdin.write((WAITED_FOR if waited_for else FORK) + LENGTH.pack(len(written)) + written)
        await process.stdin.drain()
        reply: dict[str, Any] | None = None
        if (mark := await process.stdout.readexactly(1)) == RESULT:
            (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            if length > _RESULT_BYTES:
                raise ValueError(f"an answer of {length} bytes")
            answer = await process.stdout.readexactly(length)
            reply = json.loads(answer) if length <= _AT_ONCE_BYTES else await asyncio.to_thread(json.loads, answer)
            mark = await process.stdout.readexactly(1)
        status = (await process.stdout.readexactly(1))[0]
        if mark != END or status or reply is None:
            # The next fork would read the rest of this request.
            raise ForkBroke(f"the process that grades ended with {status}")
        return reply

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-c",
                f"import sys; sys.path.insert(0, {os.path.abspath(_ROOT)!r}); {_BEGIN}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Contains nothing of the box's environment or of its data's location: users' code can read it.
                cwd="/",
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
                limit=1 << 20,
            )
            self._loaded.clear()
        return self._process

    def _end_if_idle(self) -> None:
        if not self._lock.locked() and self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _end(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._process = None


_ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
_BEGIN = "from train.graders.worker import main; main()"


async def _written(
    grader: Grader,
    samples: Sequence[tuple[Sample, Any]],
    answers: Sequence[dict[str, ModelAnswer]] | None,
    *,
    only_requests: bool = False,
) -> bytes:
    """The request to a worker, as JSON. It is written sample by sample, with the loop free in between: the items of one
    question of a job may be 64 MiB together, and this process serves others."""
    pieces, size = [], 0
    for place, (sample, item) in enumerate(samples):
        one = {
            "sample": {"output_text": sample.output_text, "output_tools": sample.output_tools},
            "item": item,
            "answers": {name: asdict(answer) for name, answer in answers[place].items()} if answers else {},
        }
        pieces.append(json.dumps(one).encode())
        if (size := size + len(pieces[-1])) > _AT_ONCE_BYTES:
            size = 0
            await asyncio.sleep(0)
    known = {"grader": grader.model_dump(mode="json", exclude_unset=True), "only_requests": only_requests}
    return b'%b, "samples": [%b]}' % (json.dumps(known).encode()[:-1], b", ".join(pieces))
