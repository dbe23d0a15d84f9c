"""Every error response has OpenAI's error object, a request id, and a retry hint."""

from __future__ import annotations

from typing import Any

from appliance.controller.files import storage
from appliance.controller.interfaces.principal import Listener
from tests.unit.controller.conftest import Control

JOBS = "/v1/fine_tuning/jobs"


def checked(answer, status: int, code: str | None) -> dict:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (answer.status_code, error["code"]) == (status, code), answer.text
    assert answer.headers["x-request-id"] and len(error["message"]) < 600
    return error


async def test_openapi_document_has_openai_error_shape_for_every_route(control: Control):
    document = (await control.http.get("/openapi.json")).json()
    answers = [operation["responses"] for verbs in document["paths"].values() for operation in verbs.values()]
    assert len(answers) > 50 and not any("422" in one for one in answers)
    shapes = [one["4XX"]["content"]["application/json"]["schema"]["properties"]["error"] for one in answers]
    assert {tuple(sorted(shape["required"])) for shape in shapes} == {("code", "message", "param", "type")}


async def test_unknown_url_or_method_is_rejected_with_its_code(control: Control):
    for path in ("/", "/v1/nothing", "/v1/files/a/b/c", "/docs"):
        checked(await control.http.get(path), 404, "unknown_url")
    answer = await control.http.put("/v1/files")
    checked(answer, 405, "method_not_supported")
    assert answer.headers["allow"]


async def test_request_id_of_gateway_is_kept_only_if_valid(control: Control):
    sound = await control.http.get("/v1/models", headers={"x-request-id": "req_abc.DEF-1"})
    assert sound.headers.get_list("x-request-id") == ["req_abc.DEF-1"]
    for given in ("a" * 4096, "has space", 'quote"'):
        answer = await control.http.get("/v1/models", headers={"x-request-id": given})
        assert answer.headers["x-request-id"].startswith("req_") and len(answer.headers["x-request-id"]) == 28


async def test_bug_is_a_server_error_without_details(control: Control, monkeypatch):
    def broken(row):
        raise ZeroDivisionError("a secret inside")

    monkeypatch.setattr(storage, "file_object", broken)
    form: Any = {"files": {"file": ("a", b"x")}, "data": {"purpose": "assistants"}}
    answer = await control.http.post("/v1/files", headers={"x-request-id": "req_1"}, **form)
    error = checked(answer, 500, None)
    assert error["type"] == "server_error" and "req_1" in error["message"] and "secret" not in answer.text
    assert answer.headers["x-should-retry"] == "false"


async def test_client_disconnect_during_body_is_not_an_internal_error(control: Control):
    sent = list[dict[str, Any]]()

    async def gone() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/admin/v1/keys/laptop/rotate"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await Listener(control.app)(scope | {"headers": [], "root_path": ""}, gone, send)
    assert sent[0]["status"] == 499
