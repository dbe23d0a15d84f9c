"""Each command in the table sends its request and prints the answer; the server has prepared answers."""

import json
import re
from typing import Any

import pytest

from appliance.cli.resources import ROWS, Row
from tests.unit.cli.conftest import openai_error

NAMES = [row.name for row in ROWS]
ID = "ft:a/b"


def words_of(row: Row) -> list[str]:
    return [*row.name.split(), *(one.settings.get("choices", [ID])[0] for one in row.options if one.is_positional)]


def request_of(row: Row) -> tuple[str, str]:
    method, path = row.request.format(id="ft%3Aa%2Fb").split()
    return method, path


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_command_sends_request_and_prints_json(prepared, row: Row):
    answer: dict[str, Any] = {"id": "x", "any": ["thing", None]}
    prepared.prepare(*request_of(row), (200, answer))
    done = prepared.run(*words_of(row), "-o", "json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == answer
    (request,) = prepared.requests
    assert request["content"] == b"" or request["method"] == "POST"


LISTS = [row for row in ROWS if row.empty]


@pytest.mark.parametrize("row", LISTS, ids=[row.name for row in LISTS])
def test_list_follows_all_pages_and_reports_empty_list(prepared, row: Row):
    pages = [{"data": [{"id": f"{n}"}], "has_more": n < 2} for n in range(3)]
    prepared.prepare(*request_of(row), *((200, page) for page in pages))
    listed = json.loads(prepared.run(*words_of(row), "-o", "json").stdout)
    assert [one["id"] for one in listed["data"]] == ["0", "1", "2"]
    assert ["after=" in request["query"] for request in prepared.requests] == [False, True, True]
    prepared.prepare(*request_of(row), (200, {"data": []}))
    assert prepared.run(*words_of(row)).stdout == f"{row.empty}\n"


def test_watch_survives_restart_of_box(prepared, monkeypatch):
    monkeypatch.setattr("appliance.cli.output.REFRESH_EVERY_S", 0.01)
    row = next(row for row in ROWS if row.watch)
    away = (503, openai_error("the controller is away"))
    answers = [(200, {"n": 1}), away, (200, {"n": 2}), (404, openai_error("the end"))]
    prepared.prepare(*request_of(row), *answers)
    done = prepared.run(*words_of(row), "--watch", "-o", "json")
    assert done.exit_code == 3 and done.stdout.splitlines() == ['{"n": 1}', '{"n": 2}']
    assert "the controller is away; trying again" in done.stderr


def test_command_with_several_ids_continues_after_a_refusal(prepared):
    for id, answer in (("a", (200, {"id": "a"})), ("b", (404, openai_error("no b"))), ("c", (200, {"id": "c"}))):
        prepared.prepare("DELETE", f"/v1/files/{id}", answer)
    prepared.prepare("DELETE", "/v1/files/d", (503, openai_error("gone")))
    done = prepared.run("file", "rm", "a", "b", "c", "-o", "json")
    assert (done.exit_code, done.stderr) == (3, "error: no b\n")
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == ["a", "c"]
    done = prepared.run("file", "rm", "a", "d", "c")
    assert (done.exit_code, done.stdout, done.stderr) == (6, "deleted a\n", "error: gone\n")


def test_every_request_of_a_command_has_a_route(box):
    known = {
        (method, re.sub(r"{.*?}", "{id}", route.path)) for route in box.app.routes for method in route.methods or ()
    }
    asked = {tuple(row.request.split()) for row in ROWS} | {("GET", row.own) for row in ROWS if row.own}
    assert asked - known == set()
