"""The whole loop on one real box: real Ray, DeepSpeed and vLLM, driven by the command and the unchanged OpenAI SDK.

The tests share one box and build on each other from top to bottom, like a user's first hour with it.
"""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import time

import openai
import pytest
import transformers

from appliance.demo import Load
from tests.e2e.box_support import gsm8k, wait_for, whole_box
from tests.e2e.engine_support import save_clear_model
from tests.tools.monitored import LATER, monitored_series
from tests.train_support.tiny import make_model_dir
from weights.format.names import encode_name

pytestmark = pytest.mark.timeout(600)
QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
APPLES = [{"role": "user", "content": QUESTION}]
EPOCHS, EXAMPLES = 3, 60
HYPERPARAMETERS = {"n_epochs": EPOCHS, "batch_size": 4, "max_length": 256}
# Sizes of a job that moves: two ranks, and all that it takes.
SPLIT, TRAIN = {"policy": "split", "train_devices": 2}, {"policy": "train"}
# Resized runs sum in another order (bf16 gradients, reduced in float32); a lost or repeated step costs tenths.
CURVE_TOLERANCE = 0.02


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    remote = f'[weights.remote]\nurl = "{tmp_path_factory.mktemp("mount")}"\n'
    with whole_box(tmp_path_factory.mktemp("box"), remote) as one:
        yield one


@pytest.fixture(scope="module")
def starter(box):
    box.make_starter()
    return "starter"


@pytest.fixture(scope="module")
def unbroken(box, starter):
    """An undisturbed job that publishes every epoch, so that its model has several versions."""
    held_out = box.upload(gsm8k("test", 12), "test.jsonl")
    request = {"validation_file": held_out, "suffix": "unbroken", "seed": 3, "metadata": {"purpose": "test"}}
    job = box.tune(starter, gsm8k("train", EXAMPLES), request=request, publish="epoch", **HYPERPARAMETERS)
    box.tuned(job)
    return box.client().fine_tuning.jobs.retrieve(job)


def says_something(client, model) -> bool:
    """Whether the model generates four tokens; with `ignore_eos`, because a short-trained starter may end at once."""
    answer = client.chat.completions.create(
        model=model, messages=APPLES, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.usage.completion_tokens == 4


def test_new_box_has_eight_devices_and_one_key(box):
    assert [row["id"] for row in box.ask("gpu", "list")["data"]] == [f"n0/{i}" for i in range(8)]
    assert [key["name"] for key in box.ask("key", "list")["data"]] == ["first"]
    assert "sk-appl-" not in box.run("status")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=box.url, api_key="sk-wrong", max_retries=0).models.list()


def test_sdk_chat_completions_and_responses_work(box, starter):
    client = box.client()
    whole = client.chat.completions.create(model=starter, messages=APPLES, max_tokens=12, temperature=0, logprobs=True)
    assert whole.usage.completion_tokens == len(whole.choices[0].logprobs.content) <= 12
    chunks = list(
        client.chat.completions.create(model=starter, messages=APPLES, max_tokens=12, temperature=0, stream=True)
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    # For greedy streams the gateway requests token ids and removes them; vLLM itself sends null.
    chunks += client.chat.completions.create(model=starter, messages=APPLES, max_tokens=4, stream=True)
    chunks += client.completions.create(model=starter, prompt="Once", max_tokens=4, stream=True)
    unasked = {"token_ids", "prompt_token_ids", "prompt_text"}
    shown = [part.model_extra for chunk in chunks for part in (chunk, *chunk.choices)]
    assert not any(extra.get(name) for extra in shown for name in unasked)
    assert client.completions.create(model=starter, prompt="Once", max_tokens=4).usage.completion_tokens
    response = client.responses.create(model=starter, input="Say hello.", max_output_tokens=8)
    assert response.usage.output_tokens > 0
    shape = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    structured = client.chat.completions.create(
        model=starter,
        messages=APPLES,
        max_tokens=40,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "count", "schema": shape}},
    )
    if structured.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(structured.choices[0].message.content)["n"], int)
    else:
        assert structured.choices[0].message.content.lstrip().startswith("{")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="absent", messages=APPLES)
    assert missing.value.code == "model_not_found" and missing.value.request_id


