"""The requests that are counted: one or more of every route, and in an order in which the last ones delete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from tests.unit.loop_cost.fill import CRITERION, FEW_ROWS, FILE, MODEL, OTHER, OWNER

Route = tuple[str, str]
WHOLE = "limit=10000"
RECENT = "limit=1000"


@dataclass(frozen=True)
class Request:
    """by: ann, bob, or admin, who asks for what is ann's."""

    name: str
    method: str
    route: str
    path: str
    by: str
    body: Any = None
    data: Any = None


# Of lists: what is asked beside the plain list. A filter that nothing fits looks at everything, unless an index is for
# it; a page behind the oldest row is as cheap as the first.
LISTS: dict[str, list[str]] = {
    "/v1/files": [WHOLE, "purpose=evals", "purpose=batch", "order=asc", "after={file-1}"],
    "/v1/batches": ["limit=100", "after={batch-1}"],
    "/v1/fine_tuning/jobs": [
        WHOLE,
        "metadata=null",
        "metadata[team]=a",
        "metadata[team]=nobodys",
        "after={job-1}",
    ],
    "/v1/fine_tuning/jobs/{job_id}/events": [WHOLE, "after={event-1}"],
    "/v1/fine_tuning/jobs/{job_id}/checkpoints": [WHOLE],
    "/v1/evals": [WHOLE, "order=desc", "after={eval-1}"],
    "/v1/evals/{eval_id}/runs": [WHOLE, "status=failed", "order=desc&status=canceled", "after={evalrun-1}"],
    "/v1/evals/{eval_id}/runs/{run_id}/output_items": [WHOLE, "status=error", "after={item-1}"],
    "/v1/fine_tuning/checkpoints/{name:path}/permissions": [WHOLE, "project_id=nobodys", "order=ascending"],
    "/v1/responses/{response_id}/input_items": ["order=asc", "after={in-1}", "after=nobodys"],
    "/v1/chat/completions": [
        "limit=100",
        "model=nobodys",
        "metadata[team]=nobodys",
        "order=desc",
        "after={chat-1}",
    ],
    "/v1/chat/completions/{completion_id}/messages": ["order=desc"],
    "/admin/v1/handovers": [RECENT],
    "/admin/v1/jobs": [RECENT],
    "/admin/v1/jobs/{job_id}/metrics": [WHOLE, "after_step=5"],
    "/admin/v1/audit": [RECENT],
    "/admin/v1/usage": [f"by={by}&since=365d" for by in ("key", "owner", "model", "version", "hour")],
}
QUERY = {
    "/internal/responses/context": "id={resp-last}",
    "/admin/v1/forget": "owner=ann",
    "/admin/v1/usage": "by=key&since=30d",
}
NO_REQUEST = {
    "/openapi.json": "made once",
    "/admin/v1/logs/{name:path}": "the end of a file, 256 KiB at most, on a thread; nothing of the store",
}

DATA = {"/v1/files": FILE, "/v1/uploads/{upload_id}/parts": b"x"}
_RUN = {
    "data_source": {
        "type": "completions",
        "model": MODEL,
        "source": {"type": "file_id", "id": "{file-1}"},
        "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
    }
}
_COPY = {"key": "{key}", "previous": "{resp-last}", "input": "hi", "response": None}

