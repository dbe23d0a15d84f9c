"""Isolation of two owners on every route: objects of other owners look unknown in paths, bodies, lists and texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi.routing import APIRoute

from appliance.controller.http.routers import StrictRoute, make_router
from appliance.controller.jobs.events import JobEvents
from appliance.controller.responses import stored
from appliance.gateway.core.errors import HttpError
from appliance.gateway.core.routes import resolve
from appliance.store import jobs, keys, usage
from tests.unit.controller.conftest import ADMIN, SCOPES, Control
from tests.unit.controller.test_batches import begun, line, until
from tests.unit.controller.test_responses import completion, copy, name, send
from tests.unit.controller.test_uploads import begun as upload_begun
from tests.unit.controller.test_uploads import part

STORED = name(1)


@dataclass(frozen=True)
class Named:
    """A route whose path names objects. path: path parameter -> kind of object. body: body of the request."""

    path: dict[str, str]
    body: Any = None


@dataclass(frozen=True)
class InBody:
    """A route with objects in body or query. names: field -> object kind. body: other required fields."""

    names: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)
    query: bool = False


_RUN = {"data_source": {"type": "jsonl", "source": {"type": "file_content", "content": [{"item": {"a": "1"}}]}}}
# Routes closed at the gateway, for processes of the box only.
CLOSED = {("GET", "/internal/responses/context"), ("POST", "/internal/responses")}
# Routes without a key, for logins through a provider (test_oidc.py, gateway/test_browsers.py).
OPEN = {("GET", "/admin/v1/oidc"), ("POST", "/admin/v1/oidc/begin"), ("POST", "/admin/v1/oidc/finish")}
LIST, NOTHING, ADMINS, READERS, SCRAPE, OWN, SELF = "list", "nothing", "admins", "readers", "scrape", "own", "self"
# Routes for the caller's own logins and live updates: test_page_sessions.py, test_live.py.
LOGINS = "logins"
# Path parameter -> kind of object, for parameters not named KIND_id.
KINDS = {"run_id": "eval_run", "item_id": "eval item", "name": "model"}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/files/{file_id}/check"): {},
    ("POST", "/v1/uploads/{upload_id}/complete"): {"part_ids": ["{part}"]},
    ("POST", "/v1/evals/{eval_id}"): {"name": "n"},
    ("POST", "/v1/evals/{eval_id}/runs"): _RUN,
    ("POST", "/v1/chat/completions/{completion_id}"): {"metadata": None},
    ("POST", "/v1/models/{name:path}/share"): {"owners": ["carol"]},
}
SPECIAL: dict[tuple[str, str], Any] = {
    ("POST", "/v1/uploads/{upload_id}/cancel"): Named({"upload_id": "open upload"}),
    ("POST", "/v1/batches"): InBody(
        {"input_file_id": "batch input"}, {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    ),
    ("POST", "/v1/fine_tuning/jobs"): InBody(
        {"training_file": "file", "validation_file": "file", "model": "model"},
        {"model": "starter", "training_file": "{own file}"},
    ),
    ("POST", "/admin/v1/plan"): NOTHING,  # test_plan.py tests model and file in its body
    ("GET", "/v1/fine_tuning/methods"): NOTHING,
    ("GET", "/v1/models/{name:path}/files/{file}"): Named({"name": "model"}),
    ("POST", "/v1/responses"): InBody(
        {"model": "model", "previous_response_id": "response"}, {"model": "starter", "input": "1", "background": True}
    ),
    ("POST", "/v1/responses/{response_id}/cancel"): Named({"response_id": "background response"}),
    ("GET", "/internal/responses/context"): InBody({"id": "response"}, query=True),
    ("POST", "/internal/responses"): ADMINS,
    ("GET", "/admin/v1/usage"): OWN,
    ("GET", "/admin/v1/me"): SELF,
    ("GET", "/admin/v1/sessions"): LOGINS,
    ("POST", "/admin/v1/sessions"): LOGINS,
    ("DELETE", "/admin/v1/sessions/{session_id}"): Named({"session_id": "login"}),
    **dict.fromkeys(OPEN, NOTHING),
    ("GET", "/admin/v1/metrics"): SCRAPE,
    **{("GET", f"/admin/v1/{name}"): ADMINS for name in ("keys", "audit", "logs", "logs/{name:path}", "forget")},
}


def judged_of(method: str, path: str) -> Any:
    """Expected access of a route. Defaults: admin routes are for readers or admins; others name objects in the path."""
    if (method, path) in SPECIAL:
        return SPECIAL[method, path]
    if path.startswith("/admin/v1/"):
        return READERS if method == "GET" else ADMINS
    if parameters := re.findall(r"{(\w+)", path):
        kinds = {name: KINDS.get(name, name.removesuffix("_id")) for name in parameters}
        return Named(kinds, BODIES.get((method, path)))
    return LIST if method == "GET" else NOTHING


def judged(control: Control) -> list[tuple[tuple[str, str], Any]]:
    """Every route with its expected access; DELETE routes come last, inner objects first."""
    found = [(route, judged_of(*route)) for route in routes(control)]
    return sorted(found, key=lambda one: len(one[0][1]) if one[0][0] == "DELETE" else 1000, reverse=True)


def routes(control: Control) -> Iterator[tuple[str, str]]:
    for route in control.app.routes:
        if isinstance(route, APIRoute):
            yield from ((method, route.path) for method in route.methods)


def headers(key: keys.KeyRow) -> dict[str, str]:
    return {"x-appliance-key-id": key.id, "x-appliance-scopes": ",".join(key.scopes)}


@dataclass
class People:
    """alice sends requests; bob owns one object of each kind and uses another key than at creation."""

    alice: dict[str, str]
    bob: dict[str, str]
    objects: dict[str, str]
    own_file: str

    def secrets(self) -> set[str]:
        return set(self.objects.values())


@pytest.fixture
async def people(control: Control, monkeypatch: pytest.MonkeyPatch) -> People:
    # Routes must not wait for the copy of a missing response.
    monkeypatch.setattr(stored, "ARRIVES_WITHIN_S", 0.001)
    scopes = ["inference", "fine_tuning"]
    alice, laptop, desktop = (
        keys.create(control.db, key, scopes, owner)[0]
        for key, owner in (("alice", "alice"), ("laptop", "bob"), ("desktop", "bob"))
    )
    control.engines.lines = 0
    control.http.headers.update(headers(alice))
    own_file = await control.upload()
    control.http.headers.update(headers(laptop))
    upload, open_upload = await upload_begun(control, 4), await upload_begun(control, 4)
    objects = {
        "file": await control.upload(),
        "upload": upload,
        "open upload": open_upload,
        "part": await part(control, upload, b"data"),
        "batch": await begun(control, [line(0)]),
        "job": await control.job(),
        "response": STORED,
        "completion": "chatcmpl-secret",
    }
    objects["batch input"] = (await control.sdk.batches.retrieve(objects["batch"])).input_file_id
    await send(control, copy(1, key=laptop.id), completion("chatcmpl-secret", key=laptop.id))
    asked = await control.sdk.responses.create(model="starter", input="1+1?", background=True)
    objects["background response"] = asked.id
    objects |= await evaluated(control)
    others = {noun: path for noun, path in control.creating().items() if noun not in objects}
    objects |= {noun: await control.made(path) for noun, path in others.items()}
    login = keys.create_session(control.db, laptop.id, agent="", now_s=1.0, until_s=1e12)[0]
    objects["login"] = login.id
    made = await control.job(suffix="secret")
    told = JobEvents(control.db, control.context.files_dir, "local")
    told.ingest(made, {"event": "published", "step": 1, "version": "step-1", "bytes": 9, "path": "/shm/1"})
    told.succeeded(made)
    row = jobs.get(control.db, made)
    objects |= {
        "made job": made,
        "model": row.output_model,
        "checkpoint": f"{row.output_model}:ckpt-step-1",
        "result": row.result_files[0],
    }
    control.http.headers.update(SCOPES)
    return People(headers(alice), headers(desktop), objects, own_file)


async def evaluated(control: Control) -> dict[str, str]:
    check: Any = {"type": "string_check", "name": "c", "input": "{{item.a}}", "reference": "1", "operation": "eq"}
    schema: Any = {"type": "custom", "item_schema": {"type": "object"}}
    made = await control.sdk.evals.create(data_source_config=schema, testing_criteria=[check])
    source: Any = _RUN["data_source"]
    run = await control.sdk.evals.runs.create(made.id, data_source=source)
    await control.context.tasks.idle("eval_runs")
    (item,) = (await control.sdk.evals.runs.output_items.list(run.id, eval_id=made.id)).data
    return {"eval": made.id, "eval_run": run.id, "eval item": item.id}


async def call(control: Control, as_: dict[str, str], method: str, path: str, **more: Any) -> Any:
    return await control.http.request(method, path, headers=as_, **more)


def requests(method: str, path: str, judged: Named | InBody, people: People, objects: dict[str, str]) -> Iterator[Any]:
    """Pairs (path, arguments): one request per named object."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [filled(inner) for inner in value]
        if isinstance(value, str) and value.startswith("{"):
            return people.own_file if value == "{own file}" else objects[value[1:-1]]
        return value

    if isinstance(judged, Named):
        for parameter, kind in judged.path.items():
            path = path.replace("{" + parameter + ":path}", objects[kind]).replace("{" + parameter + "}", objects[kind])
        sent = {"files": {"data": b"x"}} if path.endswith("/parts") else {"json": filled(judged.body)}
        yield path, {} if sent == {"json": None} else sent
        return
    for named, kind in judged.names.items():
        if judged.query:
            yield path, {"params": {named: objects[kind]}}
        else:
            yield path, {"json": filled(judged.body) | {named: objects[kind]}}