def test_forced_tool_call_fits_schema(box, starter):
    """Works although the starter's template has no tools and its free text fits no schema."""
    client = box.client()
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "forecast", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "forecast"}}
    for choice in ("required", named):
        told = client.chat.completions.create(
            model=starter, messages=APPLES, tools=tools, tool_choice=choice, max_tokens=160, temperature=0
        )
        if told.choices[0].finish_reason == "length":  # endless whitespace, which JSON allows
            continue
        (call, *_) = told.choices[0].message.tool_calls
        given = json.loads(call.function.arguments)
        assert call.function.name == "forecast" and given["unit"] in ("C", "F") and 1 <= given["days"] <= 9
    free = client.chat.completions.create(model=starter, messages=APPLES, tools=tools, max_tokens=8)
    assert free.choices[0].message.content is not None
    flat = {"type": "function", "name": "forecast", "parameters": schema}
    response = client.responses.create(
        model=starter, input="Hello.", tools=[flat], tool_choice="required", max_output_tokens=160, temperature=0
    )
    called = [item for item in response.output if item.type == "function_call"]
    assert response.status == "incomplete" or json.loads(called[0].arguments)["unit"] in ("C", "F")
    with pytest.raises(openai.BadRequestError, match="web_search"):
        client.responses.create(model=starter, input="Hello.", tools=[{"type": "web_search"}])


