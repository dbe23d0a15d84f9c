"""`appliance distill make`: a teacher's answers become a training file, once; `distill kept`: what is kept does."""

from __future__ import annotations

import json

import pytest

from appliance.controller.interfaces.ports import EngineAnswer
from appliance.controller.responses.completions import completion_row
from appliance.store.database import Database
from appliance.store.objects import responses
from tests.simulator.control_plane import SimulatedEngines
from tests.unit.cli.conftest import ControlledBox
from train.data.check import check_training_file
from train.methods.methods import convert

CHAT = {"messages": [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "old"}]}
PROMPTS = [{"prompt": "a?"}, CHAT, {"messages": [{"role": "user", "content": "c?"}], "answer": "C"}, {"prompt": "d?"}]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


@pytest.fixture
def engines(box: ControlledBox) -> SimulatedEngines:
    """The teacher answers two times each: `a` the same, `b` and one more, `c` cut off and refused, `d` not at all."""

    async def rule(body):
        asked = body["messages"][-1]["content"]
        if asked == "d?":
            return EngineAnswer(400, {"error": {"message": "no"}})
        said = {
            "a?": [("A", "stop", None), ("A", "stop", None)],
            "b?": [("B", "stop", None), ("Bé", "stop", None)],
            "c?": [("C and", "length", None), ("", "stop", "I will not")],
        }[asked]
        choices = [
            {"index": i, "finish_reason": end, "message": {"role": "assistant", "content": text, "refusal": refusal}}
            for i, (text, end, refusal) in enumerate(said)
        ]
        usage, version = {"prompt_tokens": 3, "completion_tokens": 2}, "v2" if asked == "b?" else "v1"
        return EngineAnswer(200, {"choices": choices, "usage": usage, "system_fingerprint": version}, version)

    found = box.context.sampling_engines
    assert isinstance(found, SimulatedEngines)
    found.rule = rule
    return found