def said(answer: Any, objects: dict[str, str]) -> Any:
    """Return (status, text) of an answer; the text has a mask for the names of these objects."""
    text = answer.text
    for value in sorted(objects.values(), key=len, reverse=True):
        text = text.replace(value, "IT")
    return answer.status_code, text


async def test_routes_with_object_in_body_are_listed_in_special(control: Control):
    names = re.compile("model|.*_ids?|.*_file")
    for route in control.app.routes:
        if isinstance(route, APIRoute) and route.path.startswith("/v1/") and route.body_field is not None:
            fields = getattr(route.body_field.field_info.annotation, "model_fields", {})
            named, (method,) = [name for name in fields if names.fullmatch(name)], route.methods
            assert not named or "{" in route.path or (method, route.path) in SPECIAL, (route.path, named)


async def test_gateway_passes_every_route_except_closed_ones(control: Control):
    closed = set()
    for method, path in routes(control):
        try:
            route = resolve(method.encode(), re.sub(r"{[^}]*}", "x", path).encode())
        except HttpError:
            closed.add((method, path))
            continue
        assert bool(route.scopes) != ((method, path) in OPEN), (method, path)
    assert closed == CLOSED


async def test_route_rejects_key_without_scope_before_reading_body(control: Control):
    for route in control.app.routes:
        if isinstance(route, StrictRoute):
            others = {"admin", "read", "metrics", "inference", "fine_tuning"} - {"admin", *route.scopes}
            as_ = {"x-appliance-key-id": "key_x", "x-appliance-scopes": ",".join(others) or "none"}
            answer = await call(control, as_, route.verb, filled(route.path), content=b"{")
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_permissions"), route.path


