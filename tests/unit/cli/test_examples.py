"""The scripts in `examples/` run against the real control app with simulated devices and engines."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from appliance.controller.bus.asking import EngineAnswer
from appliance.controller.gates import Gates
from appliance.controller.jobs.events import fail
from appliance.controller.responses.objects import completion_row
from appliance.store import jobs
from appliance.store.database import Database
from appliance.store.rows import RESPONSES
from examples import answers_of_a_teacher, retrain_on_schedule, sweep_with_optuna
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import chat_lines
from train.data_checks.check import check_training_file

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def client(box: ControlledBox) -> Iterator[openai.OpenAI]:
    transport = httpx.HTTPTransport(uds=str(box.data_dir / "controller.sock"))
    with httpx.Client(transport=transport) as http:
        yield openai.OpenAI(base_url="http://box/v1", api_key="-", http_client=http)


@pytest.fixture
def finish(box: ControlledBox) -> Callable[[float | None], None]:
    """Return a function that ends the newest job: with this validation loss, or failed if the loss is None."""

    def finish(loss: float | None) -> None:
        box.settle()

        def tell() -> None:
            job_id = jobs.page(box.context.db, viewer=None, after=None, limit=1).data[0].id
            events = box.job_events
            events.started(job_id, ["n0/0"])
            if loss is None:
                fail(box.context.db, job_id, "diverged", "it diverged")
                return
            events.ingest(job_id, {"event": "validation", "step": 1, "loss": loss})
            events.ingest(
                job_id, {"event": "published", "step": 1, "version": f"step-{job_id}", "bytes": 9, "path": "/"}
            )
            events.succeeded(job_id)

        box.do(tell)

    return finish


class Trial:
    """A fake of Optuna's Trial that always suggests the lowest value of a range."""

    def __init__(self) -> None:
        self.user_attrs: dict[str, Any] = {}

    def suggest_float(self, name: str, low: float, high: float, log: bool) -> float:
        return low

    def suggest_int(self, name: str, low: int, high: int) -> int:
        return low

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        return choices[0]

    def set_user_attr(self, name: str, value: Any) -> None:
        self.user_attrs[name] = value


def evaluated(client: openai.OpenAI) -> str:
    """Create an evaluation with a run on three items; return the id of the evaluation."""
    check: Any = {"type": "string_check", "name": "c", "operation": "eq", "input": "a", "reference": "a"}
    schema: Any = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
    made = client.evals.create(data_source_config=schema, testing_criteria=[check])
    items = [{"item": {"messages": [{"role": "user", "content": str(number)}]}} for number in range(3)]
    content = "".join(json.dumps(item) + "\n" for item in items).encode()
    source: Any = {
        "type": "completions",
        "model": "starter",
        "source": {"type": "file_id", "id": client.files.create(file=("s.jsonl", content), purpose="user_data").id},
        "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
    }
    client.evals.runs.create(made.id, data_source=source)
    return made.id