# In the order in which they are asked. {kind-N}: the id of the owner's row N; {kind-going}: of one that goes on.
CHANGES: dict[Route, Any] = {
    ("POST", "/v1/files"): {"purpose": "fine-tune"},
    ("POST", "/v1/uploads"): {"bytes": 10, "filename": "a.jsonl", "mime_type": "text/plain", "purpose": "fine-tune"},
    ("POST", "/v1/uploads/{upload_id}/parts"): {},
    ("POST", "/v1/uploads/{upload_id}/complete"): {"part_ids": "{every part}"},
    ("POST", "/v1/uploads/{upload_id}/cancel"): None,
    ("POST", "/v1/files/{file_id}/check"): {},
    ("POST", "/v1/files/{file_id}/prepare"): {"drop": []},
    ("POST", "/v1/batches"): {
        "completion_window": "24h",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "{file-3}",
    },
    ("POST", "/v1/batches/{batch_id}/cancel"): None,
    ("POST", "/v1/responses"): {"model": MODEL, "input": "hi", "background": True, "previous_response_id": "{resp-1}"},
    ("POST", "/v1/responses/{response_id}/cancel"): None,
    ("POST", "/internal/responses"): [_COPY],
    ("POST", "/v1/chat/completions/{completion_id}"): {"metadata": {"team": "a"}},
    ("POST", "/v1/fine_tuning/jobs"): {"model": MODEL, "training_file": "{file-1}", "validation_file": "{file-2}"},
    ("POST", "/v1/fine_tuning/jobs/{job_id}/pause"): None,
    ("POST", "/v1/fine_tuning/jobs/{job_id}/resume"): None,
    ("POST", "/v1/fine_tuning/alpha/graders/validate"): {"grader": CRITERION},
    ("POST", "/v1/fine_tuning/alpha/graders/run"): {
        "grader": CRITERION,
        "model_sample": "2",
        "item": {"answer": "2"},
    },
    ("POST", "/v1/evals"): {
        "data_source_config": {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True},
        "testing_criteria": [CRITERION],
        "name": "n",
    },
    ("POST", "/v1/evals/{eval_id}"): {"name": "other"},
    ("POST", "/v1/evals/{eval_id}/runs"): _RUN,
    ("POST", "/v1/evals/{eval_id}/runs/{run_id}"): None,
    ("POST", "/v1/evals/{eval_id}/runs/{run_id}/cancel"): None,
    ("POST", "/v1/fine_tuning/checkpoints/{name:path}/permissions"): {"project_ids": ["new"]},
    ("POST", "/v1/models/{name:path}/share"): {"owners": ["carol"]},
    ("POST", "/admin/v1/oidc/begin"): None,
    ("POST", "/admin/v1/oidc/finish"): {"code": "c", "state": "s", "binder": "b"},
    ("POST", "/admin/v1/limits/measure"): None,
    ("PUT", "/admin/v1/mode"): {"policy": "auto"},
    ("POST", "/admin/v1/mode/plan"): {"policy": "auto"},
    ("POST", "/admin/v1/mode/schedule"): {"policy": "serve", "cron": "0 8 * * *", "for_s": 60},
    ("PATCH", "/admin/v1/jobs/{job_id}"): {"priority": 1},
    ("POST", "/admin/v1/jobs/{job_id}/hold"): None,
    ("POST", "/admin/v1/jobs/{job_id}/release"): None,
    ("POST", "/admin/v1/jobs/{job_id}/tracked"): {"tracker": "wandb", "address": "https://example.org/run"},
    ("POST", "/admin/v1/jobs/{job_id}/profile"): {"steps": 1},
    ("POST", "/admin/v1/models/{name:path}/profile"): {"steps": 1},
    ("POST", "/admin/v1/devices/{device_id:path}/drain"): {},
    ("POST", "/admin/v1/devices/{device_id:path}/undrain"): None,
    ("PATCH", "/admin/v1/models/{name:path}/deployment"): {"min_replicas": 0},
    ("PATCH", "/admin/v1/models/{name:path}/settings"): {"set": {"max_num_seqs": 4}},
    ("POST", "/admin/v1/keys"): {"name": "new", "owner": "{owner}"},
    ("PATCH", "/admin/v1/keys/{id_or_name}"): {"max_priority": 1},
    ("POST", "/admin/v1/keys/{id_or_name}/rotate"): None,
    ("POST", "/admin/v1/session-keys"): {},
    ("POST", "/admin/v1/sessions"): {},
    ("POST", "/admin/v1/sessions/{session_id}/touch"): None,
    ("PUT", "/admin/v1/models/{name:path}/canary"): {"version": "v1"},
    ("POST", "/admin/v1/models/{name:path}/promote"): None,
    ("POST", "/admin/v1/models/import"): {"source": "/models/new", "name": "new"},
    ("POST", "/admin/v1/models/starter"): None,
    ("POST", "/admin/v1/models/{name:path}/verify"): None,
    ("POST", "/admin/v1/tiers/verify"): None,
    ("POST", "/admin/v1/models/{name:path}/rollback"): {"version": "v1"},
    ("POST", "/admin/v1/models/{name:path}/pin"): {"version": "v1", "pinned": True},
    ("POST", "/admin/v1/plan"): {"job": {"model": MODEL, "training_file": "{file-1}"}},
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"): None,
    ("DELETE", "/v1/files/{file_id}"): None,
    ("DELETE", "/v1/responses/{response_id}"): None,
    ("DELETE", "/v1/chat/completions/{completion_id}"): None,
    ("DELETE", "/v1/evals/{eval_id}/runs/{run_id}"): None,
    ("DELETE", "/v1/evals/{eval_id}"): None,
    ("DELETE", "/v1/fine_tuning/checkpoints/{name:path}/permissions/{permission_id}"): None,
    ("DELETE", "/v1/models/{name:path}"): None,
    ("DELETE", "/admin/v1/mode/schedule/{window_id}"): None,
    ("DELETE", "/admin/v1/nodes/{name}"): None,
    ("DELETE", "/admin/v1/session-keys/{key_id}"): None,
    ("DELETE", "/admin/v1/sessions/{session_id}"): None,
    ("DELETE", "/admin/v1/models/{name:path}/canary"): None,
    ("DELETE", "/admin/v1/models/{name:path}"): None,
    ("DELETE", "/admin/v1/keys/{id_or_name}"): None,
    ("POST", "/admin/v1/forget"): {"owner": "{owner}", "cancel": True, "models": True},
}

