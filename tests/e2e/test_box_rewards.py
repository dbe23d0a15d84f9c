"""Jobs that train on a starter's own answers to sums, graded mainly for short answers (a starter hardly knows digits),
or by a trained teacher. An engine samples the answers, in parallel or in turns with the ranks. Users get answers of the
base only, and each step counts once, whatever moves the job or kills the engine or the controller."""

import json
import os
import signal

import openai
import pytest

from appliance.paths import BoxPaths
from tests.e2e.box_support import wait_for, whole_box
from weights.format.names import decode_name, policy_name

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
SHORT = """
def grade(sample, item):
    return max(0.0, 1 - len(sample["output_text"]) / 48)
"""
GRADER = {
    "type": "multi",
    "name": "a short answer, if possible the right one",
    "calculate_output": "0.8 * form + 0.2 * right",
    "graders": {
        "form": {"type": "python", "name": "form", "source": SHORT},
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
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


@pytest.fixture
def box(request, tmp_path_factory):
    """A box with the starter; `request.param`: number of devices, default 2."""
    devices = getattr(request, "param", 2)
    with whole_box(tmp_path_factory.mktemp("box"), f"[box]\ndevices = {devices}\n") as one:
        one.make_starter()
        yield one


def asked(n: int) -> list[dict]:
    return [{"role": "user", "content": f"How many apples are {n} apples and {n % 7} apples? Answer with a number."}]


def sums(first: int, count: int) -> bytes:
    rows = [{"messages": asked(n), "answer": str(n + n % 7)} for n in range(first, first + count)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def teacher(box) -> str:
    """Train an adapter of the starter on the form of the answers; return its model."""
    chats = [[*asked(n), {"role": "assistant", "content": f"{n + n % 7}."}] for n in range(96)]
    rows = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats).encode()
    how = {"n_epochs": 6, "batch_size": 8, "lora_rank": 8, "learning_rate": 0.003}
    return box.tuned(box.tune("starter", rows, devices=None, request={"seed": 5}, **how))


def job_of(box, steps: int, validation_file: str | None = None, taught_by: str | None = None, **more) -> str:
    """more: hyperparameters."""
    method = "distillation" if taught_by else "reinforcement"
    judge = {"teacher": taught_by} if taught_by else {"grader": GRADER}
    judge |= {"response_format": more.pop("response_format")} if "response_format" in more else {}
    how = {"n_epochs": 1, "batch_size": 2, "max_completion_tokens": 12, **more}
    request = {"seed": 5, "validation_file": validation_file}
    return box.tune("starter", sums(1, 2 * steps), method=method, judge=judge, devices=None, request=request, **how)


def events_with(client, job_id: str, measure: str) -> list[dict]:
    """Data of the events with this measure."""
    events = client.fine_tuning.jobs.list_events(job_id, limit=100)
    return [e.data for e in events if e.type == "metrics" and measure in e.data]


def steps_of(client, job_id: str, measure: str = "train_mean_reward", again: int = 0) -> dict[int, dict]:
    """Data by step, the newest of repeated steps. again: maximum number of repeated steps."""
    told = events_with(client, job_id, measure)
    assert len(told) - len({data["step"] for data in told}) <= again, "each step counts once"
    return {data["step"]: data for data in reversed(told)}


def learned(
    client, job_id: str, measure: str = "train_mean_reward", better: int = 1, again: int = 0
) -> dict[int, dict]:
    """Check success, all steps, and better last than first steps; return the steps. better: sign of an improvement."""
    assert client.fine_tuning.jobs.retrieve(job_id).status == "succeeded"
    steps = steps_of(client, job_id, measure, again)
    found = {step: steps[step][measure] for step in sorted(steps)}
    print(json.dumps({measure: found}))
    assert list(found) == list(range(1, STEPS + 1))
    values = list(found.values())
    assert better * (sum(values[-4:]) - sum(values[:4])) > 0.2
    return steps


def policies(box, job_id: str) -> list[str]:
    """Versions of the policy in training in shared memory."""
    folders = BoxPaths.of(box.data_dir).shm_root.rglob("adapters/*")
    return [
        one.name for folder in folders if decode_name(folder.name) == policy_name(job_id) for one in folder.iterdir()
    ]


@pytest.mark.parametrize(
    ("measure", "better", "box", "fields"),
    [
        pytest.param("train_mean_reward", 1, 2, {"learning_rate_multiplier": 30}, id="reinforcement"),
        # In the mode `train` the job takes two devices, and the teacher answers on the third.
        pytest.param(
            "reverse_kl",
            -1,
            3,
            {"learning_rate": 0.003, "lora_rank": 16, "samples": 8, "eval_samples": 8},
            id="distillation",
        ),
    ],
    indirect=["box"],
)
def test_starter_learns_form_of_answer(box, measure, better, fields):
    client = box.client(max_retries=5)
    taught_by = teacher(box) if measure == "reverse_kl" else None
    held_out = box.upload(sums(60, 4), "valid.jsonl")
    job = job_of(box, STEPS, held_out, taught_by, eval_interval=8, **fields)
    box.run("mode", "set", "train", "--wait")
    wait_for(lambda: len(box.losses(job)) >= 4, "four steps", 400)
    box.run("mode", "set", "split", "--train", "1", "--wait")
    done = len(box.losses(job))
    wait_for(lambda: len(box.losses(job)) > done, "a step on one device", 300)
    box.kill_controller()
    box.tuned(job)

    learned(client, job, measure, better)
    found = client.fine_tuning.jobs.retrieve(job)
    if taught_by:
        assert found.method.distillation["teacher"] == taught_by
    else:
        assert found.method.reinforcement.grader.type == "multi"
    valid = f"valid_{measure.removeprefix('train_')}"
    measured = {data["step"]: data[valid] for data in events_with(client, job, valid)}
    print(json.dumps({"held out": measured}))
    assert better * (measured[STEPS] - measured[0]) > 0
    answer = client.chat.completions.create(
        model=found.fine_tuned_model,
        messages=[{"role": "user", "content": "How many apples are 3 apples?"}],
        max_tokens=4,
    )
    assert answer.usage.completion_tokens >= 1


@pytest.mark.parametrize("box", [1], indirect=True)
@pytest.mark.parametrize(
    "fields",
    [{"lora_rank": 8}, {"staleness": 1}, {"lora_rank": 8, "max_completion_tokens": 24, "response_format": FORM}],
    ids=["adapter", "weights", "form"],
)
def test_ranks_and_engine_take_turns_on_one_device(box, fields):
    client = box.client(max_retries=5)
    box.run("mode", "set", "train", "--wait")
    job = job_of(box, 3, learning_rate=0.003, **fields)
    box.tuned(job)
    steps = steps_of(client, job)
    assert sorted(steps) == [1, 2, 3]
    assert all(data["mismatch_mean"] < 0.1 for data in steps.values() if not data["staleness"])


@pytest.mark.parametrize("staleness", [0, 1])
def test_engine_samples_for_job_with_hidden_policy(box, staleness):
    client = box.client(max_retries=5)
    box.run("mode", "set", "split", "--train", "1", "--wait")
    job = job_of(box, STEPS, learning_rate=0.003, lora_rank=8, staleness=staleness)
    wait_for(lambda: len(steps_of(client, job)) >= 3, "three steps by an engine", 400)

    (version, *_) = wait_for(lambda: policies(box, job), "the model in training", 60)
    for name in (f"{policy_name(job)}@{version}", policy_name(job)):
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve(name)
    shown = json.dumps([m.model_dump() for m in client.models.list()]) + json.dumps(box.admin("models"))
    assert ".policy" not in shown and ".policy" not in json.dumps(box.admin("status"))
    answer = client.chat.completions.create(model="starter", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.model == "starter" and "step" not in (answer.system_fingerprint or "")

    done = len(steps_of(client, job))
    for pid in box.pids_logging_to("engine-*.log"):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: len(steps_of(client, job)) > done + 1, "steps after the death of the engine", 300)
    box.kill_controller()
    done = len(steps_of(client, job))
    wait_for(lambda: len(steps_of(client, job)) > done, "a step after the death of the controller", 300)
    for pid in box.pids_logging_to("*-rank*.log"):
        os.kill(pid, signal.SIGKILL)
    box.tuned(job)

    # Steps of dead ranks since their snapshot are repeated.
    steps = learned(client, job, again=STEPS)
    told = ("mismatch_mean", "staleness")
    print(json.dumps({step: [data[name] for name in told] for step, data in steps.items()}))
    # Stale samples differ by the updates since then, most in the first steps.
    assert all(data["mismatch_mean"] < (3.0 if data["staleness"] else 0.1) for data in steps.values())
    stale = [data["staleness"] for data in steps.values()]
    assert max(stale) <= staleness and sum(map(bool, stale)) > (STEPS // 3 if staleness else -1)
    wait_for(lambda: not policies(box, job), "its last model in training to be gone", 60)