def test_retrain_activates_version_and_keeps_files_after_failure(
    client: openai.OpenAI,
    box: ControlledBox,
    finish: Callable[[float | None], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eval_id, ends = evaluated(client), iter([1.0, None])

    def sleep(_: float) -> None:
        if all(job.status in ("succeeded", "failed") for job in client.fine_tuning.jobs.list()):
            asyncio.run_coroutine_threadsafe(Gates(box.context).look(), box.loop).result(60)
        else:
            finish(next(ends))

    monkeypatch.setattr(retrain_on_schedule, "time", SimpleNamespace(sleep=sleep))
    folder = tmp_path / "new"
    folder.mkdir()

    def retrain() -> str:
        return retrain_on_schedule.retrain(client, "starter", "fraud", folder, eval_id)

    assert retrain() == "no new data"
    for day in (0, 1):
        (folder / f"{day}.jsonl").write_bytes(chat_lines(12, 20 * day).rstrip())
    assert "passed" in retrain()
    assert "fraud" in {model.id for model in client.models.list()}
    assert {path.name for path in (folder / "trained").iterdir()} == {"0.jsonl", "1.jsonl"}
    (job,) = client.fine_tuning.jobs.list()
    assert client.files.content(job.training_file).content.count(b"\n") == 24
    (folder / "2.jsonl").write_bytes(chat_lines(12, 40))
    with pytest.raises(RuntimeError, match="failed"):
        retrain()
    assert [path.name for path in folder.glob("*.jsonl")] == ["2.jsonl"]


def test_sweep_keeps_only_the_best_model(
    client: openai.OpenAI, finish: Callable[[float | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, held_out = (
        client.files.create(file=("a.jsonl", chat_lines(12, first)), purpose="fine-tune").id for first in (0, 50)
    )
    losses = iter([2.0, 1.5, None])
    monkeypatch.setattr(sweep_with_optuna, "time", SimpleNamespace(sleep=lambda _: finish(next(losses))))
    objective = sweep_with_optuna.objective(client, "starter", train, held_out)
    trials = [Trial(), Trial()]
    assert [objective(trial) for trial in trials] == [2.0, 1.5]
    with pytest.raises(RuntimeError, match="failed"):
        objective(Trial())
    (used,) = {job.method.supervised.hyperparameters.n_epochs for job in client.fine_tuning.jobs.list()}
    assert used == 1
    worse, best = (trial.user_attrs["model"] for trial in trials)
    sweep_with_optuna.keep_best(client, best, [worse, best])
    assert {worse, best} & {model.id for model in client.models.list()} == {best}


def test_teacher_answers_become_rows_and_failures_are_counted(
    client: openai.OpenAI, box: ControlledBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "a?": [({"content": "A"}, "stop"), ({"content": "A"}, "stop")],
        "b?": [({"content": "B"}, "stop"), ({"content": "Bé"}, "stop")],
        "c?": [({"content": "C and"}, "length"), ({"content": "", "refusal": "no"}, "stop")],
        "d?": [({"content": None, "tool_calls": [CALL]}, "tool_calls"), ({"content": " "}, "stop")],
    }

    async def rule(body: dict[str, Any]) -> EngineAnswer:
        choices = [
            {"index": at, "finish_reason": end, "message": {"role": "assistant", **message}}
            for at, (message, end) in enumerate(said[body["messages"][-1]["content"]])
        ]
        return EngineAnswer(200, {"choices": choices, "usage": {}})

    box.context.asking.rule = rule  # type: ignore[attr-defined]
    answered = {"messages": [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "old"}]}
    called = {"messages": [{"role": "user", "content": "d?"}], "tools": [TOOL]}
    lines = [json.dumps(row).encode() for row in ({"prompt": "a?"}, answered, {"prompt": "c?"}, called)]
    asked, left_out = list(answers_of_a_teacher.questions(lines)), Counter[str]()
    found = answers_of_a_teacher.ask(client, "starter", asked, poll_s=0.01, n=2)
    rows = list(answers_of_a_teacher.examples(found, left_out))
    assert [(row["messages"][0]["content"], row["messages"][-1].get("content")) for row in rows] == [
        ("a?", "A"),
        ("b?", "B"),
        ("b?", "Bé"),
        ("d?", None),
    ]
    assert rows[-1]["tools"] == [TOOL] and rows[-1]["messages"][-1]["tool_calls"] == [CALL]
    assert left_out == {"repeated": 1, "cut off": 1, "refused": 1, "empty": 1}
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not check_training_file(path).errors


def test_stored_completions_become_training_rows(client: openai.OpenAI, box: ControlledBox) -> None:
    said = [(f"{number}?", {"content": str(number)}, {}) for number in range(30)]  # more than one page
    said += [("call", {"content": None, "tool_calls": [CALL]}, {"tools": [TOOL]})]
    said += [("bad", {"content": "E"}, {"metadata": {"rated": "bad"}})]
    with Database(box.context.db.path) as db:
        for number, (asked, message, more) in enumerate(said):
            end = "tool_calls" if "tool_calls" in message else "stop"
            choice = {"index": 0, "finish_reason": end, "message": {"role": "assistant", **message}}
            answer = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "choices": [choice]}
            given = {"metadata": {"rated": "good"}, "messages": [{"role": "user", "content": asked}]} | more
            RESPONSES.insert(db, completion_row("", "", given, {**answer, "model": "large"}))
    found = answers_of_a_teacher.kept(client, "large", {"rated": "good"})
    rows = list(answers_of_a_teacher.examples(found, Counter()))
    assert len(rows) == 31 and "bad" not in {row["messages"][0]["content"] for row in rows}
    assert rows[-1]["tools"] == [TOOL] and rows[-1]["messages"][-1] == {"role": "assistant", "tool_calls": [CALL]}
