"""Samples that engines write ahead: while the ranks learn from one step's, by weights of before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.train_support.tiny import write_prompt_file
from tests.unit.train.test_deepspeed_contract import world_of_one  # noqa: F401
from tests.unit.train.test_reinforcement import (
    BY_ENGINE,
    DATASET,
    MODEL,
    REINFORCEMENT,
    Box,
    Engines,
    PlainEngine,
    letters,
    lora_spec,
    warned,
)
from train.control.progress import ControlSignals
from train.plan.errors import InvalidHyperparameter
from train.rollouts import hearing
from train.rollouts.policy import Policy, steps_to_request, take_answers
from train.rollouts.sampler import Answers
from weights.format.errors import StoreFull
from weights.memory.store import WeightStore


def stale(tmp_path, staleness, **fields):
    return lora_spec(tmp_path, options={**BY_ENGINE, "staleness": staleness}, **fields)


def staleness_of(steps):
    assert all(step["staleness_mean"] <= step["staleness_max"] for step in steps)
    return [step["staleness_max"] for step in steps]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_engines_write_the_next_steps_while_one_is_learnt_from(tmp_path, staleness):
    spec = stale(tmp_path, staleness, valid_path=str(write_prompt_file(tmp_path / "valid.jsonl", 6, seed=1)))
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))
    box = Box(letters, engines)
    assert box.run(spec)["outcome"] == "succeeded"
    steps = box.of("metrics")
    assert [step["engine_samples"] for step in steps] == [1.0] * 6 and not warned(box)
    assert staleness_of(steps) == [min(step, staleness) for step in range(6)]
    assert steps[0]["staleness_mean"] == 0 and steps[-1]["staleness_mean"] == staleness
    # Each step's is asked for once, as soon as it may be, and of what was asked nothing is gone yet.
    asked = [one["question"].split("-")[1:3] for one in box.asked]
    assert [int(step) for purpose, step in asked if purpose == "train"] == list(range(6))
    weights = [step for (purpose, _), (_, step, _) in zip(asked, engines.seen, strict=True) if purpose == "train"]
    assert weights == [max(0, step - staleness) for step in range(6)]
    assert all(version in there and len(there) <= 1 + staleness for version, _, there in engines.seen)
    assert len({one["seed"] for one in box.asked if "train" in one["question"] for one in one["prompts"]}) == 24


def test_what_is_asked_ahead_of_its_turn():
    assert steps_to_request(3, 0, 9, ()) == [3]
    assert steps_to_request(0, 2, 9, ()) == [0, 1, 2] and steps_to_request(1, 2, 9, {1, 2}) == [3]
    assert steps_to_request(7, 2, 9, {7, 8}) == [] and steps_to_request(8, 4, 9, {8}) == []
    assert steps_to_request(4, 2, 9, {4}) == [5, 6], "the samples of this one were kept, those of the next were not"


class Slow(Box):
    """Whose engine answers for a step once the one before is learnt."""

    def __init__(self, *given):
        super().__init__(*given)
        self.waiting = []

    def __call__(self, event, **data):
        if event == "ask" and data["kind"] == "sample":
            self.asked.append(data)
            # An engine has each answer while it may: what it names must be there all the time.
            self.waiting.append((data, self.sampled(data)))
            if len(self.waiting) == 1 and len(self.asked) == 1:
                self.deliver()
            return
        super().__call__(event, **data)
        if event == "metrics":
            self.deliver()

    def deliver(self):
        waiting, self.waiting = self.waiting, []
        for data, answer in waiting:
            self.signals.answer(data["question"], answer)


def step_of_question(data):
    return int(data["question"].split("-")[1])


def judged(box):
    """The texts of each step that were judged, by the step."""
    found = {}
    for name, texts in box.questions:
        step = step_of_question({"question": name})
        assert step not in found, "each once"
        found[step] = texts
    return found


def test_what_engines_have_written_ahead_is_judged_ahead(tmp_path):
    """Whoever judges has each step's samples before the ranks have learnt from the one before."""
    spec = stale(tmp_path, 1)
    order = []

    class Telling(Slow):
        def __call__(self, event, **data):
            if event == "ask" and data["kind"] == "grade":
                order.append(("asked", 1 + step_of_question(data)))
            super().__call__(event, **data)
            if event == "metrics":
                order.append(("learnt", data["step"]))

    box = Telling(letters, Engines(WeightStore(spec.shm_root, budget_bytes=None)))
    assert box.run(spec)["outcome"] == "succeeded"
    assert judged(box).keys() == set(range(6))
    assert all(order.index(("asked", step + 1)) < order.index(("learnt", step)) for step in range(1, 6))