# Which row a path names: with the most below it, where nothing is said.
PLACES: dict[Route, str] = {
    ("GET", "/v1/files/{file_id}/content"): "file-1",
    ("GET", "/v1/responses/{response_id}/input_items"): "resp-last",
    ("POST", "/v1/uploads/{upload_id}/cancel"): "upload-going",
    ("POST", "/admin/v1/sessions/{session_id}/touch"): "session-12",
    ("DELETE", "/admin/v1/sessions/{session_id}"): "session-12",
    ("POST", "/v1/files/{file_id}/check"): "file-1",
    ("POST", "/v1/files/{file_id}/prepare"): "file-1",
    ("POST", "/v1/batches/{batch_id}/cancel"): "batch-going",
    ("POST", "/v1/responses/{response_id}/cancel"): "resp-going",
    ("POST", "/v1/fine_tuning/jobs/{job_id}/pause"): "job-going",
    ("POST", "/v1/fine_tuning/jobs/{job_id}/resume"): "job-going",
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"): "job-going",
    ("POST", "/v1/evals/{eval_id}/runs/{run_id}"): "evalrun-going",
    ("PATCH", "/admin/v1/jobs/{job_id}"): "job-going",
    ("POST", "/admin/v1/jobs/{job_id}/hold"): "job-going",
    ("POST", "/admin/v1/jobs/{job_id}/release"): "job-going",
    ("POST", "/admin/v1/jobs/{job_id}/profile"): "job-going",
    ("POST", "/admin/v1/models/{name:path}/profile"): MODEL,
    ("DELETE", "/v1/files/{file_id}"): "file-4",
    ("DELETE", "/v1/models/{name:path}"): "model-3",
    ("DELETE", "/admin/v1/models/{name:path}"): "model-0",
    ("DELETE", "/admin/v1/keys/{id_or_name}"): "key-2",
    ("PATCH", "/admin/v1/keys/{id_or_name}"): "key-2",
    ("POST", "/admin/v1/keys/{id_or_name}/rotate"): "key-2",
    ("PUT", "/admin/v1/models/{name:path}/canary"): "model-0",
}
_KINDS = {
    "file_id": "file-0",
    "upload_id": "upload-0",
    "batch_id": "batch-0",
    "response_id": "resp-0",
    "completion_id": "chat-0",
    "job_id": "job-0",
    "eval_id": "eval-0",
    "run_id": "evalrun-0",
    "item_id": "item-0",
    "handover_id": "ho-0",
    "window_id": "window-0",
    "permission_id": "cp-0",
    "session_id": "session-0",
    "operation_id": "op-0",
    "id_or_name": "key-2",
    "key_id": "key-2",
    "device_id": "n0/0",
}
_NAMES = (
    ("/v1/fine_tuning/checkpoints/", "checkpoint"),
    ("/admin/v1/nodes/", "n9"),
    ("/", "model-0"),
)
# Who asks: an owner may not, or there is nothing of an owner's.
_OF_ADMIN = ("/admin/v1/", "/v1/fine_tuning/checkpoints/", "/internal/responses")
_ALSO_OWNERS = ("/admin/v1/usage", "/admin/v1/me", "/admin/v1/sessions", "/internal/responses/context")


