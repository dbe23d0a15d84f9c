"""The routers of the control plane: scopes, bounded bodies, reads on threads, an audit row of each change.

A route that only reads is `def`, and runs on a thread. State of the loop is a parameter of it (`Status`, `Readings`,
`on_loop`), taken on the loop before. A coroutine with more to ask of the loop ends with `answer`.

`json.loads` accepts NaN, 5,000-digit integers and lone surrogates, and fails with RecursionError on 100,000 brackets;
orjson refuses all of them with a position. The hook is FastAPI's documented custom Request and APIRoute class
(https://fastapi.tiangolo.com/how-to/custom-request-and-route/).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import wraps
from inspect import iscoroutinefunction
from typing import Annotated, Any, ClassVar, TypeVar

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.types import Receive, Scope

from appliance.controller.context.context import SchedulerStatus, record
from appliance.controller.http.forms import FileForm
from appliance.controller.interfaces.config import ControllerConfig
from appliance.controller.interfaces.errors import RESPONSES, BadRequest, BodyTooLarge, Forbidden
from appliance.controller.interfaces.principal import Principal, read_principal
from runtime.devices.kind import Reading
from weights.format.foreign_json import is_exceeding

MAX_BYTES = 3 << 20
"""Of a JSON body: a grader has 2 MiB at most (train.graders), and more than this comes as a file."""
FORM_BYTES = 64 << 10
"""Of a form that has a file, apart from the file."""
MAX_DEPTH = 160
"""Levels: orjson reads 1,024 and writes 254."""
MAX_FIELDS = 10_000
"""An object with more is refused: an error for each of 200,000 unknown fields takes seconds, on the loop."""
_VERBS = {"POST": "update", "PATCH": "update", "PUT": "set", "DELETE": "delete"}
_Word = Annotated[str, StringConstraints(min_length=1, max_length=64)]
_Text = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[_Word, _Text], Field(max_length=16)]
"""OpenAI's limits."""
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def make_router(
    prefix: str, *scopes: str, reads: tuple[str, ...] = (), noun: str = "", fields: tuple[str, ...] = ()
) -> APIRouter:
    """Return a router whose routes require one of `scopes`, or admin; a GET also admits `reads`. `needs` sets scopes of
    a single route. noun: "file" of the audit's "file.create". fields: fields of answers for the audit log."""

    group = {"prefix": prefix, "admitted": (scopes, reads), "noun": noun, "fields": fields}
    route_class = type("Route", (StrictRoute,), group)
    # Checked after the body has arrived: the key may have ended meanwhile.
    return APIRouter(
        prefix=prefix, route_class=route_class, responses=RESPONSES, dependencies=[Depends(read_principal)]
    )


def _declares(**attributes: Any) -> Callable[[Endpoint], Endpoint]:
    def declare(endpoint: Endpoint) -> Endpoint:
        vars(endpoint).update(attributes)
        return endpoint

    return declare


def needs(*scopes: str) -> Callable[[Endpoint], Endpoint]:
    """Set the scopes of one route, in place of its router's."""
    return _declares(scopes=scopes)


def takes(max_bytes: Callable[[ControllerConfig], int]) -> Callable[[Endpoint], Endpoint]:
    """Set the largest body of this route in bytes, in place of MAX_BYTES."""
    return _declares(max_bytes=max_bytes)


def audited(action: str, *fields: str) -> Callable[[Endpoint], Endpoint]:
    """Set the action of one route's audit row, which stores the request's body (so it must not have secrets) and these
    fields of the answer. Empty: the route writes no row; add a comment why."""
    return _declares(audited=(action, fields))


unaudited = audited("")


class StrictBody(BaseModel):
    """The base of every body. An unknown field is an error, and so is a value of another type: nothing is guessed."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StrictRequest(Request):
    """A request with a body of at most `most` bytes. Raises BodyTooLarge as soon as the body exceeds them."""

    def __init__(self, scope: Scope, receive: Receive, most: int):
        super().__init__(scope, receive)
        self._most = most
        self.content: Any = None  # the body's JSON, once read
        announced = self.headers.get("content-length", "0")
        self.announced = int(announced[:20]) if announced.isdigit() else 0
        if self.announced > most:
            raise BodyTooLarge(most)

    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override]
        size = 0
        async for chunk in super().stream():
            size += len(chunk)
            if size > self._most:
                raise BodyTooLarge(self._most)
            yield chunk

    async def json(self) -> Any:
        """Return the body's JSON. Raises BadRequest."""
        self.content, why = await asyncio.to_thread(json_of, await self.body())
        if why:
            raise BadRequest(f"We could not parse the JSON body of your request: {why}.", code="invalid_json")
        return self.content

    async def form(self, **_: Any) -> FormData:  # type: ignore[override]
        """Return a form: one file, an `IncomingFile`, and a few short fields. Raises ApiError 507."""
        context = self.app.state.context
        context.quotas.disk.check(self.announced)
        if parse_options_header(self.headers.get("content-type"))[0] != b"multipart/form-data":
            return await super().form(max_files=0, max_fields=16, max_part_size=1024)
        try:
            return await FileForm(context.uploads_dir, self.headers, self.stream()).parse()
        except MultiPartException as error:
            raise HTTPException(400, error.message) from error


