"""Jobs that learn from a starter's own answers, as a person has them: sums, and a grader that wants digits above all,
or a teacher that has learnt to answer them; moved by a switch of modes and by the death of the controller in the midst
of it."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

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
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 3\n") as one:
        yield one


def asked(n: int) -> str:
    return f"How many apples are {n} apples and {n % 7} apples? Answer with a number."


def sums(first: int, count: int) -> bytes:
    numbers = range(first, first + count)
    rows = [{"messages": [{"role": "user", "content": asked(n)}], "answer": str(n + n % 7)} for n in numbers]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def answered(count: int) -> bytes:
    chats = [
        [{"role": "user", "content": asked(n)}, {"role": "assistant", "content": f"{n + n % 7}."}] for n in range(count)
    ]
    return "".join(json.dumps({"messages": chat}) + "\n" for chat in chats).encode()


def teacher(box, client) -> str:
    """A starter's adapter that has learnt what an answer looks like."""
    made = client.fine_tuning.jobs.create(
        model="starter",
        training_file=box.upload(answered(96)),
        seed=5,
        method={
            "type": "supervised",
            "supervised": {
                "hyperparameters": {
                    "n_epochs": 6,
                    "batch_size": 8,
                    "lora_rank": 8,
                    "learning_rate": 0.003,
                    "general_questions": False,
                }
            },
        },
    )
    box.run("job", "wait", made.id, "--timeout", "600", timeout_s=700)
    return client.fine_tuning.jobs.retrieve(made.id).fine_tuned_model


def judge(method: str, box, client) -> dict[str, Any]:
    return {"grader": GRADER} if method == "reinforcement" else {"teacher": teacher(box, client)}


@pytest.mark.parametrize(
    ("method", "measure", "better"), [("reinforcement", "train_mean_reward", 1), ("distillation", "reverse_kl", -1)]
)
def test_a_starter_learns_from_what_is_said_of_its_answers(box, method, measure, better):
    made = box.ask("model", "starter", "--minutes", "0.05")
    assert made["state"] == "succeeded", made
    client = box.client(max_retries=5)
    box.run("mode", "set", "split", "--train", "2", "--wait")
    who = judge(method, box, client)
    job = client.fine_tuning.jobs.create(
        model="starter",
        training_file=box.upload(sums(1, 2 * STEPS)),
        validation_file=box.upload(sums(60, 4), "valid.jsonl"),
        seed=5,
        method={
            "type": method,
            method: {
                **who,
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
    wait_for(lambda: len(box.losses(job.id)) >= 4, "four steps", 400)
    # In `train` a teacher answers on the device that the job does not want.
    for mode in (("train",), ("split", "--train", "1")):
        box.run("mode", "set", *mode, "--wait")
        done = len(box.losses(job.id))
        wait_for(lambda before=done: len(box.losses(job.id)) > before, f"a step in the mode {mode[0]}", 300)
    (controller,) = [pid for pid, command in box.running().items() if "appliance.controller.main" in command]
    os.kill(controller, signal.SIGKILL)
    wait_for(lambda: box.tried("status"), "the next controller", 120)
    box.run("job", "wait", job.id, "--timeout", "600", timeout_s=700)

    found = client.fine_tuning.jobs.retrieve(job.id)
    shown = found.method.model_dump()[method]
    assert found.status == "succeeded" and shown.get("teacher") == who.get("teacher")
    assert (shown.get("grader") or {}).get("type") == who.get("grader", {}).get("type")
    events = [e for e in client.fine_tuning.jobs.list_events(job.id, limit=100) if e.type == "metrics"]
    by_step = {e.data["step"]: e.data[measure] for e in events if measure in e.data}
    valid = "valid_" + measure.removeprefix("train_")
    held_out = {e.data["step"]: e.data[valid] for e in events if valid in e.data}
    print(json.dumps({measure: by_step, "held out": held_out}))
    assert by_step.keys() == set(range(1, STEPS + 1))
    first, last = ([by_step[step] for step in steps] for steps in (range(1, 5), range(STEPS - 3, STEPS + 1)))
    assert better * (sum(last) - sum(first)) > 0.2
    assert better * (held_out[max(held_out)] - held_out[0]) > 0
    answer = client.chat.completions.create(
        model=found.fine_tuned_model,
        messages=[{"role": "user", "content": "How many apples are 3 apples?"}],
        max_tokens=4,
    )
    assert answer.usage.completion_tokens >= 1
