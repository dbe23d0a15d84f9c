"""A controller of which several owners have begun as much as one owner may, and what the loop does for it, counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
from fastapi import FastAPI

from appliance.controller.app import create_app
from appliance.controller.context.context import ControllerContext
from appliance.controller.files import upload_routes
from appliance.controller.http.peers import FromBox
from appliance.controller.interfaces.config import OwnerBounds
from appliance.controller.interfaces.ports import EngineAnswer
from appliance.store.database import Database
from appliance.store.objects import files, uploads
from appliance.store.records import canaries, keys
from appliance.store.rows import (
    CanaryRow,
    FileRow,
    KeyRow,
    UploadPartRow,
)
from appliance.wiring.routing_table import BusRouting
from appliance.wiring.wishes import Circumstances, Wishes
from runtime.background_tasks import BackgroundTasks
from scheduler.core.workload import Demand
from tests.simulator.control_plane import SimulatedEngines, simulated_context
from tests.unit.controller.conftest import chat_lines, insert_model
from tests.unit.loop_cost import counted
from tests.unit.loop_cost.fill import CRITERION, MODEL
from tests.unit.loop_cost.meter import Meter, Told
from tests.unit.loop_cost.sized import call

ITEMS, LINES, CANARIES = 50, 200, 200
PARTS = 300
LINES_AT_ENGINES = 64
BOUNDS = OwnerBounds()
LINE = (
    b'{"custom_id": "%d", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "starter", '
    b'"messages": [{"role": "user", "content": "hi"}]}}\n'
)


_NOT_HERE = ("data checks", "rows of the store are told to who follows")
"""Rounds that test_loop_cost.py counts with rows of its own, and one of processes."""


@dataclass
class Unfinished:
    """told: by what happens. begun: how many of each there were."""

    told: dict[str, Told] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    by: dict[str, dict[str, int]] = field(default_factory=dict)


def measure(folder: Path, owners: int, *, sources: bool = False) -> Unfinished:
    meter = Meter(sources)
    with meter.installed():
        return asyncio.run(_measure(folder, owners, meter))


class _Engines(SimulatedEngines):
    """They take some lines, and answer those that `answer` lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = LINES_AT_ENGINES
        self._may_answer = asyncio.Semaphore(0)
        self.rule = self._waits

    async def _waits(self, _: dict[str, Any]) -> EngineAnswer | None:
        await self._may_answer.acquire()
        return None

    def answer(self, number: int) -> None:
        for _ in range(number):
            self._may_answer.release()


@contextmanager
def _rounds_are_begun_here() -> Iterator[dict[str, Callable[[], Awaitable[None]]]]:
    rounds: dict[str, Callable[[], Awaitable[None]]] = {}

    def keep_every(_: BackgroundTasks, name: str, once: Any, every_s: float, **__: Any) -> asyncio.Task[None]:
        rounds[name] = once
        return asyncio.create_task(asyncio.sleep(3600))

    with mock.patch.object(BackgroundTasks, "keep_every", keep_every):
        yield rounds


async def _measure(folder: Path, owners: int, meter: Meter) -> Unfinished:
    folder.mkdir()
    found = Unfinished()
    with Database(folder / "appliance.db") as db, _rounds_are_begun_here() as rounds:
        db.execute("PRAGMA synchronous = OFF")
        insert_model(db, MODEL, info={})
        context = simulated_context(folder, db, disk_floor_bytes=0)
        engines = context.sampling_engines = _Engines()
        context.asking = engines.asking
        app = create_app(context)
        app.openapi()
        async with app.router.lifespan_context(app):
            box = _Box(found, meter, app, context, owners)
            await box.batches_and_responses(engines)
            await box.jobs(rounds)
            await box.evals()
            await box.canaries(rounds)
            await box.uploads()
            await box.wanted()
            for name, once in {**rounds, **counted._others(context, app)}.items():
                if name not in _NOT_HERE:
                    await box.count(f"round: {name}", once())
    return found


