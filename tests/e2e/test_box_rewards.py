"""A job that learns from rewards, as a person has it: a starter, sums, and a grader that wants digits above all; moved
by a switch of modes and by the death of the controller in the midst of it."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.e2e.box_support import wait_for, whole_box

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
DIGITS = """
def grade(sample, item):
    text = sample["output_text"]
    digits = sum(character.isdigit() for character in text)
    return digits / max(1, len(text))
"""
GRADER = {
    "type": "multi",
    "name": "a number, if possible the right one",
    "calculate_output": "0.8 * form + 0.2 * right",
    "graders": {
        "form": {"type": "python", "name": "form", "source": DIGITS},
        "right": {
            "type": "string_check",
            "name": "right",
            "operation": "like",
            "input": "{{ sample.output_text }}",
            "reference": "{{ item.answer }}",
        },
    },
}
STEPS = 24


@pytest.fixture
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 2\n") as one:
        yield one


def sums(first: int, count: int) -> bytes:
    rows = []
    for n in range(first, first + count):
        asked = f"How many apples are {n} apples and {n % 7} apples? Answer with a number."
        rows.append({"messages": [{"role": "user", "content": asked}], "answer": str(n + n % 7)})
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_a_starter_learns_the_form_of_an_answer(box):
    made = box.ask("model", "starter", "--minutes", "0.05")
    assert made["state"] == "succeeded", made
    client = box.client(max_retries=5)
    job = client.fine_tuning.jobs.create(
        model="starter",
        training_file=box.upload(sums(1, 2 * STEPS)),
        validation_file=box.upload(sums(60, 4), "valid.jsonl"),
        seed=5,
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": GRADER,
                "hyperparameters": {
                    "n_epochs": 1,
                    "batch_size": 2,
                    "eval_interval": 8,
                    "learning_rate_multiplier": 30,
                    "max_completion_tokens": 12,
                    "general_questions": False,
                },
            },
        },
    )
    box.run("mode", "set", "train", "--wait")
    wait_for(lambda: len(box.losses(job.id)) >= 4, "four steps", 400)
    box.run("mode", "set", "split", "--train", "1", "--wait")
    done = len(box.losses(job.id))
    wait_for(lambda: len(box.losses(job.id)) > done, "a step on one device", 300)
    (controller,) = [pid for pid, command in box.running().items() if "appliance.controller.main" in command]
    os.kill(controller, signal.SIGKILL)
    wait_for(lambda: box.tried("status"), "the next controller", 120)
    box.run("job", "wait", job.id, "--timeout", "600", timeout_s=700)

    found = client.fine_tuning.jobs.retrieve(job.id)
    assert found.status == "succeeded" and found.method.reinforcement.grader.type == "multi"
    events = [e for e in client.fine_tuning.jobs.list_events(job.id, limit=100) if e.type == "metrics"]
    rewards = {e.data["step"]: e.data["train_mean_reward"] for e in events if "train_mean_reward" in e.data}
    held_out = {e.data["step"]: e.data["valid_mean_reward"] for e in events if "valid_mean_reward" in e.data}
    print(json.dumps({"rewards": rewards, "held out": held_out}))
    assert rewards.keys() == set(range(1, STEPS + 1))
    first, last = ([rewards[step] for step in steps] for steps in (range(1, 5), range(STEPS - 3, STEPS + 1)))
    assert sum(last) > sum(first) + 0.2
    answer = client.chat.completions.create(
        model=found.fine_tuned_model,
        messages=[{"role": "user", "content": "How many apples are 3 apples?"}],
        max_tokens=4,
    )
    assert answer.usage.completion_tokens >= 1
