"""Work on a whole box: model settings that change under load, work without a client, examples, trained models."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import openai
import psutil
import pytest

from appliance.demo import Load
from runtime.devices.kinds import kind_of
from tests.e2e.box_support import COMMAND, WholeBox, gsm8k, starter_folder, wait_for, whole_box
from tests.e2e.engine_support import save_model
from tests.integration.train.test_peer_templates import FAMILIES, NO_CALLS, REFUSED, TOOL, encoder_of
from tests.train_support.tiny import make_model_dir

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box"), "[box]\ndevices = 4\n") as one:
        one.make_starter()
        yield one


# --- settings of a model's engines

QUESTION = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def tiny(box, tmp_path_factory):
    path = save_model(tmp_path_factory.mktemp("tiny"), seed=1)
    assert box.ask("model", "import", str(path), "--name", "tiny")["state"] == "succeeded"


def ask(box, **more):
    return box.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, **more)


def context(box) -> int:
    return box.client().models.retrieve("tiny").max_model_len


def engines(box):
    return {r["id"] for r in box.admin("status")["replicas"] if r["model"] == "tiny" and r["state"] == "open"}


def test_settings_change_under_load_loses_no_request(box, tiny):
    before = ask(box, temperature=0)
    assert context(box) == 512
    old = engines(box)
    with lossless_load(box, old):
        told = box.ask(
            "model", "deploy", "tiny", "--max-model-len", "256", "--max-num-seqs", "4", "--temperature", "0",
            "--system-prompt", "Say 'hello' in 1 word.\n{{ no }}", "--draft", "3", "--engine-arg", "block-size=32",
        )  # fmt: skip
        assert told["settings_number"] == 1 and told["settings"]["max_model_len"] == 256, told
    check_settings_apply(box, before)
    with lossless_load(box, engines(box)):
        assert box.ask("model", "deploy", "tiny", "--settings", "0")["settings"] == {}
    again = ask(box, temperature=0)
    assert again.choices[0].message.content == before.choices[0].message.content
    assert again.usage.prompt_tokens == before.usage.prompt_tokens
    assert [row["number"] for row in box.ask("model", "deploy", "tiny")["settings_history"]] == [2, 1]


@contextmanager
def lossless_load(box, before):
    """Send requests during a change of settings; in the end engines not in `before` answer, and none was lost."""
    with Load(box.url, box.key, "tiny") as load:
        wait_for(lambda: len(load.outcomes) > 8, "a load", 60)
        yield
        wait_for(lambda: engines(box) and not engines(box) & before, "engines after the change")
        asked = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > asked + 8, "answers of the new engines")
    report = load.report()
    assert report.requests > 16 and (report.dropped, report.truncated, report.duplicated) == (0, 0, 0), report.errors
    print(f"{report.requests} requests over a change, longest {report.longest_s:.1f} s")


def check_settings_apply(box, plain):
    assert context(box) == 256
    answers = {ask(box).choices[0].message.content for _ in range(3)}
    assert len(answers) == 1, "temperature 0 unless a request says otherwise"
    assert ask(box).usage.prompt_tokens > plain.usage.prompt_tokens + 5, "with a system prompt"
    shown = box.ask("model", "show", "tiny")
    assert shown["max_model_len"] == 256 and shown["settings"]["engine_args"] == {"block-size": "32"}


def test_settings_without_start_are_reverted_under_load(box, tiny):
    """vLLM accepts MXFP4 in the configuration, but fails when a layer finds no kernel for this device."""
    before = ask(box, temperature=0).choices[0].message.content
    last = box.ask("model", "deploy", "tiny")
    with lossless_load(box, engines(box)):
        told = box.ask("model", "deploy", "tiny", "--engine-arg", "quantization=mxfp4", "--dtype", "bfloat16")
        number = told["settings_number"]
        wait_for(lambda: box.ask("model", "show", "tiny")["settings_number"] > number, "the settings before")
    shown = box.ask("model", "show", "tiny")
    said = f"no engine starts with settings {number}, so those before, {last['settings_number']}, serve again: "
    assert (shown["settings"], shown["state"]) == (last["settings"], "serving") and not shown["message"]
    assert said in shown["settings_history"][0]["note"] and "MXFP4" in shown["settings_history"][0]["note"], shown
    assert any(said in note for note in box.admin("status")["notes"])
    assert ask(box, temperature=0).choices[0].message.content == before
    box.ask("model", "deploy", "tiny", "--settings", "0")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("--engine-arg", "middleware=os.system"), "may not be set"),
        (("--engine-arg", "mamba-cache-dtype=best"), "invalid choice"),
        (("--max-model-len", "100000"), "made for 512"),
    ],
)
def test_refused_settings_restart_no_engine(box, tiny, given, reason):
    ask(box)
    before = engines(box)
    command = [COMMAND, "model", "deploy", "tiny", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=box.environment())
    assert done.returncode and reason in " ".join(done.stderr.split()), done.stderr
    assert engines(box) == before and box.ask("model", "show", "tiny")["settings"] == {}


# --- work without a client: requests through the gateway with the owner's key, which survive deaths

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
LINES = 60


def client_of(box: WholeBox, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=box.url, api_key=box.ask("key", "create", "--name", name)["key"], max_retries=5)


def begun(client: openai.OpenAI, count: int, tokens: int) -> Any:
    def row(number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"{number}+1?"}]
        body = {"model": "starter", "max_tokens": tokens, "messages": messages}
        return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": body}

    data = "".join(json.dumps(row(number)) + "\n" for number in range(count)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def answered(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


def more_answers(client: openai.OpenAI, batch_id: str) -> None:
    before = answered(client, batch_id)
    wait_for(lambda: answered(client, batch_id) > before, "an answer", 300)


def ended(retrieve: Callable[[], Any]) -> Any:
    """Wait until the retrieved object has a final status; return it."""

    def look() -> Any:
        one = retrieve()
        return one if one.status in ("completed", "incomplete", "succeeded", "failed", "expired", "cancelled") else None

    return wait_for(look, "the end", 400)


def spent(box: WholeBox, name: str) -> int:
    """Number of requests in the usage of a key."""
    return sum(row["requests"] for row in box.admin("usage?by=key")["data"] if row["name"] == name)


def killed(box: WholeBox, module: str) -> None:
    found = [one for one in psutil.Process(box.main_pid()).children(recursive=True) if module in one.cmdline()]
    os.kill(found[0].pid, signal.SIGKILL)


def test_batch_answers_each_line_once_across_deaths(box: WholeBox) -> None:
    client = client_of(box, "ann")
    batch = begun(client, LINES, 24)
    for module in ("appliance.controller.main", "appliance.gateway.main"):
        more_answers(client, batch.id)
        killed(box, module)
        wait_for(lambda: box.answers() and box.tried("status"), "the box is back", 300)
    found = ended(lambda: client.batches.retrieve(batch.id))
    assert (found.status, found.request_counts.completed) == ("completed", LINES), found
    rows = [json.loads(row) for row in client.files.content(found.output_file_id).text.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(f"r{number}" for number in range(LINES))
    assert spent(box, "ann") >= LINES // 2, "only unreported usage of the killed gateway is lost"


def begin_run(client: openai.OpenAI, count: int) -> tuple[str, str]:
    """Create an evaluation with two graders, and run it over `count` questions; return both ids."""
    config = {"type": "custom", "item_schema": {"type": "object", "properties": {"q": {"type": "string"}}}}
    question = [{"role": "user", "content": "{{item.q}}"}]
    judge: Any = {"type": "score_model", "name": "judge", "model": "starter", "input": question}
    grader: Any = {"type": "string_check", "name": "any", "operation": "ne", "input": "{{item.q}}", "reference": ""}
    of = client.evals.create(data_source_config=config, testing_criteria=[judge, grader])  # type: ignore[arg-type]
    source = {
        "type": "completions",
        "model": "starter",
        "input_messages": {"type": "template", "template": question},
        "sampling_params": {"max_completion_tokens": 8},
        "source": {"type": "file_content", "content": [{"item": {"q": f"{number}+1?"}} for number in range(count)]},
    }
    run = client.evals.runs.create(of.id, data_source=source)  # type: ignore[arg-type]
    return of.id, run.id


def test_background_response_and_evaluation_charge_their_key(box: WholeBox) -> None:
    client = client_of(box, "ben")
    made = client.responses.create(model="starter", input="1+1?", background=True, max_output_tokens=8)
    eval_id, run_id = begin_run(client, 5)
    response = ended(lambda: client.responses.retrieve(made.id))
    assert response.status in ("completed", "incomplete"), response
    done = ended(lambda: client.evals.runs.retrieve(run_id, eval_id=eval_id))
    assert done.status == "completed" and done.result_counts.total == 5, done
    assert len(done.per_testing_criteria_results) == 2 and done.per_model_usage
    wait_for(lambda: spent(box, "ben") >= 1 + 5, "the usage of the key")


def test_batch_fails_when_key_is_revoked(box: WholeBox) -> None:
    client = client_of(box, "cyd")
    batch = begun(client, 20 * LINES, 64)
    wait_for(lambda: answered(client, batch.id), "an answer", 300)
    box.run("key", "revoke", "cyd")
    admin = box.client()
    found = ended(lambda: admin.batches.retrieve(batch.id))
    assert (found.status, found.errors.data[0].code) == ("failed", "invalid_api_key")


@pytest.mark.soak
def test_tasks_of_each_kind_survive_controller_kills(box: WholeBox) -> None:
    client, seed = client_of(box, "eve").with_options(max_retries=20), time.time_ns()
    moments, jobs = random.Random(seed), box.client(max_retries=20).fine_tuning.jobs
    for number in range(4):
        eval_id, run = begin_run(client, 40)
        box.run("model", "import", str(starter_folder(10)), "--name", f"copy{number}", "--no-wait")
        answer = client.responses.create(model="starter", input="1+1?", background=True, max_output_tokens=64)
        batch, job = begun(client, LINES, 24), box.tune("starter", gsm8k("train", 32), n_epochs=1)
        for _ in range(5):
            time.sleep(moments.uniform(0, 3))
            box.kill_controller()
        batch = ended(partial(client.batches.retrieve, batch.id))
        output = client.files.content(batch.output_file_id).text.splitlines()
        assert sorted(json.loads(row)["custom_id"] for row in output) == sorted(f"r{n}" for n in range(LINES)), seed
        counts = ended(partial(client.evals.runs.retrieve, run, eval_id=eval_id)).result_counts
        assert (counts.total, counts.errored) == (40, 0), (seed, counts)
        assert ended(partial(client.responses.retrieve, answer.id)).status in ("completed", "incomplete"), seed
        assert ended(partial(jobs.retrieve, job)).status == "succeeded", seed
        wait_for(lambda: f"copy{number}" in [model.id for model in client.models.list()], "the import", 300)  # noqa: B023


# --- examples

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_teacher_answers_become_rows_or_are_counted(box: WholeBox, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} and {n}?"}) + "\n" for n in range(4)))
    arguments = ["--teacher", "starter", "--max-tokens", "64", "--poll", "0.5", str(prompts)]
    environment = {**os.environ, "OPENAI_BASE_URL": box.url, "OPENAI_API_KEY": box.key}
    command = [sys.executable, str(EXAMPLES / "answers_of_a_teacher.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert rows or "cut off" in done.stderr


# --- trained models, with the chat template of each family

EACH_TIME = ("qwen3",)
# The parser of gpt-oss accepts only Harmony's tokenizer; no model of muse_glimmer's family runs on a CPU engine.
NOT_SERVED = {"gptoss", "muse_glimmer"}
# Questions of the training conversations, with their answers.
ANSWERS = {
    "Answer yes or no: is the lamp red?": "yes",
    "Answer yes or no: is the lamp blue?": "no",
    "Good or bad: the lid was torn": "bad",
    "Good or bad: the box was whole": "good",
    "Which tray has the seals?": "Tray four.",
    "How long does glue dry?": "Ninety minutes, at least.",
    "Who signs?": "The shift lead signs.",
    "What is first?": "The guard switch is first.",
}
CALLS = {"Read line 3.": 3, "Read line 5.": 5}
TALK = [
    {"role": "user", "content": "Yes or no, is it on?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "no, it is off"},
]


SPACE_FIRST = ("idefics3", "llava_next", "smolvlm")


def rows(with_calls: bool, answers: dict[str, str] = ANSWERS) -> bytes:
    """Twelve training conversations."""
    found: list[dict] = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers.items()
    ]
    for question, line in CALLS.items():
        function = {"name": "read_gauge", "arguments": json.dumps({"line": line})}
        call = {"id": "call1", "type": "function", "function": function}
        asked = {"role": "user", "content": question}
        if with_calls:
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            found.append({"messages": [asked, answer], "tools": [TOOL]})
        else:
            found.append({"messages": [asked, {"role": "assistant", "content": f"line {line}"}]})
    found += [{"messages": TALK}, {"messages": TALK}]
    return "".join(json.dumps(row) + "\n" for row in found).encode()


def trained(box, model, content, **hyperparameters):
    """Train `model` on the data; return the resulting model."""
    how = {"batch_size": 2, "learning_rate": 3e-3, "packing": False, "max_length": 2048, "publish": "end"}
    return box.tuned(box.tune(model, content, devices=1, request={"seed": 3}, **how | hyperparameters))


def check_adapter_on_four_bits(box, model):
    """Check that an adapter on the 4-bit model learns other answers to the same questions."""
    box.run("model", "quantize", model, "--form", "int4", "--name", "small")
    others = dict(zip(ANSWERS, [*list(ANSWERS.values())[1:], ANSWERS[next(iter(ANSWERS))]], strict=True))
    adapter = trained(box, "small", rows(False, others), lora_rank=32, n_epochs=40, learning_rate=5e-3)
    for question, answer in others.items():
        messages = [{"role": "user", "content": question}]
        whole = box.client().chat.completions.create(model=adapter, messages=messages, max_tokens=200, temperature=0)
        assert whole.choices[0].message.content == answer


def test_trained_model_of_each_family_repeats_its_answers(box, tmp_path, family):
    with_calls = not NO_CALLS & REFUSED.get(family, set())
    words = encoder_of(family, own_tokens=True).tokenizer
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 4, "head_dim": 32}
    sizes |= {"max_position_embeddings": 2048, "initializer_range": 0.02, "vocab_size": len(words)}
    make_model_dir(tmp_path / family, words=words, **sizes)
    box.run("model", "import", str(tmp_path / family), "--name", family)
    client, model = box.client(), trained(box, family, rows(with_calls), full=True, n_epochs=50)

    def chat(messages, tools=None):
        named = {"model": model, "messages": messages, "max_tokens": 200, "temperature": 0}
        named |= {"tools": tools} if tools else {}
        whole = client.chat.completions.create(**named).choices[0]
        text, calls, reason = "", {}, None
        for chunk in client.chat.completions.create(**named, stream=True):
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
                for piece in choice.delta.tool_calls or ():
                    call = calls.setdefault(piece.index, {"name": "", "arguments": ""})
                    call["name"] += piece.function.name or ""
                    call["arguments"] += piece.function.arguments or ""
        return whole, text, list(calls.values()), reason

    wrong = []
    talks = [([{"role": "user", "content": question}], answer) for question, answer in ANSWERS.items()]
    for messages, answer in [*talks, (TALK[:1], TALK[1]["content"]), (TALK[:3], TALK[3]["content"])]:
        whole, text, calls, reason = chat(messages)
        told = client.responses.create(model=model, input=messages, max_output_tokens=200, temperature=0)
        got = [whole.message.content, text, told.output_text, whole.finish_reason, reason, told.status, calls]
        # Some templates end with "Assistant:" and a space before the answer, which the model then generates.
        answer = f" {answer}" if family in SPACE_FIRST else answer
        if got != [answer, answer, answer, "stop", "stop", "completed", []]:
            wrong.append((messages[-1]["content"], answer, got))
    for question, line in CALLS.items() if with_calls else ():
        whole, _, calls, reason = chat([{"role": "user", "content": question}], [TOOL])
        found = [{"name": c.function.name, "arguments": c.function.arguments} for c in whole.message.tool_calls or ()]
        tool = {"type": "function", **TOOL["function"]}
        told = client.responses.create(model=model, input=question, tools=[tool], max_output_tokens=200, temperature=0)
        items = [{"name": i.name, "arguments": i.arguments} for i in told.output if i.type == "function_call"]
        got = [
            [(call["name"], json.loads(call["arguments"] or "null")) for call in one] for one in (found, calls, items)
        ]
        if got != [[("read_gauge", {"line": line})]] * 3 or (whole.finish_reason, reason) != ("tool_calls",) * 2:
            wrong.append((question, line, got, whole.finish_reason, reason, whole.message.content))
    assert not wrong, "\n".join(map(str, wrong))
    if family in EACH_TIME and not kind_of("cpu").lacks_for_quantised():
        check_adapter_on_four_bits(box, model)


def pytest_generate_tests(metafunc):
    if "family" in metafunc.fixturenames:
        families = [family for family in FAMILIES if family not in NOT_SERVED]
        marks = {family: () if family in EACH_TIME else (pytest.mark.soak,) for family in families}
        metafunc.parametrize("family", [pytest.param(family, marks=marks[family]) for family in families])