class _Box:
    def __init__(self, found: Unfinished, meter: Meter, app: FastAPI, context: ControllerContext, owners: int):
        self._found, self._meter, self._app, self._context, self._owners = found, meter, app, context, owners
        self._box, self._db = FromBox(app), context.db

    async def count(self, name: str, work: Awaitable[Any], patience_s: float = 0.5) -> Any:
        with mock.patch("tests.unit.loop_cost.meter.PATIENCE_S", patience_s):
            came, self._found.told[name] = await self._meter.of(work)
        self._found.by[name] = dict(self._meter.by)
        return came

    def _who(self, kind: str) -> list[dict[str, str]]:
        """Headers of owners of their own for each kind, or one kind would take the places of another."""
        names = [f"{kind}-{number}" for number in range(self._owners)]
        for name in names:
            scopes = ["inference", "fine_tuning"]
            keys.insert(self._db, KeyRow(f"key_{name}", name, name, "", 1.0, owner=name, scopes=scopes))
        return [{"x-appliance-key-id": f"key_{name}", "x-appliance-scopes": "inference,fine_tuning"} for name in names]

    def _file(self, headers: dict[str, str], purpose: Any, content: bytes, name: str = "") -> str:
        key_id = headers["x-appliance-key-id"]
        row = FileRow(
            f"file-{purpose}{name}-{key_id}",
            f"{purpose}.jsonl",
            purpose,
            len(content),
            "0" * 64,
            "processed",
            time.time(),
            key_id=key_id,
            owner=key_id.removeprefix("key_"),
        )
        files.insert(self._db, row)
        (self._context.files_dir / row.id).write_bytes(content)
        return row.id

    async def _ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        status, answer = await call(self._box, "POST", path, orjson.dumps(body) if body else b"", headers)
        assert status < 300, (path, status, answer[:300])
        return orjson.loads(answer)

    async def batches_and_responses(self, engines: _Engines) -> None:
        for headers in self._who("batches"):
            file_id = self._file(headers, "batch", b"".join(LINE % number for number in range(LINES)))
            for _ in range(BOUNDS.batches):
                asked = {"completion_window": "24h", "endpoint": "/v1/chat/completions", "input_file_id": file_id}
                await self._ask("/v1/batches", asked, headers)
        works = self._app.state.batches._works
        async with asyncio.timeout(60):
            while not all(one.opened for one in works.values()):
                await asyncio.sleep(0.01)
        self._found.begun["batches"] = len(works)
        for headers in self._who("responses"):
            for _ in range(BOUNDS.background):
                await self._ask("/v1/responses", {"model": MODEL, "input": "hi", "background": True}, headers)
        background = self._app.state.background
        self._found.begun["responses"] = len(background._tasks)
        await asyncio.sleep(0.1)
        for name, happens in (
            ("batches and responses wait", lambda: None),
            ("engines have news", engines.asking.table_changed),
            ("a line comes back", lambda: engines.answer(1)),
            ("all lines at engines come back", lambda: engines.answer(LINES_AT_ENGINES)),
        ):
            await self.count(name, self._once(happens), patience_s=0.01)

    async def _once(self, happens: Callable[[], None]) -> None:
        happens()
        await asyncio.sleep(0.6)

    async def jobs(self, rounds: dict[str, Callable[[], Awaitable[None]]]) -> None:
        asked = []
        for headers in self._who("jobs"):
            file_id = self._file(headers, "fine-tune", chat_lines(12))
            valid_id = self._file(headers, "fine-tune", chat_lines(12, first=100), name="valid")
            body = {"model": MODEL, "training_file": file_id, "validation_file": valid_id}
            asked += [(body, headers)] * BOUNDS.jobs
        for body, headers in asked[:-1]:
            await self._ask("/v1/fine_tuning/jobs", body, headers)
        await self.count("one more job", self._ask("/v1/fine_tuning/jobs", *asked[-1]), patience_s=0.01)
        await self.count("jobs are validated", self._app.state.validation.tasks.idle())
        (self._found.begun["jobs"],) = self._db.execute(
            "SELECT count(*) FROM jobs WHERE phase IN ('validating', 'queued')"
        ).fetchone()

    async def evals(self) -> None:
        source = {
            "type": "completions",
            "model": MODEL,
            "source": {
                "type": "file_content",
                "content": [{"item": {"messages": [{"role": "user", "content": "1"}], "answer": "1"}}] * ITEMS,
            },
            "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
        }
        for headers in self._who("evals"):
            config = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
            made = await self._ask(
                "/v1/evals", {"data_source_config": config, "testing_criteria": [CRITERION]}, headers
            )
            for _ in range(BOUNDS.eval_runs):
                await self._ask(f"/v1/evals/{made['id']}/runs", {"data_source": source}, headers)
        self._found.begun["runs of evaluations"] = self._owners * BOUNDS.eval_runs
        await self.count("runs of evaluations", asyncio.sleep(1.0), patience_s=0.01)

    async def _looked(self, look: Callable[[], Awaitable[None]], tasks: Any) -> None:
        await look()
        await tasks.idle()

    async def canaries(self, rounds: dict[str, Callable[[], Awaitable[None]]]) -> None:
        """Which all end in one look: their models answer with another version."""
        for number in range(CANARIES):
            insert_model(self._db, f"compared-{number}", info={})
            row = CanaryRow(f"compared-{number}", "v1", "v0", 0.1, time.time(), auto=1, watch_s=1e9, min_requests=1)
            canaries.put(self._db, row)
        self._found.begun["canaries"] = len(canaries.list_running(self._db))
        await self.count("canaries end", rounds["canaries"]())

    async def uploads(self) -> None:
        """Of many parts each, which end together, and are forgotten together."""
        cancel, headers = "", {}
        for headers in self._who("uploads"):
            for _ in range(BOUNDS.uploads):
                asked = {"bytes": PARTS, "filename": "a.jsonl", "mime_type": "text/plain", "purpose": "fine-tune"}
                made = await self._ask("/v1/uploads", asked, headers)
                cancel = f"/v1/uploads/{made['id']}/cancel"
                with self._db.transaction():
                    for number in range(PARTS):
                        part = UploadPartRow(f"{made['id']}-{number}", made["id"], 1, time.time())
                        uploads.insert_part(self._db, part)
        self._found.begun["uploads"] = len(uploads.pending_ids(self._db))
        await self.count("an upload is cancelled", self._ask(cancel, None, headers))
        config = self._context.config
        for name, later_s in (
            ("uploads expire", config.upload_open_s + 1),
            ("uploads that have ended are forgotten", 2 * config.upload_open_s + config.idempotency_keep_s + 2),
        ):
            await self.count(name, upload_routes.keep_house(self._context, time.time() + later_s))

    async def wanted(self) -> None:
        """Models that batches, evaluations, responses and rollouts want, of all owners, among all that there are."""
        each = BOUNDS.batches + BOUNDS.eval_runs + BOUNDS.background
        names = [f"model-{number}" for number in range(self._owners * BOUNDS.models * 5)]
        bus, wanted = counted._Bus(), names[: self._owners * each]
        now = Circumstances("serve", False, 1)
        wishes = Wishes(bus, BusRouting(bus, self._db, 10.0).host, lambda: wanted, lambda: wanted, lambda: now)  # type: ignore[arg-type]

        async def round_of_the_scheduler() -> None:
            demand = wishes.demands()
            for name in names:
                demand(name, Demand())

        self._found.begun["wanted models"] = len(wanted)
        await self.count("the scheduler asks which models are wanted", round_of_the_scheduler())
