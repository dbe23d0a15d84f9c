"""The caller's side of grading in another process (worker.py), in turns of owners."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from pydantic import TypeAdapter

from train.graders.graders import Grader, Python, leaves
from train.graders.grading import Graded, ModelAnswer
from train.graders.templates import Sample
from train.graders.worker import CHECK_S, OWN_TIME_S, SCHEMA_S, TIME_S, loads_of

MAX_BUSY = 4
"""How many owners' samples are graded at the same time; others wait for one of them."""
NICENESS = 10
"""Higher than that of the box's work, so that users' code yields to it."""
CHECK_CPU_S = 10
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
_BEGIN = "from train.graders.worker import main; main()"
_GRADED = TypeAdapter(list[Graded])
ANSWER_BYTES = 32 << 20
"""The largest answer: users' code has a part in it, and the box holds it in memory."""
RETRY_S = 1.0
"""Before a retry: the ended process is reaped meanwhile, and a machine without memory may have some."""


class WorkerBroke(Exception):
    """The worker ended or took too long; the request has no answer."""


class WorkerEnded(WorkerBroke):
    """The worker or a handler ended, maybe at another owner's request: a retry may succeed."""


class ForkBroke(WorkerBroke):
    """The request ended the process that handled it, for example by its limits."""


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
        head = {"kind": "grade", "grader": grader.as_given(), "nice": 0 if waited_for else NICENESS}
        given: list[dict[str, ModelAnswer]] = list(answers) if answers else [{} for _ in samples]
        lines = [
            {"sample": asdict(sample), "item": item, "answers": {name: asdict(of) for name, of in by_name.items()}}
            for (sample, item), by_name in zip(samples, given, strict=True)
        ]
        calls = sum(isinstance(leaf, Python) for leaf in leaves(grader).values()) * len(samples)
        async with self._turn(owner, "grade"), self._free:
            # Without code: for all samples together, then for each alone.
            limit_s = OWN_TIME_S * (1 + len(samples)) + TIME_S * calls
            ask = partial(self._ask, head, lines, limit_s, loads_of(grader))
            try:
                answered = await ask()
            except WorkerEnded:
                await asyncio.sleep(RETRY_S)
                answered = await ask()
        return _GRADED.validate_json(answered)

    async def unusable(self, owner: str, sources: Mapping[str, str]) -> list[tuple[str, str]]:
        """(path, why) of the code, by its path, that cannot grade. Raises WorkerBroke."""
        async with self._turn(owner, "check"):
            limit_s = OWN_TIME_S + CHECK_S * len(sources)
            answered = await self._ask({"kind": "code", "sources": dict(sources)}, [], limit_s)
        return [(path, why) for path, why in json.loads(answered)]

    async def refused_items(
        self, owner: str, schema: Any, items: Sequence[Any], cpu_s: int = CHECK_CPU_S
    ) -> list[tuple[int, str]]:
        """(place, why) of the first few items that do not follow a JSON schema; place -1: it is not a schema. Raises
        WorkerBroke, for one that takes more than `cpu_s` ForkBroke."""
        async with self._turn(owner, "check"):
            head = {"kind": "schema", "schema": schema, "cpu_s": cpu_s}
            answered = await self._ask(head, list(items), SCHEMA_S + OWN_TIME_S, ["jsonschema"])
        return [(place, why) for place, why in json.loads(answered)]

    async def refused_schema(self, owner: str, schema: Mapping[str, Any]) -> str:
        """Why it is not a JSON schema, "" if it is one. Raises WorkerBroke."""
        # The empty object may lack what the schema requires: only the verdict on the schema counts here.
        found = await self.refused_items(owner, dict(schema), [{}])
        return next((why for place, why in found if place < 0), "")

    async def stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()  # its forks die with it
            await self._process.wait()
        self._process = self._control = None

    def _turn(self, owner: str, lane: str) -> asyncio.Lock:
        return self._turns.setdefault((owner, lane), asyncio.Lock())

    async def _ask(
        self, head: dict[str, Any], samples: Sequence[Any], limit_s: float, loads: Collection[str] = ()
    ) -> bytes:
        """The result of worker.answer, as JSON. loads: names of worker.LOADED. Raises WorkerBroke."""
        control = await self._started()
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [" ".join(loads).encode()], [theirs.fileno()])
            except OSError as error:
                mine.close()
                raise WorkerEnded(f"the process that grades ended: {error}") from None
        reader, writer = await asyncio.open_unix_connection(sock=mine, limit=ANSWER_BYTES)
        try:
            async with asyncio.timeout(limit_s):
                writer.writelines(await asyncio.to_thread(_lines, {"nice": NICENESS, **head}, samples))
                await writer.drain()
                answered = await reader.readuntil()
        except TimeoutError:
            raise WorkerBroke(f"grading took longer than {limit_s:.0f} s") from None
        except asyncio.LimitOverrunError:
            raise ForkBroke(f"its results are larger than {ANSWER_BYTES >> 20} MiB") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerEnded(f"the process that grades ended: {error}") from None
        finally:
            writer.close()  # which ends what still runs for it
        if answered.startswith(_RESULT):
            return answered[len(_RESULT) : -len(b"}\n")]
        raise ForkBroke(str(json.loads(answered)["broke"]))

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


_RESULT = b'{"result": '


def _lines(head: dict[str, Any], samples: Sequence[Any]) -> list[bytes]:
    """A request. Line by line, so that other threads run in between: the items of one may be 64 MiB together."""
    return [json.dumps(one).encode() + b"\n" for one in (head, *samples)] + [b"\n"]
