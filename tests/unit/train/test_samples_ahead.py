"""Samples that engines write ahead: while the ranks learn from one step's, by weights of before."""

from __future__ import annotations

from dataclasses import replace

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
    letters,
    lora_spec,
    warned,
)
from train.control.progress import ControlSignals
from train.plan.errors import InvalidHyperparameter
from train.rollouts import hearing
from train.rollouts.policy import steps_to_request
from weights.memory.store import WeightStore


def stale(tmp_path, staleness, **fields):
    return lora_spec(tmp_path, options={**BY_ENGINE, "staleness": staleness}, **fields)


def staleness_of(box):
    return [step["staleness"] for step in box.of("metrics")]


def of_training(asked):
    """(step, version) of each question for a step's samples."""
    return [
        (int(one["question"].split("-")[2]), one["policy"]["version"])
        for one in asked
        if one["question"].startswith("sample-train")
    ]


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_engines_write_the_next_steps_while_one_is_learnt_from(tmp_path, staleness):
    spec = stale(tmp_path, staleness, valid_path=str(write_prompt_file(tmp_path / "valid.jsonl", 6, seed=1)))
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))
    box = Box(letters, engines)
    assert box.run(spec)["outcome"] == "succeeded" and not warned(box)
    assert staleness_of(box) == [min(step, staleness) for step in range(6)]
    # Each prompt is asked for once, as soon as it may be, and of what was asked nothing is gone yet.
    asked = of_training(box.asked)
    assert [step for step, _ in asked] == [step for step in range(6) for _ in range(4)]
    assert all(version.startswith(f"step-{max(0, step - staleness)}.") for step, version in asked)
    assert all(version in there and len(there) <= 1 + staleness for version, _, there in engines.seen)


def test_what_is_asked_ahead_of_its_turn():
    assert steps_to_request(3, 0, 9, ()) == [3]
    assert steps_to_request(0, 2, 9, ()) == [0, 1, 2] and steps_to_request(1, 2, 9, {1, 2}) == [3]
    assert steps_to_request(7, 2, 9, {7, 8}) == [] and steps_to_request(8, 4, 9, {8}) == []
    assert steps_to_request(4, 2, 9, {4}) == [5, 6], "the samples of this one were kept, those of the next were not"


def test_a_job_ahead_that_gives_its_devices_back_loses_no_step_and_does_none_twice(tmp_path):
    spec = stale(tmp_path, 1)
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))

    class Wanting(Box):
        """Its devices are wanted once two steps are done, and it says nothing of the samples of the third."""

        def give(self, data, made):
            if of_training([data])[0][0] != 2:
                super().give(data, made)

        def __call__(self, event, **data):
            super().__call__(event, **data)
            if event == "metrics" and data["step"] == 2:
                self.signals.ask("suspend")

    first, second = Wanting(letters, engines), Box(letters, engines)
    outcome = first.run(spec)
    assert outcome["outcome"] == "suspended" and outcome["step"] == 2
    assert second.run(spec, outcome["snapshot_path"])["outcome"] == "succeeded"
    assert [step["step"] for one in (first, second) for step in one.of("metrics")] == list(range(1, 7))
    # What was asked ahead is sampled anew, by the weights that the job goes on with, under new names.
    assert staleness_of(first) + staleness_of(second) == [0, 1, 0, 1, 1, 1]
    assert not {one["question"] for one in first.asked} & {one["question"] for one in second.asked}


def test_question_that_nobody_heard_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(hearing, "ASK_AGAIN_S", 0.05)
    spec = stale(tmp_path, 1)
    engines = Engines(WeightStore(spec.shm_root, budget_bytes=None))
    lost = []

    def forgetful(asked):
        if of_training([asked])[0][0] == 3 and not lost:
            lost.append(asked)
            return None
        return engines(asked)

    box = Box(letters, forgetful)
    assert box.run(spec)["outcome"] == "succeeded"
    again = [one for one in box.asked if one["question"] == lost[0]["question"]]
    assert again == [lost[0]] * 2 and staleness_of(box) == [0, 1, 1, 1, 1, 1]


def test_question_answered_while_a_step_was_learnt_is_not_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(hearing, "ASK_AGAIN_S", -1.0)
    spec = stale(tmp_path, 1)
    box = Box(letters, Engines(WeightStore(spec.shm_root, budget_bytes=None)))
    assert box.run(spec)["outcome"] == "succeeded"
    assert [step for step, _ in of_training(box.asked)] == [step for step in range(6) for _ in range(4)]


def test_staleness_is_for_engines(tmp_path):
    model = replace(MODEL, adapter_max_rank=32)
    given = {"lora_rank": 8, "rollouts": "engine", "staleness": 2}
    assert REINFORCEMENT.resolve(given, DATASET, model, 1)["options"]["staleness"] == 2
    for rollouts, expected in (("engine", 1), ("ranks", 0)):
        fields = REINFORCEMENT.resolve({"lora_rank": 8, "rollouts": rollouts}, DATASET, model, 1)
        assert fields["options"]["staleness"] == expected
    with pytest.raises(InvalidHyperparameter, match="staleness"):
        REINFORCEMENT.resolve({"lora_rank": 8, "staleness": 1}, DATASET, model, 1)
    with pytest.raises(InvalidHyperparameter, match="staleness"):
        REINFORCEMENT.resolve({**given, "staleness": 5}, DATASET, model, 1)


def test_the_first_answer_to_a_question_counts():
    signals = ControlSignals()
    signals.answer("q", 1)
    signals.answer("q", 2)  # whoever was asked again
    assert signals.take_answer("q") == 1 and signals.take_answer("q") is None