def test_samples_that_the_ranks_have_to_complete_are_judged_in_their_turn(tmp_path):
    spec = stale(tmp_path, 1)
    box = Box(letters, Engines(WeightStore(spec.shm_root, budget_bytes=None), silent={3}))
    assert box.run(spec)["outcome"] == "succeeded"
    assert judged(box).keys() == set(range(6)) and all(len(texts) == 32 for texts in judged(box).values())


@pytest.mark.parametrize("box", [Box, Slow])
def test_a_job_ahead_that_gives_its_devices_back_loses_no_step_and_does_none_twice(tmp_path, box):
    spec = stale(tmp_path, 1)
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))

    class Wanting(box):
        """Its devices are wanted once two steps are done, and it says nothing of the third one's samples."""

        def __call__(self, event, **data):
            super().__call__(event, **data)
            if event == "metrics" and data["step"] == 2:
                self.signals.ask("suspend")

        def answer(self, data):
            if step_of_question(data) != 2:
                super().answer(data)

    first, second = Wanting(letters, engines), box(letters, engines)
    outcome = first.run(spec)
    assert outcome["outcome"] == "suspended" and outcome["step"] == 2
    assert second.run(spec, outcome["snapshot_path"])["outcome"] == "succeeded"
    steps = [step for one in (first, second) for step in one.of("metrics")]
    assert [step["step"] for step in steps] == list(range(1, 7))
    # A step that had not begun is sampled by the weights as they are, and so is what was asked ahead.
    assert judged(first)[2] == judged(second)[2]
    assert staleness_of(steps) == [0, 1, 0, 1, 1, 1]
    assert [int(one["question"].split("-")[2]) for one in second.asked] == [2, 3, 4, 5]
    assert not {one["question"] for one in first.asked} & {one["question"] for one in second.asked}


def test_a_question_ahead_that_nobody_heard_is_asked_again_in_its_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(hearing, "ASK_AGAIN_S", 0.05)
    spec = stale(tmp_path, 1)
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))
    lost = []

    def forgetful(asked):
        if asked["question"].startswith("sample-train-3-") and not lost:
            lost.append(asked)
            return None
        return engines(asked)

    box = Box(letters, forgetful)
    assert box.run(spec)["outcome"] == "succeeded"
    again = [one for one in box.asked if one["question"] == lost[0]["question"]]
    assert again == [lost[0]] * 2 and staleness_of(box.of("metrics")) == [0, 1, 1, 1, 1, 1]


def test_what_an_engine_leaves_of_a_step_ahead_the_ranks_sample_from_the_weights_of_the_step(tmp_path):
    spec = stale(tmp_path, 1)
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None), silent=set(range(16)))
    box = Box(letters, engines)
    assert box.run(spec)["outcome"] == "succeeded"
    *_, last = box.of("metrics")
    assert last["engine_samples"] == 0.5 and last["staleness_max"] == 1
    assert 0 < last["staleness_mean"] < 1


def test_a_store_without_room_for_the_model_is_said_and_no_step_waits(tmp_path, monkeypatch):
    spec = stale(tmp_path, 1)
    engines, version, calls = Engines(WeightStore(spec.shm_root, budget_bytes=None)), Policy.version, []

    def full(self, step):
        calls.append(step)
        if step == 3:
            raise StoreFull(needed_bytes=2, used_bytes=0, budget_bytes=1, free_bytes=0)
        return version(self, step)

    monkeypatch.setattr(Policy, "version", full)
    box = Box(letters, engines)
    assert box.run(spec)["outcome"] == "succeeded"
    steps = box.of("metrics")
    assert [step["engine_samples"] for step in steps] == [1.0] * 6
    # Step 4 could not be asked for ahead: it was in its turn.
    assert staleness_of(steps) == [0, 1, 1, 1, 0, 1]


class Swapping(Engines):
    """Writes the first token of an answer by the version that the question names, and the rest, if there is one, by the
    one that has followed it."""

    def answer(self, prompt, place):
        told = super().answer(prompt, place)
        (ids,) = told["ids"]
        name, _, world = self.seen[-1][0].partition(".")
        later = f"step-{1 + int(name.removeprefix('step-'))}.{world}"
        spans = [[self.seen[-1][0], 1], [later, len(ids) - 1]][: len(ids)]
        return {**told, "spans": [spans]}


