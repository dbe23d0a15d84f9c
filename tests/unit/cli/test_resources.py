"""Every command of the table of resources, against a server with prepared answers: what it sends and what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.cli.resources import RESOURCES, Resource, Verb
from tests.unit.cli.conftest import openai_error

ALL = [(one, verb) for one in RESOURCES for verb in one.verbs]
NAMES = [f"{one.name} {verb.name}".strip() for one, verb in ALL]
ID = "ft:a/b"
OPERATION = {"id": "op_1", "kind": "k", "state": "succeeded", "progress": {}, "error": None, "result": {}}


def words_of(one: Resource, verb: Verb) -> list[str]:
    ids = {"all": [], "one": [ID], "many": [ID]}[verb.of]
    return [*one.name.split(), *verb.name.split(), *ids, *(["v1"] if verb.name == "pin" else [])]


def path_of(one: Resource, verb: Verb, id: str = "ft%3Aa%2Fb") -> str:
    return one.path_of(verb).format(id=id)


@pytest.mark.parametrize(("one", "verb"), ALL, ids=NAMES)
def test_command_sends_its_request_and_prints_the_answer_as_json(prepared, one: Resource, verb: Verb):
    answer: dict[str, Any] = {"operation": OPERATION} if verb.operation else {"id": "x", "any": ["thing", None]}
    prepared.prepare(verb.method, path_of(one, verb), (200, answer))
    done = prepared.run(*words_of(one, verb), "-o", "json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == answer.get("operation", answer)
    (request,) = prepared.requests
    assert (request["content"] != b"") == (verb.body is not None)


@pytest.mark.parametrize(("one", "verb"), ALL, ids=NAMES)
@pytest.mark.parametrize(("status", "exit_code"), [(403, 4), (404, 3), (409, 5), (422, 2), (503, 6)])
def test_command_turns_a_refusal_into_an_exit_code(prepared, one: Resource, verb: Verb, status: int, exit_code: int):
    prepared.prepare(verb.method, path_of(one, verb), (status, openai_error("because")))
    if verb.own:
        prepared.prepare("GET", verb.own.format(id="ft%3Aa%2Fb"), (status, openai_error("because")))
    done = prepared.run(*words_of(one, verb))
    assert (done.exit_code, done.stdout, done.stderr) == (exit_code, "", "error: because\n")


LISTS = [(one, verb) for one, verb in ALL if verb.name in ("list", "") and one.columns]


@pytest.mark.parametrize(("one", "verb"), LISTS, ids=[f"{one.name} {verb.name}" for one, verb in LISTS])
def test_list_follows_all_pages_and_says_when_it_is_empty(prepared, one: Resource, verb: Verb):
    pages = [{"data": [{"id": f"{n}"}], "has_more": n < 2} for n in range(3)]
    prepared.prepare("GET", path_of(one, verb), *((200, page) for page in pages))
    listed = json.loads(prepared.run(*words_of(one, verb), "-o", "json").stdout)
    assert [row["id"] for row in listed["data"]] == ["0", "1", "2"]
    assert ["after=" in request["query"] for request in prepared.requests] == [False, True, True]
    prepared.prepare("GET", path_of(one, verb), (200, {"data": []}))
    assert prepared.run(*words_of(one, verb)).stdout == f"{one.empty}\n"


WATCHED = [(one, verb) for one, verb in ALL if verb.watch]


@pytest.mark.parametrize(("one", "verb"), WATCHED, ids=[f"{one.name} {verb.name}" for one, verb in WATCHED])
def test_watch_rides_out_a_restart_of_the_box(prepared, one: Resource, verb: Verb):
    away = (503, openai_error("the controller is away"))
    answers = [(200, {"n": 1}), away, (200, {"n": 2}), (404, openai_error("the end"))]
    prepared.prepare("GET", path_of(one, verb), *answers)
    done = prepared.run(*words_of(one, verb), "--watch", "--every", "0.1", "-o", "json")
    assert done.exit_code == 3 and done.stdout.splitlines() == ['{"n": 1}', '{"n": 2}']
    assert "the controller is away; trying again" in done.stderr
