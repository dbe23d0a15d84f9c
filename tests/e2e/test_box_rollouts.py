"""A job of rewards whose rollouts an engine of the box samples, as a person has it: users are answered beside it, by
the base alone; and whatever ends the engine, every step has its samples."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import openai
import pytest

from tests.e2e.box_support import wait_for, whole_box
from tests.e2e.test_box_rewards import GRADER, sums
from weights.format.names import decode_name, policy_name

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
STEPS = 24


@pytest.fixture
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 2\n") as one:
        yield one


def job_of(box, client, steps: int, **more):
    return client.fine_tuning.jobs.create(
        model="starter",
        training_file=box.upload(sums(1, 2 * steps)),
        seed=5,
        method={
            "type": "reinforcement",
            "reinforcement": {
                "grader": GRADER,
                "hyperparameters": {
                    "n_epochs": 1,
                    "batch_size": 2,
                    "learning_rate": 0.003,
                    "lora_rank": 8,
                    "max_completion_tokens": 12,
                    "general_questions": False,
                    **more,
                },
            },
        },
    )


def steps_of(client, job_id: str) -> dict[int, dict]:
    """The data of each step's event."""
    events = client.fine_tuning.jobs.list_events(job_id, limit=100)
    told = [e.data for e in events if e.type == "metrics" and "train_mean_reward" in e.data]
    assert len({data["step"] for data in told}) == len(told), "each step counts once"
    return {data["step"]: data for data in told}


def policies(box, job_id: str) -> list[str]:
    """Versions of the model in training, as they lie in shared memory."""
    roots = Path("/dev/shm").glob(f"*{box._names()[0]}*")
    folders = [folder for root in roots for folder in root.rglob("adapters/*")]
    return [
        one.name for folder in folders if decode_name(folder.name) == policy_name(job_id) for one in folder.iterdir()
    ]


def test_an_engine_samples_for_a_job_and_nobody_else_meets_its_model(box):
    made = box.ask("model", "starter", "--minutes", "0.05")
    assert made["state"] == "succeeded", made
    client = box.client(max_retries=5)
    box.run("mode", "set", "split", "--train", "1", "--wait")
    job = job_of(box, client, STEPS, rollouts="engine")

    def by_engine() -> list[int]:
        return [step for step, data in steps_of(client, job.id).items() if data["engine_samples"] == 1]

    wait_for(lambda: len(by_engine()) >= 3, "three steps by an engine", 400)

    (version, *_) = wait_for(lambda: policies(box, job.id), "the model in training", 60)
    for name in (f"{policy_name(job.id)}@{version}", policy_name(job.id)):
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    shown = json.dumps([m.model_dump() for m in client.models.list()]) + json.dumps(box.admin("models"))
    assert ".policy" not in shown and ".policy" not in json.dumps(box.admin("status"))
    answer = client.chat.completions.create(model="starter", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.model == "starter" and "step" not in (answer.system_fingerprint or "")

    done = len(steps_of(client, job.id))
    for pid in box.pids_logging_to("engine-*.log"):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(steps_of(client, job.id)) > done + 1, "steps after the death of the engine", 300)
    box.run("mode", "set", "train", "--wait")
    done = len(steps_of(client, job.id))
    wait_for(lambda: len(steps_of(client, job.id)) > done + 1, "steps without an engine", 300)
    box.run("mode", "set", "split", "--train", "1", "--wait")
    (controller,) = [pid for pid, command in box.running().items() if "appliance.controller.main" in command]
    os.kill(controller, signal.SIGKILL)
    wait_for(lambda: box.tried("status"), "the next controller", 120)
    box.run("job", "wait", job.id, "--timeout", "600", timeout_s=700)

    assert client.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
    steps = steps_of(client, job.id)
    print(json.dumps({step: [data["train_mean_reward"], data["engine_samples"]] for step, data in steps.items()}))
    print(json.dumps({step: [data["mismatch_mean"], data["mismatch_max"]] for step, data in steps.items()}))
    assert steps.keys() == set(range(1, STEPS + 1))
    assert all(data["mismatch_mean"] < 0.1 for data in steps.values())
    rewards = [steps[step]["train_mean_reward"] for step in sorted(steps)]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 0.2
    wait_for(lambda: not policies(box, job.id), "its last model in training to be gone", 60)