def test_each_token_knows_the_weights_that_wrote_it(tmp_path):
    spec = stale(tmp_path, 2)
    engines = Swapping(WeightStore(spec.shm_root, budget_bytes=None))
    first = []  # whose answers can only be of its own weights

    def answered(asked):
        first.append(asked)
        return engines(asked) if len(first) > 1 else _without_spans(engines, asked)

    box = Box(letters, answered)
    assert box.run(spec)["outcome"] == "succeeded"
    steps = box.of("metrics")
    assert [step["engine_samples"] for step in steps] == [1.0] * 6
    assert staleness_of(steps) == [0, 1, 2, 2, 2, 2]
    sizes = [1 + (one["seed"] + place) % 5 for one in box.asked[-1]["prompts"] for place in places(one)]
    # Of each answer one token is two updates old, the others one.
    assert steps[-1]["staleness_mean"] == pytest.approx((sum(sizes) + len(sizes)) / sum(sizes))


def places(prompt):
    return range(prompt["place"], prompt["place"] + prompt["n"])


def _without_spans(engines, asked):
    told = engines(asked)
    return {**told, "samples": [{key: one[key] for key in ("place", "ids", "log_probs")} for one in told["samples"]]}


@pytest.mark.parametrize(
    "spans",
    [
        [["step-3.ab", 2]],  # too few
        [["step-0.ab", 1], ["step-3.ab", 2]],  # staler than may be
        [["step-4.ab", 3]],  # of weights that do not exist yet
        [["step-2.cd", 3]],  # of another world
        [["other", 3]],
    ],
)
def test_an_answer_of_other_weights_than_may_be_is_none(spans):
    made = Answers.empty(2, 4, staleness=2)
    part = {"place": 0, "ids": [[5, 6, 7]] * 2, "log_probs": [[-1.0] * 3] * 2}
    right = [["step-1.ab", 1], ["step-2.ab", 1], ["step-3.ab", 1]]
    take_answers([{**part, "spans": [spans, right]}], made, 10, 3, "step-1.ab")
    assert made.sizes.tolist() == [0, 3] and made.older.tolist() == [[0, 0], [1, 1]]


def test_staleness_is_for_engines(tmp_path):
    model = replace(MODEL, adapter_max_rank=32)
    given = {"lora_rank": 8, "rollouts": "engine", "staleness": 2}
    assert REINFORCEMENT.resolve(given, DATASET, model, 1)["options"]["staleness"] == 2
    for rollouts, expected in (("engine", 1), ("ranks", 0)):
        fields = REINFORCEMENT.resolve({"lora_rank": 8, "rollouts": rollouts}, DATASET, model, 1)
        assert fields["options"]["staleness"] == expected
    with pytest.raises(InvalidHyperparameter, match="'staleness' is 1; expected 0 or 'auto' unless rollouts"):
        REINFORCEMENT.resolve({"lora_rank": 8, "staleness": 1}, DATASET, model, 1)
    assert REINFORCEMENT.resolve({**given, "in_flight": True}, DATASET, model, 1)["options"]["in_flight"] is True
    with pytest.raises(InvalidHyperparameter, match="without staleness"):
        REINFORCEMENT.resolve({**given, "staleness": 0, "in_flight": True}, DATASET, model, 1)
    with pytest.raises(InvalidHyperparameter, match="a whole number from 0 to 4"):
        REINFORCEMENT.resolve({**given, "staleness": 5}, DATASET, model, 1)


@pytest.mark.soak
def test_a_run_learns_from_samples_of_the_weights_of_a_step_before(tmp_path):
    spec = stale(tmp_path, 1, n_epochs=4, learning_rate=1e-2)
    box = Box(letters, PlainEngine(spec))
    assert box.run(spec)["outcome"] == "succeeded"
    steps = box.of("metrics")
    rewards = [step["train_mean_reward"] for step in steps]
    assert np.mean(rewards[-4:]) > 2 * np.mean(rewards[:4]), rewards
    assert staleness_of(steps) == [0] + [1] * 23
    # By how much one update moves a token, and the truncated weight says how little that is.
    assert steps[0]["mismatch_mean"] < 0.01 < max(step["mismatch_mean"] for step in steps)


def test_the_first_answer_to_a_question_counts():
    signals, heard = ControlSignals(), []
    signals.once_answered("q", heard.append)
    signals.answer("q", 1)
    signals.answer("q", 2)  # whoever was asked again
    assert heard == [1] and signals.take_answer("q") == 1 and signals.take_answer("q") is None