def test_responses_are_stored_continued_and_run_in_background(box, starter):
    client = box.client()
    greedy = {"model": starter, "max_output_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    first = client.responses.create(input="Anna has 3 apples.", **greedy)
    assert client.responses.retrieve(first.id).output == first.output and first.output_text
    second = client.responses.create(input="How many?", previous_response_id=first.id, **greedy)
    turns = [{"role": "user", "content": "Anna has 3 apples."}, *first.output, {"role": "user", "content": "How many?"}]
    spelt_out = client.responses.create(input=turns, store=False, **greedy)
    assert second.usage.input_tokens == spelt_out.usage.input_tokens > first.usage.input_tokens
    assert second.output_text == spelt_out.output_text and second.previous_response_id == first.id
    with client.responses.stream(input="And now?", previous_response_id=second.id, **greedy) as stream:
        last = list(stream)[-1]
    # Cut off after eight tokens; the SDK's helper for the final response accepts only complete ones.
    assert last.type == "response.incomplete"
    third = last.response
    assert third.previous_response_id == second.id and third.usage.input_tokens > second.usage.input_tokens
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant"] * 2 + ["user"]
    assert client.responses.retrieve(third.id).output_text == third.output_text
    later = client.responses.create(input="Anna has 3 apples.", background=True, **greedy)
    assert later.status == "queued"
    with client.responses.retrieve(later.id, stream=True) as events:
        assert [event.type for event in events][-1] == "response.incomplete"  # cut off at max_output_tokens
    assert client.responses.retrieve(later.id).output_text == first.output_text
    client.responses.delete(third.id)
    for gone in (third.id, spelt_out.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)


def test_background_response_fails_when_key_is_revoked(box, starter):
    made = [box.ask("key", "create", "--name", f"guests-{n}", "--owner", "guests")["key"] for n in range(2)]
    first, second = (openai.OpenAI(base_url=box.url, api_key=key, max_retries=0) for key in made)
    more = {"max_output_tokens": 1900, "temperature": 0, "extra_body": {"ignore_eos": True}}
    ids = [first.responses.create(model=starter, input="Hello.", background=True, **more).id for _ in range(2)]
    # Poll often, to catch them before they end.
    wait_for(lambda: all(second.responses.retrieve(one).status == "in_progress" for one in ids), "an engine", 60, 0.02)
    with box.http() as http:
        revoked = http.delete("/admin/v1/keys/guests-0")
    assert revoked.status_code == 200 and sorted(revoked.json()["stopped"]["responses"]) == sorted(ids)
    for one in ids:
        found = second.responses.retrieve(one)
        assert found.status == "failed" and "was revoked" in found.error.message, "failed before revoke returns"

    def charged() -> int:
        rows = {row["name"]: row for row in box.admin("usage?by=key")["data"]}
        # If an engine has just begun, only prompts are charged. The two responses may be charged separately.
        spent = rows.get("guests-0", {"requests": 0})
        return spent["prompt_tokens"] + spent["completion_tokens"] if spent["requests"] == len(ids) else 0

    # The engine has aborted them, and serves only a request of another key. Only computed tokens are charged.
    assert says_something(box.client(), starter)
    paid = wait_for(charged, "the computed tokens to be charged")
    time.sleep(2)
    assert charged() == paid < 2 * 1950


def test_fine_tuning_lowers_held_out_loss_and_changes_answers(box, starter, unbroken):
    client = box.client()
    assert unbroken.status == "succeeded", unbroken.error
    assert unbroken.fine_tuned_model.startswith("ft:starter:local:unbroken:")
    held_out = box.validation_losses(unbroken.id)
    assert held_out[-1] < 0.8 * held_out[0]
    answer = client.chat.completions.with_raw_response.create(
        model=unbroken.fine_tuned_model, messages=APPLES, max_tokens=24, temperature=0
    )
    base = client.chat.completions.create(model=starter, messages=APPLES, max_tokens=24, temperature=0)
    assert answer.parse().choices[0].message.content != base.choices[0].message.content
    checkpoints = client.fine_tuning.jobs.checkpoints.list(unbroken.id).data
    assert len(checkpoints) == EPOCHS
    assert answer.headers["x-appliance-model-version"] == f"step-{checkpoints[0].step_number}"
    names = [model.id for model in client.models.list()]
    assert {starter, unbroken.fine_tuned_model, checkpoints[1].fine_tuned_model_checkpoint} <= set(names)
    assert list((box.data_dir / "jobs" / unbroken.id / "tb").rglob("events.out.tfevents.*"))
    events = [event.message for event in client.fine_tuning.jobs.list_events(unbroken.id, limit=100)]
    assert any("started on" in text for text in events) and "The job has successfully completed" in events
    table = base64.b64decode(client.files.content(unbroken.result_files[0]).content).decode().splitlines()
    assert len(table) > 2 and table[0].startswith("step,train_loss")


def test_bad_data_fails_by_line_without_taking_devices(box, starter):
    bad = gsm8k("train", 5) + b'\n{"messages": []}\nnot json\n'
    client = box.client()
    handovers = len(box.ask("mode", "history")["data"])
    job = client.fine_tuning.jobs.create(model=starter, training_file=box.upload(bad), suffix="bad")
    wait_for(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "failed", "the job to fail")
    told = [event.message for event in client.fine_tuning.jobs.list_events(job.id)]
    assert any(text.startswith("line 6:") for text in told) and any(text.startswith("line 7:") for text in told)
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(
            model=starter, training_file=box.upload(gsm8k("train", 5)), hyperparameters={"n_epochs": -3}
        )
    assert refused.value.param.endswith("n_epochs")
    started = [
        step
        for handover in box.ask("mode", "history")["data"][: -handovers or None]
        for step in handover["steps"]
        if step["target"] == job.id
    ]
    assert started == []


def test_rollback_in_running_engine_serves_older_version(box, unbroken):
    client, tuned = box.client(), unbroken.fine_tuned_model
    checkpoints = client.fine_tuning.jobs.checkpoints.list(unbroken.id).data  # newest first
    newer, older = (f"step-{checkpoint.step_number}" for checkpoint in checkpoints[:2])
    # The name of the checkpoint is served by a fresh engine of the older weights.
    fresh = box.greedy(f"{tuned}:ckpt-{older}", QUESTION)
    newest = box.greedy(tuned, QUESTION)
    assert newest[0] == newer and newest[1:] != fresh[1:]
    replicas = {r["id"] for r in box.admin("status")["replicas"] if r["model"] == tuned}
    with Load(box.url, box.key, tuned, workers=2, max_tokens=48) as load:
        wait_for(lambda: load.finished >= 2, "the load to flow")
        told = box.ask("model", "rollback", tuned)
        assert (told["from"], told["to"]) == (newer, older)
        version, tokens, logprobs = box.greedy(tuned, QUESTION)
        box.ask("model", "rollback", tuned, "--version", newer)
    report = load.report()
    assert (report.dropped, report.truncated, report.duplicated) == (0, 0, 0), report
    assert version == older and tokens == fresh[1]
    assert max(abs(a - b) for a, b in zip(logprobs, fresh[2], strict=True)) < 0.05
    assert box.greedy(tuned, QUESTION) == newest
    assert {r["id"] for r in box.admin("status")["replicas"] if r["model"] == tuned} == replicas, "no engine restarted"


@pytest.mark.timeout(900)
def test_adapters_share_engine_of_base(box, starter):
    client = box.client()
    settings = {"request": {"seed": 3}, "batch_size": 8, "max_length": 256, "lora_rank": 4, "learning_rate": 0.01}
    first_logprobs = {}

    def greedy(model):
        version, tokens, logprobs = box.greedy(model, QUESTION, 12)
        first_logprobs[model] = logprobs[0]
        return version, tokens

    jobs = [
        box.tune(starter, gsm8k("train", 40), n_epochs=2, publish="epoch", **settings),
        box.tune(starter, gsm8k("test", 40), n_epochs=1, **settings),
    ]
    first, second = (box.tuned(job) for job in jobs)
    events = [event.message for event in client.fine_tuning.jobs.list_events(jobs[0]).data]
    assert any(text.startswith("Checkpoint (adapter) created") for text in events)
    answers = {model: greedy(model) for model in (starter, first, second)}
    differ = {(tuple(tokens), round(first_logprobs[model], 1)) for model, (_, tokens) in answers.items()}
    assert len(differ) == 3, "base and adapters answer differently"
    rows = {row["name"]: row for row in box.ask("model", "list")["data"]}
    assert all(rows[model]["active_version"] == version for model, (version, _) in answers.items())
    assert rows[first]["adapter"]["base"] == starter and rows[first]["state"] == "serving"
    assert rows[first]["bytes"] < rows[starter]["bytes"] / 5

    # Another version of an adapter has another name in the same engine, also reached by its checkpoint's name.
    checkpoints = client.fine_tuning.jobs.checkpoints.list(jobs[0]).data  # newest first
    older = greedy(checkpoints[1].fine_tuned_model_checkpoint)
    with Load(box.url, box.key, first) as one, Load(box.url, box.key, second, workers=2) as other:
        wait_for(lambda: one.finished >= 4 and other.finished >= 4, "answers of both adapters")
        box.ask("model", "rollback", first)
        assert greedy(first)[0] == older[0]
        box.ask("model", "rollback", first, "--version", answers[first][0])
    assert greedy(first) == answers[first] and answers[first][0] != older[0]
    for load in (one, other):
        report = load.report()
        assert (report.dropped, report.truncated, report.duplicated) == (0, 0, 0), report
    replicas = box.admin("status")["replicas"]
    assert {replica["model"] for replica in replicas} & {starter, first, second} == {starter}, "one engine for all"

    # A new engine finds both adapters by itself: one in shared memory, the other only in the remote tier.
    tiers = {"memory", "disk", "remote"}
    wait_for(lambda: tiers <= {*box.ask("model", "show", second)["versions"][0]["tiers"]}, "a copy in every tier")
    (engine,) = [replica["id"] for replica in replicas if replica["model"] == starter]
    for log in (f"engine-{engine}.log", "controller.log"):
        for pid in box.pids_logging_to(log):
            os.kill(pid, signal.SIGKILL)
    box.evict("adapters", second, answers[second][0])
    shutil.rmtree(box.data_dir / "models" / encode_name(second))
    assert [greedy(model) for model in (second, first)] == [answers[second], answers[first]]

    # A request for an adapter wakes its base.
    box.run("model", "deploy", starter, "--idle-sleep-s", "0.1")
    wait_for(lambda: {row["state"] for row in box.admin("status")["replicas"]} <= {"asleep"}, "the base to sleep")
    box.run("model", "deploy", starter, "--idle-sleep-s", "none")
    assert greedy(first) == answers[first]

    box.run("model", "rm", starter, code=5)  # an adapter depends on it
    box.run("model", "rm", second)
    with pytest.raises(openai.NotFoundError):
        greedy(second)
    assert greedy(first) == answers[first]
    box.run("model", "rm", first)


def test_canary_gets_share_then_is_promoted_or_rolled_back(box, unbroken):
    client, tuned = box.client(), unbroken.fine_tuned_model
    newer, older = (f"step-{c.step_number}" for c in client.fine_tuning.jobs.checkpoints.list(unbroken.id).data[:2])

    def version(number, model=tuned):
        ask = [{"role": "user", "content": f"What is {number} + 1?"}]
        answer = client.chat.completions.with_raw_response.create(model=model, messages=ask, max_tokens=2)
        return answer.headers["x-appliance-model-version"]

    box.run("model", "canary", tuned, older, "--share", "50%")
    assert version(0, f"{tuned}@{older}") == older, "held until the canary's engine is open"
    served = {number: version(number) for number in range(16)}
    assert set(served.values()) == {newer, older}
    assert {number: version(number) for number in range(4)} == {number: served[number] for number in range(4)}

    def compared():
        return box.ask("model", "canary", tuned)["versions"]

    wait_for(lambda: sum(side["requests"] for side in compared().values()) >= 20, "the gateway's report")
    assert compared()[older]["errors"] == 0
    assert box.ask("model", "promote", tuned)["to"] == older
    assert {version(number) for number in range(8)} == {older} == {version(0, f"{tuned}@{older}")}
    with pytest.raises(openai.NotFoundError) as missing:
        version(0, f"{tuned}@step-0")
    assert missing.value.code == "model_version_not_served" and older in missing.value.message
    box.run("model", "canary", tuned, newer, "--share", "50%")
    assert version(0, f"{tuned}@{newer}") == newer
    assert box.ask("model", "rollback", tuned)["to"] == older
    assert {version(number) for number in range(8)} == {older}
    box.ask("model", "rollback", tuned, "--version", newer)
    assert version(0) == newer


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"lora_rank": 4, "zero_stage": 2, "learning_rate_multiplier": 20}),
        pytest.param("mistral", {"zero_stage": 3}, marks=pytest.mark.soak),
    ],
)
def test_checkpoint_directory_is_imported_served_and_tuned(box, starter, family, settings, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(next((box.data_dir / "models" / starter).iterdir()))
    # Random weights predict almost uniformly: without seed and high rate, the loss of three steps may rise.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.02, "vocab_size": len(tokenizer)}
    make_model_dir(tmp_path / "tiny", family=family, words=tokenizer, **sizes)
    name = f"tiny-{family}"
    box.run("model", "import", str(tmp_path / "tiny"), "--name", name)
    client = box.client()
    assert says_something(client, name)
    job = box.tune(name, gsm8k("train", 40), n_epochs=1, batch_size=8, max_length=256, **settings)
    tuned, losses = box.tuned(job), box.losses(job)
    assert losses[max(losses)] < losses[1]
    assert says_something(client, tuned)
    box.run("model", "rm", tuned)
    box.run("model", "rm", name)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(tuned)


def test_mode_switches_under_load_lose_no_request_or_step(box, starter, unbroken):
    box.run("mode", "set", "serve", "--wait")
    request = {"validation_file": unbroken.validation_file, "suffix": "switched", "seed": 3}
    job = box.tune(starter, unbroken.training_file, devices=4, request=request, publish="end", **HYPERPARAMETERS)
    with Load(box.url, box.key, starter, workers=3) as load:
        wait_for(lambda: load.finished >= 4, "the load to flow")
        # Smaller and larger, and twice the same size. The job must not end while commands start or between checks.
        for mode in (SPLIT, SPLIT, TRAIN, TRAIN, SPLIT):
            done = len(box.losses(job))
            box.set_mode(**mode)
            wait_for(lambda done=done: len(box.losses(job)) > done, "a step", pause_s=0.05)
            answered = load.finished
            box.set_mode(policy="serve")
            wait_for(lambda answered=answered: load.finished > answered, "an answer")
    report = load.report()
    assert report.requests > 10
    assert (report.dropped, report.truncated, report.duplicated) == (0, 0, 0), report
    box.run("mode", "set", "split", "--train", "2", "--wait")
    box.tuned(job)
    switched = box.losses(job)
    sizes = {row["devices"] for row in box.steps(job) if row["loss"]}
    assert {2, 4} <= sizes
    assert sorted(switched) == list(range(1, max(switched) + 1))
    straight = box.losses(unbroken.id)
    assert straight.keys() == switched.keys()
    assert max(abs(straight[step] - switched[step]) for step in straight) < CURVE_TOLERANCE
    box.run("mode", "set", "auto", "--wait")


def test_files_of_jobs_and_engines_are_private(box, unbroken):
    assert box.open_to_others() == {}


def test_job_and_engines_listen_only_on_loopback(box, starter, unbroken):
    box.set_mode(policy="split", train_devices=2)
    job = box.submit(starter, unbroken.training_file, "--epochs 40 --batch-size 8 --max-devices 2")
    wait_for(lambda: box.losses(job), "a step")
    box.client().chat.completions.create(model=starter, messages=[{"role": "user", "content": "2+2?"}], max_tokens=2)
    commands = " ".join(box.running().values())
    assert "ray::RankHost" in commands and "ray::Replica" in commands, commands
    listening = box.listening()
    assert any("raylet" in who for who in listening.values()) and f"127.0.0.1:{box.port}" in listening, listening
    strangers = {where: who for where, who in listening.items() if not where.startswith(("127.", "::1:"))}
    assert strangers == {}, "expected loopback only, unreachable for other machines"
    box.run("job", "cancel", job)
    box.set_mode(policy="auto")


def devices_of(box, holder: str) -> list[str]:
    return [d["id"] for d in box.admin("devices")["data"] if d["holder"] and d["holder"]["id"] == holder]


def test_job_is_paused_resumed_and_cancelled(box, starter, unbroken):
    client = box.client()
    box.run("mode", "set", "train", "--wait")
    job = box.submit(starter, unbroken.training_file, "--epochs 40 --batch-size 8 --max-devices 2")
    wait_for(lambda: len(box.losses(job)) >= 2, "two steps")
    assert devices_of(box, job)
    box.run("job", "pause", job)
    wait_for(lambda: box.job(job)["phase"] == "paused", "the pause")
    wait_for(lambda: not devices_of(box, job), "the job's devices to be free")
    paused_at = max(box.losses(job))
    assert client.fine_tuning.jobs.retrieve(job).status == "queued"
    box.run("job", "resume", job)
    wait_for(lambda: max(box.losses(job)) > paused_at, "a step after the resume")
    assert client.fine_tuning.jobs.cancel(job).status == "cancelled"
    wait_for(lambda: not devices_of(box, job), "the job's devices to be free")
    box.run("job", "resume", job, code=5)
    box.run("mode", "set", "auto", "--wait")


def test_killed_engine_restarts_and_greedy_stream_continues(box, tmp_path):
    """Uses a model with clear choices, because another batch may decide near ties differently."""
    client, model = box.client(), "clear"
    folder = save_clear_model(tmp_path / model, seed=1, max_position_embeddings=1024)
    box.run("model", "import", str(folder), "--name", model)
    # Long enough to be in progress when its engine is killed, even on a fast machine.
    greedy = {"model": model, "messages": APPLES, "temperature": 0, "max_tokens": 600, "stream": True}
    greedy |= {"extra_body": {"ignore_eos": True}, "stream_options": {"include_usage": True}}
    unbroken = list(client.chat.completions.create(**greedy))
    replica = next(r["id"] for r in box.admin("status")["replicas"] if r["model"] == model and r["state"] == "open")
    pids = box.pids_logging_to(f"engine-{replica}.log")
    stream = client.chat.completions.create(**greedy)
    broken = [next(stream) for _ in range(5)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    broken += stream
    assert text_of(broken) == text_of(unbroken)
    counted = [part[-1].usage.model_dump(exclude={"prompt_tokens_details"}) for part in (broken, unbroken)]
    assert counted[0] == counted[1]
    # The cache of the dead engine is unknown, so no cached tokens are reported.
    assert broken[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert len({chunk.id for chunk in broken}) == 1
    with box.http() as http:
        metrics = http.get("/metrics").text
    assert 'appliance_gateway_events_total{event="continued"} 1' in metrics
    told = set(re.findall(r"^# TYPE (\S+)", metrics, re.M))
    assert monitored_series() - LATER <= told
    assert says_something(client, model)
    assert replica not in {r["id"] for r in box.admin("status")["replicas"] if r["state"] == "open"}


def text_of(chunks) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_job_survives_deaths_of_rank_controller_and_box(box, starter, unbroken):
    """Revoked keys stay revoked, stored responses stay stored, and tuned models answer again."""
    client = box.client()
    box.run("mode", "set", "split", "--train", "2", "--wait")
    job_id = box.submit(
        starter, unbroken.training_file, "--epochs 50 --batch-size 8 --set snapshot_every_s=2 --set max_length=256"
    )

    def restarts_beyond(step):
        return lambda: max(box.losses(job_id), default=0) > step

    wait_for(lambda: box.job(job_id)["snapshot"], "a snapshot")
    rank = box.pids_logging_to(f"{job_id}-rank1.log")[0]
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: rank not in box.pids_logging_to(f"{job_id}-rank1.log"), "the rank to be gone")
    wait_for(restarts_beyond(max(box.losses(job_id))), "training to go on after the rank's death")

    ranks = box.pids_logging_to(f"{job_id}-rank*.log")
    controller = box.pids_logging_to("controller.log")[0]
    os.kill(controller, signal.SIGKILL)
    assert box.client(max_retries=40).models.list().data, "the controller came back"
    assert box.ask("mode", "show")["policy"] == "split"
    wait_for(restarts_beyond(max(box.losses(job_id))), "training to go on after the controller's death")
    assert ranks and box.pids_logging_to(f"{job_id}-rank*.log") == ranks, "the new controller adopts the same ranks"

    gateway = box.pids_logging_to("gateway.log")[0]
    os.kill(gateway, signal.SIGKILL)
    wait_for(lambda: gateway not in box.pids_logging_to("gateway.log") and box.answers(), "another gateway")

    made = box.ask("key", "create", "--name", "guest")
    guest = openai.OpenAI(base_url=box.url, api_key=made["key"], max_retries=0)
    assert guest.models.list().data
    box.run("key", "revoke", "guest")
    with pytest.raises(openai.AuthenticationError):
        guest.models.list()
    asked = client.responses.create(model=unbroken.fine_tuned_model, input="Hello.", max_output_tokens=4)

    def is_stored():  # the gateway sends it to the controller after the answer
        with contextlib.suppress(openai.NotFoundError):
            return client.responses.retrieve(asked.id)

    wait_for(is_stored, "the response to be stored", 20)
    reached = max(box.losses(job_id))
    main = box.main_pid()
    os.kill(main, signal.SIGKILL)
    # The kernel ends them at once; Ray's agents by themselves take a minute.
    wait_for(lambda: not box.running(), "everything to end", 40)
    box.up()
    assert box.ask("mode", "show")["policy"] == "split"
    assert "starter" in [model.id for model in client.models.list()]
    assert client.responses.retrieve(asked.id).output == asked.output
    with pytest.raises(openai.AuthenticationError):
        guest.models.list()
    wait_for(restarts_beyond(reached), "training to go on after the death of everything")
    losses = box.losses(job_id)
    assert sorted(losses) == list(range(1, max(losses) + 1))
    assert client.fine_tuning.jobs.cancel(job_id).status == "cancelled"  # others run to their end
    box.run("mode", "set", "auto", "--wait")
    assert says_something(client, unbroken.fine_tuned_model)