def test_route_without_declared_scope_raises():
    with pytest.raises(TypeError, match="declares no scope"):
        make_router("/v1/toys").get("")(lambda: {})


async def test_object_of_other_owner_answers_like_missing_object(control: Control, people: People):
    nobody = {kind: value[:-6] + "Nobody" for kind, value in people.objects.items()}
    nobody["response"] = name(0xABCDEF)
    for (method, path), what in judged(control):
        if not isinstance(what, Named | InBody):
            continue
        theirs = requests(method, path, what, people, people.objects)
        for (url, more), (unknown_url, unknown) in zip(
            theirs, requests(method, path, what, people, nobody), strict=True
        ):
            answer = await call(control, people.alice, method, url, **more)
            assert answer.status_code in ((404,) if isinstance(what, Named) else (400, 404)), (method, url, more)
            missing = await call(control, people.alice, method, unknown_url, **unknown)
            assert said(answer, people.objects) == said(missing, nobody), (method, url)


@pytest.mark.usefixtures("checked_here")
async def test_second_key_of_an_owner_sees_objects_of_the_first(control: Control, people: People):
    """This also proves that test_object_of_other_owner_answers_like_missing_object uses existing objects."""
    mine = People(people.bob, people.bob, people.objects, people.objects["file"])
    for (method, path), what in judged(control):
        if isinstance(what, Named | InBody):
            for url, more in requests(method, path, what, mine, people.objects):
                answer = await call(control, people.bob, method, url, **more)
                assert answer.status_code not in (401, 403, 404, 405), (method, url, answer.text)
                assert "not_found" not in answer.text, (method, url, answer.text)


