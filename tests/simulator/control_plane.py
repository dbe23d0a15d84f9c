"""Simulates the rest of the box for the controller, without Ray or weights; fulfils and records requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import httpx
import orjson

from appliance.controller.access.limits import Disk, Quotas, Spending
from appliance.controller.bus.asking import Asking, EngineAnswer
from appliance.controller.bus.bus import Bus
from appliance.controller.context.context import ControllerContext
from appliance.controller.context.tasks import Tasks
from appliance.controller.devices import cordons
from appliance.controller.devices.mode import Mode
from appliance.controller.engines.versions import EngineSizes
from appliance.controller.grading.judging import Grading, Sampled
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import OperationFailed, SwapFailed
from appliance.models.library import ModelVersion, Report
from appliance.store import jobs
from appliance.store.box import SqliteJournal
from appliance.store.database import Database
from appliance.store.rows import VersionRow
from runtime.background_tasks import BackgroundTasks
from scheduler.core.workload import Device, Policy
from scheduler.handover.effects import StepRecord
from serve.core.config import EngineConfig
from train.graders.sandbox import GraderHosts
from train.rollouts.samples import Prompt, Verdict


class SimulatedScheduler:
    """Eight devices; a mode change is one hand-over of one step that succeeds when it is waited for."""

    def __init__(self, db: Database, devices: int = 8):
        self._db, self._journal, self.loop = db, SqliteJournal(db), self
        self.nudges: list[str] = []
        self.withdrawn: list[str] = []
        self.unloaded: list[str] = []
        self.converged: list[str] = []
        self.swap_error: str | None = None
        self.hang = False
        self.replicas: list[dict[str, Any]] = []
        self.queue: list[dict[str, Any]] = []
        self.troubles: list[dict[str, Any]] = []
        alike = {"node": "n0", "kind": "cpu", "name": "simulated", "memory_bytes": 2**30, "uuid": "", "health": "ok"}
        self.devices: list[dict[str, Any]] = [
            {"id": f"n0/{i}", "index": i, "holder": None, **alike} for i in range(devices)
        ]

    def nudge(self, reason: str, by: str = "") -> None:
        self.nudges.append(reason)
        out_of_use = cordons.read(self._db)
        for device in self.devices:  # becomes visible in the next round of the loop
            if device["health"] in ("ok", "draining"):
                device["health"] = "draining" if device["id"] in out_of_use else "ok"

    def reset_failures(self, model: str) -> None:
        return

    def explain(self, policy: Policy | None) -> dict[str, Any]:
        """An idle box with nothing to move."""
        nothing: dict[str, Any] = {name: {} for name in ("waiting", "notes", "standby", "idle", "jobs", "models")}
        return {"policy": policy.kind if policy else "auto", "steps": [], **nothing}

    def status(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "replicas": self.replicas,
            "handover": None,
            "handovers_ended": self._journal.ended,
            "serving_floor": 1,
            "notes": [],
            "troubles": self.troubles,
            "queue": self.queue,
            "memory": {
                "budget_bytes": 2**30,
                "used_bytes": 0,
                "room_bytes": 2**30,
                "host_bytes": None,
                "asleep_per_device": 2,
            },
            "plan_s": 0.001,
        }

    async def set_mode(self, mode: Mode, *, wait: bool = False) -> str | None:
        handover_id, now_s = self._journal.last_id() + 1, time.time()
        step = StepRecord(0, "free r1-0", "drain_replica", "r1-0", started_s=now_s)
        self._journal.begin(handover_id, f"mode {mode.policy}", now_s, mode.by, "")
        self._journal.step(handover_id, step)
        if wait and self.hang:
            await asyncio.Event().wait()
        if wait:
            self._journal.step(handover_id, replace(step, state="done", ended_s=time.time()))
            self._journal.end(handover_id, "done", time.time())
        return str(handover_id)

    async def converge_model(self, model: str) -> None:
        if self.swap_error:
            raise SwapFailed(model, "wanted", self.swap_error)
        self.converged.append(model)

    async def withdraw(self, model: str) -> None:
        self.withdrawn.append(model)

    async def unload_adapters(self, names: list[str]) -> None:
        self.unloaded += names


class SimulatedModelOps:
    """Imports any source except "broken", with a warning if it ends with "bare"; holds no bytes."""

    def __init__(self) -> None:
        self.removed: list[tuple[str, list[VersionRow]]] = []
        self.let_go_of: list[str] = []
        self.library = self

    async def run(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        made = work(*arguments, **named)
        return await made if asyncio.iscoroutine(made) else made

    async def import_model(
        self, source: str, *, name: str | None, revision: str | None, report: Report
    ) -> ModelVersion:
        report(1, 2, "bytes", "copying")
        if source == "broken":
            raise OperationFailed("the header of model.safetensors overlaps", code="invalid_checkpoint")
        if source == "bug":
            raise ZeroDivisionError("simulated bug")
        return ModelVersion(
            name=name or Path(source).name,
            version="v1",
            arch="llama",
            params=5_000_000,
            bytes=10_000_000,
            task="generate",
            source=source,
            path=Path(f"/models/{name}/v1"),
            max_model_len=2048,
            warnings=("there is no chat template",) if source.endswith("bare") else (),
        )

    def find_adapter(
        self, source: str, *, name: str | None, revision: str | None
    ) -> tuple[str, str, str | None] | None:
        if not Path(source).name.startswith("adapter"):
            return None
        return name or Path(source).name, "org/starter" if "starter" in source else "org/unknown", None

    async def import_adapter(
        self, source: str, *, name: str, revision: str | None, rank_limit: int, report: Report, **_: Any
    ) -> ModelVersion:
        made = await self.import_model(source, name=name, revision=revision, report=report)
        return replace(made, info={"adapter": {"rank": min(8, rank_limit)}})

    async def remove(self, model: str, rows: Sequence[VersionRow]) -> None:
        self.removed.append((model, list(rows)))

    def let_go(self, name: str) -> None:
        self.let_go_of.append(name)


class SimulatedTiers:
    """A disk tier that lists every version, but has no bytes."""

    def status(self) -> list[dict[str, Any]]:
        counts: dict[str, Any] = {"versions": 1, "snapshots": 0, "bytes": 10, "backlog": 0, "backlog_bytes": 0}
        nothing = dict.fromkeys(("busy", "limit_bytes", "last_error", "last_error_s"))
        return [{"name": "disk", "where": "/data", "damaged": 0, **counts, **nothing}]

    def tiers_of(self, name: object) -> list[str]:
        return ["disk"]

    def bring_in(self, name: object) -> NoReturn:
        raise LookupError(f"{name} is in no tier that has it whole")

    def nudge(self) -> None:
        return


class _Rows(dict[str, Any]):
    """Routing rows: every model name has one engine with this many slots; with none it is asleep."""

    places = 4

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return {"replicas": [{"state": "open"}] if self.places else []}


class SimulatedEngines(Asking):
    """Echoes requests at once if the engine has a free slot; `rule` overrides this. asked_by: keys of requests."""

    def __init__(self, db: Database) -> None:
        self.rows = _Rows()
        super().__init__(db, httpx.MockTransport(self._posted), lambda: self.rows, lambda: None)
        self.sent: list[dict[str, Any]] = []
        self.asked_by: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self.rule: Callable[[dict[str, Any]], Awaitable[EngineAnswer | None]] | None = None

    @property
    def lines(self) -> int:
        return self.rows.places

    @lines.setter
    def lines(self, places: int) -> None:
        self.rows.places = places

    async def _posted(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["x-appliance-class"] == "batch"
        while self._at_once >= self.rows.places:
            await asyncio.sleep(0.001)
        self.asked_by.append(request.headers["x-appliance-key-id"])
        answer = await self._answer(orjson.loads(request.content))
        headers = {"retry-after": "0.005"} if answer.status in (429, 503) else {}
        return httpx.Response(answer.status, json=answer.body, headers=headers)

    async def _answer(self, body: dict[str, Any]) -> EngineAnswer:
        self.sent.append(body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(0)
            answer = await self.rule(body) if self.rule else None
        finally:
            self._at_once -= 1
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return answer or EngineAnswer(200, {"object": "chat.completion", "echo": body, "usage": usage})


class AcceptingCheck:
    """Accepts all settings except those in `refuses`."""

    def __init__(self) -> None:
        self.refuses = ""
        self.asked: list[Any] = []

    async def refused(self, model: Any, version: Any, devices: int, settings: Any) -> str:
        self.asked.append(settings)
        return self.refuses


class SimulatedNodes:
    """The home node, and a node that does not answer."""

    def status(self) -> list[dict[str, Any]]:
        there = {"leaves": False, "memory_bytes": 64 * 2**30}
        home = {"id": "n0", "address": "127.0.0.1", "home": True, "answered_s": 0.002, "devices": ["n0/0", "n0/1"]}
        away = {"id": "n1", "address": "10.0.0.2", "home": False, "answered_s": None, "devices": ["n1/0"]}
        free = [{"memory_available_bytes": 48 * 2**30}, {"memory_available_bytes": None}]
        return [{**node, **there, **more} for node, more in zip((home, away), free, strict=True)]


async def nothing_found() -> dict[str, Any]:
    return {"exit_code": 0, "data": [], "at_s": time.time()}


def simulated_context(folder: Path, db: Database, **config: Any) -> ControllerContext:
    """A context with its files under `folder`."""
    folders = {f"{name}_dir": folder / name for name in ("files", "jobs", "batches", "uploads")}
    for path in folders.values():
        path.mkdir(exist_ok=True)
    settings, engines = ControllerConfig(**config), SimulatedEngines(db)
    bus = Bus(folder / "bus.sock", settings, first_generation=1)
    spending = Spending(db, bus)
    stands_in: dict[str, Any] = {
        "scheduler": SimulatedScheduler(db),
        "routing": SimpleNamespace(open_engines=dict, models_changed=lambda: None),
        "sizes": EngineSizes(db, EngineConfig(), lambda: [Device("n0/0", "n0", 0, memory_bytes=3 * 2**30)], 2),
        "settings_check": AcceptingCheck(),
        "asking": engines,
        "model_ops": SimulatedModelOps(),
        "tiers": SimulatedTiers(),
        "nodes": SimulatedNodes(),
        "health": SimpleNamespace(newest=dict),
        "power": SimpleNamespace(status=dict),
        "doctor": SimpleNamespace(look=nothing_found),
    }
    url = "http://127.0.0.1:8000"
    return ControllerContext(
        db=db,
        tasks=Tasks(db),
        config=settings,
        box={"id": "0123abcd", "version": "0.1.0", "url": f"{url}/v1", "public_url": url, "data_dir": str(folder)},
        background=BackgroundTasks(),
        bus=bus,
        spending=spending,
        quotas=Quotas(db, settings, Disk(folder / "files", settings.disk_floor_bytes)),
        graders=GraderHosts(),
        main_troubles=list,
        last_backup=lambda: None,
        **folders,
        **stands_in,
    )


def change(context: ControllerContext, **values: Any) -> None:
    """Replace attributes of a context; parts that were built from the old values keep them."""
    for name, value in values.items():
        object.__setattr__(context, name, value)


def judging_of(context: ControllerContext) -> Grading:
    return Grading(context.db, context.graders, context.asking)


async def graded(
    context: ControllerContext, job_id: str, *texts: str, item: Any, tools: bool = False, judging: Grading | None = None
) -> Verdict:
    """Grade these answers with the grader of a job."""
    prompt = Prompt([], {"messages": [], "item": item, "tools": [{}] if tools else []}, 0)
    answers = [Sampled([], [], text) for text in texts]
    return await (judging or judging_of(context)).verdict(jobs.get(context.db, job_id), prompt, answers)
