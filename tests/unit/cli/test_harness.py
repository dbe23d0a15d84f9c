"""`appliance eval harness`, without the library: batches of the real control app, and a stand-in for what the library
brings (its base class). tests/e2e/test_harness_soak.py has the library itself."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from appliance.cli.client import Address, Client
from appliance.cli.command import Session
from appliance.cli.errors import CommandFailed
from appliance.controller.interfaces.ports import EngineAnswer
from appliance.harness import kept
from appliance.harness.batches import Batches
from appliance.harness.errors import Unsupported
from appliance.harness.kept import NotKept, keep
from appliance.harness.main import figures
from tests.unit.cli.conftest import ControlledBox


class Box:
    """Answers each request with what it was asked last; counts."""

    def __init__(self, box: ControlledBox, choice=None):
        self.asked: list[dict] = []
        self.choice = choice or (lambda body: {"message": {"content": body["messages"][-1]["content"].upper()}})
        box.context.sampling_engines.rule = self.answer
        client = Client(Address(socket_path=str(box.data_dir / "controller.sock")))
        self.batches = Batches(Session(client, "json", None, None))

    async def answer(self, body):
        self.asked.append(body)
        found = self.choice(body)
        if isinstance(found, EngineAnswer):
            return found
        return EngineAnswer(200, {"choices": [{"index": 0, **found}], "usage": {}}, "v1")


@pytest.fixture
def library(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lm_eval.api.instance"].Instance = SimpleNamespace
    sys.modules["lm_eval.api.model"].LM = object
    monkeypatch.delitem(sys.modules, "appliance.harness.box_model", raising=False)
    yield
    monkeypatch.delitem(sys.modules, "appliance.harness.box_model", raising=False)


def model(batches, chat=True):
    from appliance.harness.box_model import BoxModel

    return BoxModel(batches, "starter", chat=chat, max_tokens=16, seed=None)


def question(*args):
    return SimpleNamespace(args=args, task_name="capitals")


def bodies(name, *texts):
    return [{"model": name, "messages": [{"role": "user", "content": text}]} for text in texts]


@pytest.mark.parametrize("name, again", [("starter@v2", 0), ("starter", 3)])
def test_answers_come_in_the_order_of_the_questions(box: ControlledBox, name: str, again: int):
    """What a version was asked is not asked again by the same command, run anew; a name may be another version now."""
    asked = Box(box)
    for _ in range(2):
        found = asked.batches.answers("/v1/chat/completions", bodies(name, "a", "b", "c"), "letters")
        assert [one["choices"][0]["message"]["content"] for one in found] == ["A", "B", "C"]
    assert len(asked.asked) == 3 + again
    asked.batches.answers("/v1/chat/completions", bodies(name, "a", "b"), "letters")
    assert len(asked.asked) == 3 + again + 2


def test_a_command_that_was_ended_goes_on_where_it_was(box: ControlledBox):
    asked = Box(box)
    box.context.sampling_engines.rows.places = 0
    first = threading.Thread(target=asked.batches.answers, args=("/v1/chat/completions", bodies("starter", "a"), ""))
    first.start()
    while not (made := box.json("batch", "list")["data"]) or made[0]["status"] != "in_progress":
        pass
    box.do(box.context.sampling_engines.awake)
    asked.batches.answers("/v1/chat/completions", bodies("starter", "a"), "")
    first.join()
    assert len(box.json("batch", "list")["data"]) == 1


def test_what_is_not_answered_is_said(box: ControlledBox):
    refusal = {"error": {"message": "too long", "type": "invalid_request_error", "param": None, "code": None}}
    asked = Box(box, lambda body: EngineAnswer(400, refusal, "v1"))
    with pytest.raises(CommandFailed, match="2 of 2 requests of batch_.* the first: too long"):
        asked.batches.answers("/v1/chat/completions", bodies("starter", "a", "b"), "letters")


def test_a_text_is_asked_for_as_messages_and_cut_at_every_stop(box: ControlledBox, library):
    asked = Box(box, lambda body: {"message": {"content": "Paris. Or so?"}})
    until = ["1", "2", "3", "4", "?", " Or"]
    context = json.dumps([{"role": "user", "content": "The capital of France?"}])
    found = model(asked.batches).generate_until([question(context, {"until": until, "max_gen_toks": 8})])
    assert found == ["Paris."]
    (body,) = asked.asked
    assert body["stop"] == until[:4] and body["max_completion_tokens"] == 8 and body["temperature"] == 0
    assert body["messages"][0]["content"] == "The capital of France?"


def test_a_choice_scores_the_tokens_behind_its_question(box: ControlledBox, library):
    def scored(body):
        told = {
            "tokens": ["The", " sky", " is", " bl", "ue"],
            "text_offset": [0, 3, 7, 10, 13],
            "token_logprobs": [None, -1.0, -2.0, -0.5, -0.25],
            "top_logprobs": [None, {"x": -0.1}, {"y": -0.1}, {" bl": -0.5}, {"ue": -0.25}],
        }
        if body["prompt"].endswith("red"):
            told = {name: values[:3] + values[4:] for name, values in told.items()}
            told["tokens"][-1], told["text_offset"][-1], told["token_logprobs"][-1] = " red", 10, -4.0
        return {"text": body["prompt"], "logprobs": told}

    asked = Box(box, scored)
    # The blank at the end of the second context belongs to the continuation: the token that has it does too.
    found = model(asked.batches).loglikelihood([question("The sky is", " blue"), question("The sky is ", "red")])
    assert found == [(-0.75, True), (-4.0, False)]
    assert asked.asked[0]["echo"] and asked.asked[0]["max_tokens"] == 0
    with pytest.raises(Unsupported, match="capitals scores texts that follow nothing"):
        model(asked.batches).loglikelihood([question("", "Paris")])


def test_the_librarys_figures_have_intervals():
    told = {"alias": "capitals", "acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1.0, "f1_stderr,strict": "N/A"}
    rows = figures("starter", {"results": {"capitals": told}, "n-samples": {"capitals": {"effective": 25}}})
    assert [(row["metric"], row["value"], row["questions"]) for row in rows] == [
        ("acc", 0.5, 25),
        ("f1 (strict)", 1.0, 25),
    ]
    assert rows[0]["low"] == pytest.approx(0.304, abs=1e-3) and rows[0]["high"] == pytest.approx(0.696, abs=1e-3)
    assert rows[1]["low"] is None


def logged(number, said, **scores):
    """As the library logs a question: scores by metric, or by (metric, filter)."""
    by_filter: dict[str, dict] = {}
    for name, score in scores.items():
        metric, _, chosen = name.partition("__")
        by_filter.setdefault(chosen or "none", {})[metric] = score
    arguments = [("What is it?", {"until": []})] if isinstance(said, str) else [("It is", " a"), ("It is", " b")]
    one = {
        "doc_id": number,
        "target": "A",
        "arguments": arguments,
        "filtered_resps": [said] if isinstance(said, str) else said,
    }
    return [{**one, "filter": chosen, "metrics": list(of), **of} for chosen, of in by_filter.items()]


def kept_run(box: ControlledBox, ids: dict[str, str], model: str) -> tuple[dict, list[dict]]:
    """A run once it is judged, and its items."""
    client = Client(Address(socket_path=str(box.data_dir / "controller.sock")))
    path = f"/v1/evals/{ids['']}/runs/{ids[model]}"
    deadline = time.monotonic() + 30
    while (run := client.get(path))["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline
    return run, sorted(client.get(f"{path}/output_items", limit=100)["data"], key=lambda one: one["datasource_item_id"])


def test_what_the_library_found_is_kept_as_runs_of_one_evaluation(box: ControlledBox):
    session = Box(box).batches._session
    first = [
        *logged(1, "no", exact=0.0, exact__strict=0.0),
        *logged(0, "A", exact=1.0, exact__strict=0.0, spread=(1, 2)),
    ]
    other = [*logged(0, "A", exact=1.0, exact__strict=1.0), *logged(1, "A", exact=1.0, exact__strict=0.0)]
    ids = keep(session, "capitals", {"as": "text"}, {"starter": first, "starter@v2": other})
    run, items = kept_run(box, ids, "starter")
    assert (run["status"], run["name"]) == ("completed", "starter")
    means = {one["testing_criteria"]: one["mean_reward"] for one in run["per_testing_criteria_results"]}
    assert means == {"exact": 0.5, "exact (strict)": 0.0}, "what is no number of a question is left out"
    assert [one["sample"]["output"][0]["content"] for one in items] == ["A", "no"]
    assert items[0]["datasource_item"]["question"] == "What is it?" and items[0]["datasource_item"]["target"] == "A"
    run, _ = kept_run(box, ids, "starter@v2")
    assert {one["testing_criteria"]: one["mean_reward"] for one in run["per_testing_criteria_results"]}["exact"] == 1
    again = keep(session, "capitals", {"as": "text"}, {"starter": first})
    assert again[""] == ids[""] and again["starter"] != ids["starter"]
    assert keep(session, "capitals", {"as": "messages"}, {"starter": first})[""] != ids[""]
    shown = box.run("eval", "show", ids[""]).output
    assert "starter@v2" in shown and "EXACT (STRICT)" in shown
    assert len(box.json("eval", "list")["data"]) == 2


def test_the_choice_that_is_likeliest_is_the_answer_that_is_kept(box: ControlledBox):
    session = Box(box).batches._session
    ids = keep(session, "choose", {}, {"starter": logged(0, [(-2.0, False), (-1.0, True)], acc=1.0)})
    _, (item,) = kept_run(box, ids, "starter")
    assert item["sample"]["output"][0]["content"] == " b" and item["status"] == "pass"


def test_scores_between_none_and_all_are_given_by_code(box: ControlledBox):
    """As rewards; a question without a number is in no mean."""
    session = Box(box).batches._session
    ids = keep(session, "f1", {}, {"starter": [*logged(0, "a", f1=0.25), *logged(1, "b", f1=1.0)]})
    (criterion,) = box.json("eval", "list")["data"][0]["testing_criteria"]
    assert criterion["type"] == "python" and criterion["name"] == "f1"
    run, _ = kept_run(box, ids, "starter")
    assert run["per_testing_criteria_results"][0]["mean_reward"] == 0.625


def test_what_has_no_place_is_told_in_words(box: ControlledBox, monkeypatch):
    session = Box(box).batches._session
    with pytest.raises(NotKept, match="no figure that is a mean"):
        keep(session, "words", {}, {"starter": logged(0, "a", perplexity=(1.0, 3))})
    monkeypatch.setattr(kept, "MOST_ITEMS", 1)
    with pytest.raises(NotKept, match="2 questions; a run has 1 at most"):
        keep(session, "long", {}, {"starter": [*logged(0, "a", acc=1.0), *logged(1, "a", acc=1.0)]})
    assert box.json("eval", "list")["data"] == [] == box.json("file", "list")["data"]


def test_without_the_library_the_command_says_how_to_get_it(box: ControlledBox, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused = box.run("eval", "harness", "starter", "--tasks", "capitals")
    assert refused.exit_code == 2 and "pip install 'lm-eval[api]'" in refused.output