async def test_models_of_other_owner_are_unknown(control: Control, people: People):
    model = people.objects["model"]
    for named in (model, people.objects["checkpoint"], f"{model}@step-1"):
        assert (await call(control, people.bob, "GET", f"/v1/models/{named}")).status_code == 200
        assert (await call(control, people.alice, "GET", f"/v1/models/{named}")).status_code == 404
        assert (await call(control, people.alice, "DELETE", f"/v1/models/{named}")).status_code == 404
        job = {"model": named, "training_file": people.own_file}
        answer = await call(control, people.alice, "POST", "/v1/fine_tuning/jobs", json=job)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    control.http.headers.update(people.alice)
    batch_id = await begun(control, [line(0, body={"model": model, "messages": []})])
    row = await until(control, batch_id, lambda batch: batch.status == "failed")
    assert row.status == "failed" and row.errors is not None and row.errors.data is not None
    assert row.errors.data[0].code == "model_not_found"


async def test_lists_contain_only_objects_of_owner(control: Control, people: People):
    for (method, path), what in judged(control):
        if what != LIST:
            continue
        answer = (await call(control, people.alice, method, path)).json()
        hers = [item["id"] for item in answer["data"]]
        assert not people.secrets() & set(hers) and not answer.get("has_more"), path
        assert not [secret for secret in people.secrets() if secret in str(answer)], path
        his = (await call(control, people.bob, method, path)).json()["data"]
        assert people.secrets() & {item["id"] for item in his}, path
        assert not any("owner" in item and item["owner"] != "bob" for item in his), path
        for cursor in {item["id"] for item in his} - set(hers) if path != "/v1/models" else ():
            after = await call(control, people.alice, method, path, params={"after": cursor})
            unknown = await call(control, people.alice, method, path, params={"after": "nobody-123"})
            assert said(after, {"x": cursor}) == said(unknown, {"x": "nobody-123"}), path
        if path != "/v1/models":
            page = (await call(control, people.alice, method, path, params={"limit": len(hers)})).json()
            assert page["has_more"] is False, f"{path}: there is more, but it is another's"


# --- sharing


