"""The caller's side of grading in a worker process. A worker starts on the first request, and is killed and started
again when it takes too long or breaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from train.graders.errors import GradingErrors
from train.graders.graders import Grader, Python, leaves
from train.graders.grading import Graded, ModelAnswer
from train.graders.sandbox import CHECK_S, TIME_S
from train.graders.templates import Sample
from train.graders.worker import CHECK_BYTES, CHECK_CPU_S, END, LENGTH, RESULT, graded_of, loads_of

OWN_TIME_S = 60.0
"""Seconds that a request may take in addition to the time of its python graders."""
_RESULT_BYTES = 32 << 20
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
_BEGIN = "from train.graders.worker import main; main()"


class WorkerBroke(Exception):
    """The worker ended or took too long; the request has no answer."""


class ForkBroke(WorkerBroke):
    """The request ended the process that handled it, for example by its limits."""


class GraderHost:
    """One worker; requests wait for each other. Call `stop` at the end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def requests(self, grader: Grader, samples: Sequence[tuple[Sample, Any]]) -> list[dict[str, dict[str, Any]]]:
        """The questions to models for each sample, by the name of the grader that asks."""
        written = await asyncio.to_thread(_written, grader, samples, None, only_requests=True)
        return list((await self._ask(written, OWN_TIME_S))["requests"])

    async def grade(
        self,
        grader: Grader,
        samples: Sequence[tuple[Sample, Any]],
        answers: Sequence[dict[str, ModelAnswer]] | None = None,
        waited_for: bool = False,
    ) -> list[Graded]:
        """In the order of the samples. A sample that breaks the worker has no reward, and the flag `other_error`.
        waited_for: work of the box stands still meanwhile, so that the worker has its priority."""
        calls = sum(isinstance(leaf, Python) for leaf in leaves(grader).values()) * len(samples)
        try:
            written = await asyncio.to_thread(_written, grader, samples, answers)
            reply = await self._ask(written, OWN_TIME_S + TIME_S * calls, waited_for, loads_of(grader))
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
        """(path, why) of the code, by its path, that cannot grade (sandbox.why_unusable). Raises WorkerBroke."""
        written = json.dumps({"sources": dict(sources)}).encode()
        reply = await self._ask(written, OWN_TIME_S + CHECK_S * len(sources))
        return [(path, why) for path, why in reply["unusable"]]

    async def stop(self) -> None:
        async with self._lock:
            await self._end()

    async def _ask(
        self, written: bytes, most_s: float, waited_for: bool = False, loads: Collection[str] = ()
    ) -> dict[str, Any]:
        """loads: names of worker.LOADED. Raises WorkerBroke."""
        header = json.dumps({"loads": list(loads), "waited_for": waited_for}).encode()
        async with self._lock:
            try:
                async with asyncio.timeout(most_s):
                    return await self._exchange(header, written)
            except TimeoutError:
                await self._end()
                raise WorkerBroke(f"grading took longer than {most_s:.0f} s") from None
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                await self._end()
                raise WorkerBroke(f"the process that grades ended: {error}") from None
            except BaseException:  # the next fork would read the rest of this request
                await self._end()
                raise

    async def _exchange(self, *frames: bytes) -> dict[str, Any]:
        process = await self._started()
        assert process.stdin is not None and process.stdout is not None
        for frame in frames:
            process.stdin.write(LENGTH.pack(len(frame)) + frame)
        await process.stdin.drain()
        reply: dict[str, Any] | None = None
        if (mark := await process.stdout.readexactly(1)) == RESULT:
            (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
            if length > _RESULT_BYTES:
                raise ValueError(f"an answer of {length} bytes")
            reply = await asyncio.to_thread(json.loads, await process.stdout.readexactly(length))
            mark = await process.stdout.readexactly(1)
        status = (await process.stdout.readexactly(1))[0]
        if mark != END or status or reply is None:
            raise ForkBroke(f"the process that grades ended with {status}")
        return reply

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-c",
                f"import sys; sys.path.insert(0, {_ROOT!r}); {_BEGIN}",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # Contains nothing of the box's environment or of its data's location: users' code can read it.
                cwd="/",
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
                limit=1 << 20,
            )
        return self._process

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._process = None


def _written(
    grader: Grader,
    samples: Sequence[tuple[Sample, Any]],
    answers: Sequence[dict[str, ModelAnswer]] | None,
    *,
    only_requests: bool = False,
) -> bytes:
    """The request to a worker, as JSON. Sample by sample, so that other threads run in between: the items of one
    question of a job may be 64 MiB together."""
    pieces = []
    for place, (sample, item) in enumerate(samples):
        one = {
            "sample": {"output_text": sample.output_text, "output_tools": sample.output_tools},
            "item": item,
            "answers": {name: asdict(answer) for name, answer in answers[place].items()} if answers else {},
        }
        pieces.append(json.dumps(one).encode())
    known = {"grader": grader.model_dump(mode="json", exclude_unset=True), "only_requests": only_requests}
    return b'%b, "samples": [%b]}' % (json.dumps(known).encode()[:-1], b", ".join(pieces))