def json_of(text: bytes) -> tuple[Any, str]:
    """Return the parsed value and "", or the reason why parsing failed. It does not raise, because orjson's error would
    keep the text in memory by a reference cycle."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return None, error.msg
    is_large = text.count(b"[") + text.count(b"{") > MAX_DEPTH or text.count(b":") > MAX_FIELDS
    if is_large and is_exceeding(value, MAX_DEPTH, MAX_FIELDS):
        return None, f"it is nested deeper than {MAX_DEPTH} levels, or an object has more than {MAX_FIELDS:,} fields"
    return value, ""


class StrictRoute(APIRoute):
    """A route with one method and declared scopes. An endpoint that is not a coroutine only reads, and runs on a
    thread. A change is answered once the gateways have it, and has an audit row, by its handler or else by this
    class."""

    admitted: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    prefix: ClassVar[str]
    noun: ClassVar[str]
    fields: tuple[str, ...]

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        """options: APIRouter's arguments for APIRoute. Raises TypeError for a route without scopes."""
        (self.verb,) = options["methods"]
        scopes, reads = self.admitted
        of_router = scopes + (reads if self.verb == "GET" else ())
        self.scopes: tuple[str, ...] = getattr(endpoint, "scopes", of_router)
        if not self.scopes:
            raise TypeError(f"{self.verb} {path} declares no scope: give its router one, or the route `@needs(...)`")
        last = path.removeprefix(self.prefix).rpartition("/")[2]  # the given action's verb, else the method's
        verb = "create" if not last else _VERBS.get(self.verb, "") if last.startswith("{") else last
        declared_audit = getattr(endpoint, "audited", None)
        self.keeps_body = declared_audit is not None
        action = f"{self.noun}.{verb}" if self.noun else f"{self.verb.lower()} {path}"
        self.action, self.fields = declared_audit or (action, self.fields)
        self.max_bytes: Callable[[ControllerConfig], int] = getattr(endpoint, "max_bytes", lambda _: MAX_BYTES)
        super().__init__(path, endpoint if iscoroutinefunction(endpoint) else _on_a_thread(endpoint), **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            context = request.app.state.context
            if not request.scope["state"]["principal"].may(*self.scopes):
                raise Forbidden(" or ".join(self.scopes))
            strict = StrictRequest(request.scope, request.receive, self.max_bytes(context.config))
            response = await handle(strict)
            if self.verb != "GET" and response.status_code < 400:
                caller: Principal = request.scope["state"]["principal"]
                if self.action and not caller.recorded:
                    self._record(strict, caller, response)
                # Wait for the gateways, because a request by the new key or to the canary may follow at once.
                await context.bus.caught_up()
            return response

        return answered

    def _record(self, request: StrictRequest, caller: Principal, response: Response) -> None:
        is_json = response.headers.get("content-type") == "application/json"
        content = orjson.loads(response.body) if is_json and not isinstance(response, StreamingResponse) else None
        answer = content if isinstance(content, dict) else {}
        body = request.content if self.keeps_body and isinstance(request.content, dict) else {}
        kept = {name: answer[name] for name in self.fields if answer.get(name)}
        target = "/".join(str(value) for value in request.path_params.values())
        target = target or str(answer.get("id") or answer.get("name") or "")
        record(request.app.state.context, caller, self.action, target, **body | kept)


# --- answers made on threads, and their state from the loop


async def answer(work: Callable[[], Any]) -> Response:
    """Run `work` on a thread; return its result as a JSON response."""
    return await asyncio.to_thread(lambda: as_json(work()))


def _on_a_thread(endpoint: Callable[..., Any]) -> Callable[..., Response]:
    """Wrap an endpoint so that FastAPI runs it on a thread."""

    @wraps(endpoint)
    def on_thread(**values: Any) -> Response:
        return as_json(endpoint(**values))

    return on_thread


def as_json(result: Any) -> Response:
    """Encode by orjson: FastAPI's own encoder takes ten times as long."""
    return result if isinstance(result, Response) else Response(orjson.dumps(result), media_type="application/json")


def on_loop(read: Callable[[Any], Any]) -> Any:
    """Return a dependency: the result of this function of the context, called on the loop at the request's start."""

    async def call(request: Request) -> Any:
        return read(request.app.state.context)

    return Depends(call)


Status = Annotated[SchedulerStatus, on_loop(lambda context: context.scheduler.status())]
Readings = Annotated[Mapping[str, Reading], on_loop(lambda context: context.health.newest())]
"""The newest reading of each device that reports any."""