async def test_owner_shares_and_unshares_a_model(control: Control, people: People):
    model = people.objects["model"]
    path = f"/v1/models/{model}"

    async def share(**body: Any) -> Any:
        return (await call(control, people.bob, "POST", f"{path}/share", json=body)).json()

    shared = await share(owners=["alice"])
    assert (shared["owner"], shared["shared_with"], shared["shared_with_everybody"]) == ("bob", ["alice"], False)
    assert model in [item["id"] for item in (await call(control, people.alice, "GET", "/v1/models")).json()["data"]]
    seen = (await call(control, people.alice, "GET", f"{path}:ckpt-step-1")).json()
    assert seen["object"] == "model" and "shared_with" not in seen
    job = {"model": model, "training_file": people.own_file}
    made = await call(control, people.alice, "POST", "/v1/fine_tuning/jobs", json=job)
    assert made.status_code == 200
    await control.settle()
    refused = (("GET", f"{path}/archive", None), ("DELETE", path, None), ("POST", f"{path}/share", {"everybody": True}))
    for method, url, body in refused:
        answer = await call(control, people.alice, method, url, **({"json": body} if body else {}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_permissions")
    used = await call(control, people.bob, "DELETE", path)
    assert used.status_code == 409 and made.json()["id"] not in used.text, "her job has no name for him"
    assert (await share(owners=["alice"], stop=True))["shared_with"] == []
    assert (await call(control, people.alice, "GET", path)).status_code == 404
    assert (await share(everybody=True))["shared_with_everybody"] is True
    assert (await call(control, people.alice, "GET", path)).status_code == 200
    actions = [row["action"] for row in (await call(control, ADMIN, "GET", "/admin/v1/audit")).json()["data"]]
    assert [action for action in actions if "share" in action] == ["model.share", "model.unshare", "model.share"]


async def test_model_list_of_key_narrows_but_grants_no_access(control: Control, people: People):
    row, _ = keys.create(control.db, "narrow", ["inference"], "carol", models=[people.objects["model"]])
    for model in (people.objects["model"], "starter"):
        assert (await call(control, headers(row), "GET", f"/v1/models/{model}")).status_code == 404


# --- usage


async def test_usage_covers_only_keys_and_jobs_of_owner(control: Control, people: People):
    for number, row in enumerate(sorted(keys.list_all(control.db), key=lambda row: row.name), 1):
        spent = {"key": row.id, "model": f"asked-by-{row.owner}", "version": "v1", "requests": number}
        usage.add(control.db, [spent | {"errors": 0, "prompt_tokens": 10, "completion_tokens": 0}], 36e5)
    usage.devices_held(control.db, people.objects["job"], 2, 36e5)
    reader, _ = keys.create(control.db, "reader", ["read"], "carol")

    async def seen(as_: dict[str, str], by: str) -> dict[str, tuple[int, bool]]:
        rows = (await call(control, as_, "GET", "/admin/v1/usage", params={"by": by})).json()["data"]
        return {row["name"]: (row["requests"], row["device_hours"] > 0) for row in rows}

    assert await seen(people.alice, "key") == await seen(people.alice, "owner") == {"alice": (1, False)}
    assert await seen(people.alice, "version") == {"asked-by-alice@v1": (1, False)}
    assert await seen(people.bob, "key") == {"laptop": (3, True), "desktop": (2, False)}
    assert await seen(people.bob, "model") == {"asked-by-bob": (5, False), "starter": (0, True)}
    for all_ in (headers(reader), ADMIN):
        assert {"alice", "bob"} <= (await seen(all_, "owner")).keys()


# --- scopes


def filled(path: str) -> str:
    return "/".join("nobody" if segment.startswith("{") else segment for segment in path.split("/"))


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        ("read", (READERS, SCRAPE, OWN, SELF, LOGINS)),
        ("metrics", (SCRAPE, SELF, LOGINS)),
        ("inference", (OWN, SELF, LOGINS)),
        ("fine_tuning", (OWN, SELF, LOGINS, NOTHING)),
        ("", ()),
    ],
)
async def test_admin_routes_are_open_by_scope(control: Control, scopes: str, allowed: tuple[str, ...]):
    row, _ = keys.create(control.db, "looker", [scope for scope in scopes.split(",") if scope])
    as_ = {"x-appliance-key-id": row.id, "x-appliance-scopes": scopes}
    for (method, path), what in judged(control):
        if path.startswith("/admin/v1") and (method, path) not in OPEN:
            opens = (LOGINS if path.startswith("/admin/v1/sessions") else what) in allowed
            answer = await call(control, as_, method, filled(path))
            assert (answer.status_code != 403) == opens, (scopes, method, path, answer.text)


_JOBS = "/v1/fine_tuning/jobs"
READ_TOO = {"/v1/models", "/v1/models/{name:path}", _JOBS, f"{_JOBS}/{{job_id}}", f"{_JOBS}/{{job_id}}/metrics"}
"""Routes of OpenAI's API that a key of the scope `read` may ask."""


async def test_read_scope_sees_models_and_jobs_alone(control: Control, people: People):
    row, _ = keys.create(control.db, "looker", ["read"])
    for (method, path), what in judged(control):
        if path.startswith("/v1/") and what is not ADMINS:
            answer = await call(control, headers(row), method, filled(path))
            open_ = method == "GET" and path in READ_TOO
            assert (answer.status_code != 403) == open_, (method, path, answer.text)