def learnt(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [[(one["role"], one["content"]) for one in row["messages"]] for row in rows]


def test_answers_become_a_training_file_and_what_is_none_is_counted(box, engines, prompts, tmp_path):
    asked = ("distill", "make", str(prompts), "--teacher", "starter", "--n", "2", "--temperature", "0.7")
    told = box.json(*asked)
    path = tmp_path / "prompts.answers.jsonl"
    assert learnt(path) == [[("user", f"{q}?"), ("assistant", a)] for q, a in (("a", "A"), ("b", "B"), ("b", "Bé"))]
    assert told["dropped"] == {"failed": 1, "refused": 1, "cut off": 1, "without an answer": 0, "duplicates": 1}
    assert told["dropped_lines"] == [[1, "duplicates"], [3, "cut off"], [3, "refused"], [4, "failed"]]
    assert (told["teacher"], told["read_examples"], told["made"][0]["examples"]) == ("starter", 4, 3)
    assert told["teacher_versions"] == ["v1", "v2"], "whichever the name was while the batch ran"
    assert json.loads((tmp_path / "prompts.answers.lineage.json").read_text()) == told
    bodies = engines.sent[:4]
    assert all((one["n"], one["temperature"], one["max_completion_tokens"]) == (2, 0.7, 1024) for one in bodies)
    assert not check_training_file(path, convert=convert).errors

    sent = len(engines.sent)
    assert box.json(*asked) == told and len(engines.sent) == sent, "what is made already is not made again"
    path.unlink()
    assert box.json(*asked) == told and len(engines.sent) == sent, "the batch was answered already"
    assert len(learnt(path)) == 3 and len(box.json("batch", "list")["data"]) == 1
    shown = box.run(*asked).stdout
    assert "cut off" in shown and "of 4 examples" in shown


def test_a_file_that_something_else_was_made_of_is_not_overwritten(box, engines, prompts, tmp_path):
    asked = ("distill", "make", str(prompts), "--teacher", "starter", "--n", "2")
    box.json(*asked)
    refused = box.run(*asked, "--temperature", "1")
    assert refused.exit_code == 2 and "made of something else" in refused.stderr
    other = box.json(*asked, "--temperature", "1", "--out", str(tmp_path / "other.jsonl"))
    assert other["made"][0]["examples"] == 3 and len(box.json("batch", "list")["data"]) == 2
    path = tmp_path / "prompts.answers.jsonl"
    path.write_text(path.read_text() + "\n")
    assert "changed since" in box.run(*asked).stderr


def test_what_only_the_teacher_is_told_is_not_in_the_file(box, engines, prompts, tmp_path):
    asked = ("distill", "make", str(prompts), "--teacher", "starter", "--system", "Be short.")
    box.json(*asked)
    assert [one["messages"][0] for one in engines.sent] == [{"role": "system", "content": "Be short."}] * 4
    assert learnt(tmp_path / "prompts.answers.jsonl")[0][0] == ("user", "a?")
    kept = tmp_path / "kept.jsonl"
    box.json(*asked, "--keep-system", "--out", str(kept))
    assert learnt(kept)[0][:2] == [("system", "Be short."), ("user", "a?")]
    assert len(box.json("batch", "list")["data"]) == 1, "the teacher was told the same"


def test_bad_prompts_and_teachers_are_told_in_words(box, engines, prompts, tmp_path):
    asked = ("distill", "make", str(prompts), "--teacher")
    refused = box.run(*asked, "nobody")
    assert refused.exit_code == 1 and "nobody" in refused.stderr
    for line, says in (
        ("{", "is not valid JSON"),
        ('{"a": 1}', "neither 'messages'"),
        ('{"messages": []}', "no message"),
    ):
        prompts.write_text(json.dumps(PROMPTS[0]) + "\n" + line + "\n")
        refused = box.run(*asked, "starter")
        assert refused.exit_code == 2 and f"line 2 of {prompts}" in refused.stderr and says in refused.stderr, line
    prompts.write_text(json.dumps({"prompt": "d?"}) + "\n")
    assert "gave no answer to learn from: 1 failed" in box.run(*asked, "starter").stderr
    assert not (tmp_path / "prompts.answers.jsonl").exists()


def test_kept_completions_become_a_training_file_and_what_is_none_is_counted(box, tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said = [
        ("a", {"content": "A"}, "stop", {}),
        ("a", {"content": "A"}, "stop", {}),
        ("b", {"content": "B and"}, "length", {}),
        ("c", {"content": None, "refusal": "no"}, "stop", {}),
        ("d", {"content": None, "tool_calls": [call]}, "tool_calls", {"tools": [tool]}),
        ("e", {"content": "E"}, "stop", {"metadata": {"rated": "bad"}}),
    ]
    for number in range(30):  # more than a page
        said.append((f"{number}?", {"content": str(number)}, "stop", {}))
    for number, (asked, message, end, more) in enumerate(said):
        choice = {"index": 0, "finish_reason": end, "message": {"role": "assistant", **message}}
        answer = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "choices": [choice]}
        given = {"metadata": {"rated": "good"}, "messages": [{"role": "user", "content": asked}]} | more
        with Database(box.context.db.path) as db:
            responses.insert(db, completion_row("", "", given, {**answer, "model": "large"}))
    path = tmp_path / "answers.jsonl"
    told = box.json("distill", "kept", str(path), "--model", "large", "--metadata", "rated=good")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert learnt(path)[0] == [("user", "a"), ("assistant", "A")] and len(lines) == 32
    assert lines[1]["tools"] == [tool] and lines[1]["messages"][-1]["tool_calls"] == [call]
    assert told["dropped_completions"] == [
        ["chatcmpl-1", "duplicates"],
        ["chatcmpl-2", "cut off"],
        ["chatcmpl-3", "refused"],
    ]
    assert (told["read_examples"], told["teachers"]) == (35, ["large"])
    assert not check_training_file(path, convert=convert).errors
    assert "is there" in box.run("distill", "kept", str(path)).stderr
    none = box.run("distill", "kept", str(tmp_path / "x.jsonl"), "--metadata", "rated=so-so")
    assert none.exit_code == 1 and "0 kept completions fit" in none.stderr
