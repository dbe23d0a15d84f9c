"""Counts what the loop does for bodies that are as large as their routes take them."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message

from appliance.controller.app import create_app
from appliance.controller.evals.runner import EvalRunner
from appliance.controller.http.bodies import Bound, bound_of
from appliance.controller.http.peers import FromBox
from appliance.controller.jobs.validation import JobValidation
from appliance.store.database import Database
from tests.simulator.control_plane import simulated_context
from tests.unit.controller.conftest import insert_model
from tests.unit.loop_cost import asked, bodies, counted
from tests.unit.loop_cost.fill import OWNER, Size, fill
from tests.unit.loop_cost.grown import Growing, growing, largest
from tests.unit.loop_cost.meter import Meter, Told

KEPT = 12
STEP = 16
"""Where the largest is refused the next is so many times smaller, until one is taken."""
PIECE = 64 << 10
"""Bytes of a body that come at once, as from a socket."""
GATEWAYS_COPY = Bound(4 << 20, 1 << 18)
"""Of an answer with its input; a message of 64 MiB has many."""
WITHOUT = {
    "/v1/files": "no JSON: files go through multipart.py",
    "/v1/uploads/{upload_id}/parts": "the same",
    "/admin/v1/forget": "three small fields, and nobody is there afterwards",
    "/admin/v1/oidc/finish": "there is no provider",
}
"""Routes whose bodies do not grow here, and why."""


@dataclass
class Sized:
    """told: by route, place, what grows and how many of it. statuses: the same. taken: places of which a body with ten
    of it or more was taken."""

    told: dict[str, Told] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    by: dict[str, dict[str, int]] = field(default_factory=dict)
    routes: set[tuple[str, str]] = field(default_factory=set)


def measure(folder: Path, *, only: str = "", sources: bool = False) -> Sized:
    meter = Meter(sources)
    with meter.installed():
        return asyncio.run(_measure(folder, meter, only))


async def _measure(folder: Path, meter: Meter, only: str) -> Sized:
    found, size = Sized(), Size(KEPT, 1, 1)
    folder.mkdir()
    with Database(folder / "appliance.db") as db:
        insert_model(db, "starter", info={})
        fill(db, size)
        context = counted._context(folder, db, size)
        context.config = context.config.model_copy(update={"json_body_bytes": 64 << 20})
        with (
            counted._nothing_by_itself({}),
            mock.patch.object(EvalRunner, "begin", lambda *_: None),
            mock.patch.object(JobValidation, "start", lambda *_: None),
        ):
            app = create_app(context)
            document = app.openapi()
            async with app.router.lifespan_context(app):
                box = FromBox(app)
                for (method, route), body in asked.CHANGES.items():
                    bases = [*([] if body is None else [body]), *bodies.MORE.get((method, route), ())]
                    if bases and route not in WITHOUT and only in f"{method} {route}":
                        found.routes.add((method, route))
                        await _Route(found, meter, box, method, route, document).grow(bases)
    return found


class _Route:
    def __init__(self, found: Sized, meter: Meter, app: ASGIApp, method: str, route: str, document: dict[str, Any]):
        self._found, self._meter, self._app, self._method, self._route = found, meter, app, method, route
        self._by = "admin" if route.startswith(("/admin", "/v1/fine_tuning/checkpoints", "/internal")) else OWNER
        self._headers = counted.GATEWAY if route.startswith("/internal") else counted.HEADERS[self._by]
        self._path = asked._path(method, route, self._by, KEPT - 1, KEPT)
        self._bound = GATEWAYS_COPY if route.startswith("/internal") else bound_of(route)
        spec = document["paths"].get(route.replace(":path", ""), {}).get(method.lower(), {})
        content = spec.get("requestBody", {}).get("content", {})
        self._schema = content.get("application/json", {}).get("schema", {})
        self._definitions = document["components"]["schemas"]

    async def grow(self, bases: list[Any]) -> None:
        seen = set[str]()
        for base in bases:
            base = asked._body(base, self._by, KEPT - 1, KEPT)
            await self._send(base, "as it is")
            for one in growing(self._schema, self._definitions, base):
                if one.name not in seen:
                    seen.add(one.name)
                    await self._grown(one)

    async def _grown(self, one: Growing) -> None:
        number = largest(one.of, self._bound)
        while number >= 1:
            status = await self._send(one.of(number), f"{one.name} x {number}")
            if status < 400:
                if number >= 10:
                    self._found.taken.add(f"{self._method} {self._route} {one.name}")
                return
            number //= STEP

    async def _send(self, body: Any, what: str) -> int:
        text = _text(body)
        if len(text) > self._bound.nbytes:
            return 413
        name = f"{self._method} {self._route} {what}"
        (status, answer), told = await self._meter.of(call(self._app, self._method, self._path, text, self._headers))
        self._found.told[name], self._found.statuses[name] = told, status
        if self._meter.by:
            self._found.by[name] = dict(self._meter.by)
        if status < 300 and self._method == "POST" and isinstance(made := _id(answer), str):
            await self._look_and_end(f"{self._path}/{made}", name)
        return status

    async def _look_and_end(self, path: str, name: str) -> None:
        """What was made is asked for, shown in the list, and ended or deleted, so that it does not go on."""
        for method, at in (("GET", path), ("GET", self._path), ("POST", f"{path}/cancel"), ("DELETE", path)):
            _, told = await self._meter.of(call(self._app, method, at, b"", self._headers))
            self._found.told[f"{name}; then {method} {at.replace(path, '.')}"] = told


def with_bodies(folder: Path) -> set[tuple[str, str]]:
    """(method, route) of all that take one."""
    with Database(folder / "appliance.db") as db:
        app = create_app(simulated_context(folder, db))
    taking = [one for one in app.routes if isinstance(one, APIRoute) and one.body_field]
    return {(method, one.path) for one in taking for method in one.methods}


_NUMBERS = itertools.count()


def _text(body: Any) -> bytes:
    return orjson.dumps(body).replace(b"{unique}", str(next(_NUMBERS)).encode())


def _id(answer: bytes) -> Any:
    try:
        made = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    return made.get("id") if isinstance(made, dict) else None


async def call(app: ASGIApp, method: str, path: str, text: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """Without a client, whose work would be counted."""
    pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)] or [b""]
    status, answer = 0, list[bytes]()

    async def receive() -> Message:
        await asyncio.sleep(0)
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        answer.append(message.get("body", b""))

    sent = {**headers, "content-type": "application/json", "content-length": str(len(text))}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        "scheme": "http",
        "server": ("box", 80),
        "client": ("client", 1),
        "root_path": "",
        "state": {},
    }
    try:
        await app(scope, receive, send)
    except Exception:  # noqa: BLE001 - a bug, which its status says
        assert status >= 500, path
    return status, b"".join(answer)