def routes(app: FastAPI) -> list[Route]:
    return [
        (method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in sorted(route.methods)
    ]


def reads(app: FastAPI, last: int, going: int) -> Iterator[Request]:
    """last: place of the newest row that is over. going: of the first that goes on."""
    for method, route in routes(app):
        if method not in ("GET", "HEAD") or route in NO_REQUEST:
            continue
        for by in _who(route):
            path = _path(method, route, by, last, going)
            queries = [QUERY.get(route, "")] + LISTS.get(route, [])
            for query in queries:
                full = f"{path}?{_filled(query, by, last, going)}" if query else path
                name = _path(method, route, by, -1, -1) + (f"?{query}" if query else "")
                yield Request(f"{by}: {method} {name}", method, route, full, by)


def changes(app: FastAPI, last: int, going: int) -> Iterator[Request]:
    for method, route in CHANGES:
        for by in _who(route):
            path, body = _path(method, route, by, last, going), _body(CHANGES[method, route], by, last, going)
            if (method, route) == ("POST", "/internal/responses"):
                body = [{**body[0], "response": {"id": f"resp_{by}", "status": "completed", "created_at": 1}}]
            name = _path(method, route, by, -1, -1)
            yield Request(f"{by}: {method} {name}", method, route, path, by, body, DATA.get(route))


def unjudged(app: FastAPI) -> set[Route]:
    """Routes that are asked by nothing here."""
    return {
        (method, route)
        for method, route in routes(app)
        if method not in ("GET", "HEAD") and (method, route) not in CHANGES
    }


def _who(route: str) -> list[str]:
    if route.startswith("/admin/v1/session-keys"):
        return ["box"]
    if route.startswith(_ALSO_OWNERS):
        return [OWNER, OTHER, "admin"]
    return ["admin"] if route.startswith(_OF_ADMIN) else [OWNER, OTHER, "admin"]


def _path(method: str, route: str, by: str, last: int, going: int) -> str:
    again = by == "admin" and (method == "DELETE" or route.endswith("{name}/runs") and method == "POST")
    again = again and len(_who(route)) > 1

    end = len(route) - (len("/runs") if route.endswith("/runs") else 0)

    def of(match: re.Match[str]) -> str:
        found = one(match)
        kind, dash, place = found.rpartition("-")  # what its owner has deleted, an administrator cannot
        return f"{kind}{dash}{int(place) + 1}" if again and place.isdecimal() and match.end() >= end else found

    def one(match: re.Match[str]) -> str:
        name = match[1].partition(":")[0]
        said = PLACES.get((method, route))
        mine = said if said and _KINDS.get(name, "-").split("-")[0] in (said.split("-")[0], "-") else None
        if name == "name":
            return _id(said or next(kind for prefix, kind in _NAMES if route.startswith(prefix)), by, last, going)
        return _id(mine or _KINDS[name], by, last, going)

    return re.sub(r"\{([^}]+)\}", of, route)


def _id(named: str, by: str, last: int, going: int) -> str:
    if last < 0:
        return f"{{{named}}}"
    owner = OTHER if by == OTHER else OWNER
    kind, dash, place = named.rpartition("-")
    if named == "checkpoint":
        return f"model-{owner}-0:ckpt-step-0"
    if not dash:
        return named
    if place == "going":
        number = (going if owner == OWNER else FEW_ROWS) + (by == "admin")
    elif place == "last":
        number = last if owner == OWNER else 11
    else:
        number = int(place)
    if kind == "key" and not number:
        return f"key_{owner}"
    return f"{kind}-{owner}-{number}"


def _filled(text: str, by: str, last: int, going: int) -> str:
    owner = OTHER if by == OTHER else OWNER
    text = text.replace("{owner}", owner).replace("{key}", f"key_{owner}")
    return re.sub(r"\{([a-z]+-[a-z0-9]+)\}", lambda match: _id(match[1], by, last, going), text)


def _body(body: Any, by: str, last: int, going: int) -> Any:
    if isinstance(body, dict):
        return {name: _body(value, by, last, going) for name, value in body.items()}
    if isinstance(body, list):
        return [_body(value, by, last, going) for value in body]
    if body == "{every part}":
        return [_id(f"part-{place}", by, last, going) for place in range((last if by != OTHER else 11) + 1)]
    return _filled(body, by, last, going) if isinstance(body, str) else body
