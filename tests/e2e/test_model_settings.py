"""Settings of a model's engines, changed on a real box under load: vLLM checks them first, and no request is lost."""

from __future__ import annotations

import subprocess

import pytest

from appliance.demo import Load
from tests.e2e.box_support import COMMAND, wait_for, whole_box
from tests.e2e.engine_support import save_model

pytestmark = pytest.mark.timeout(600)
QUESTION = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box")) as one:
        path = save_model(tmp_path_factory.mktemp("tiny"), seed=1)
        made = one.ask("model", "import", str(path), "--name", "tiny")
        assert made["state"] == "succeeded", made
        yield one


def ask(box, **more):
    return box.client().chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, **more)


def context(box) -> int:
    return box.client().models.retrieve("tiny").max_model_len


def engines(box):
    return {r["id"] for r in box.admin("status")["replicas"] if r["model"] == "tiny" and r["state"] == "open"}


def test_settings_change_under_load_without_a_lost_request(box):
    before = ask(box, temperature=0)
    assert context(box) == 512
    old = engines(box)
    with Load(box.url, box.key, "tiny") as load:
        wait_for(lambda: len(load.outcomes) > 8, "a load", 60)
        told = box.ask(
            "model", "deploy", "tiny", "--max-model-len", "256", "--max-num-seqs", "4", "--temperature", "0",
            "--system-prompt", "Say 'hello' in 1 word.\n{{ no }}", "--draft", "3", "--engine-arg", "block-size=32",
        )  # fmt: skip
        assert told["settings_number"] == 1 and told["settings"]["max_model_len"] == 256, told
        wait_for(lambda: engines(box) and not engines(box) & old, "engines with the new settings")
        asked = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > asked + 8, "answers of the new engines")
    nothing_is_lost(load)
    what_is_set_is_what_engines_do(box, before)
    middle = engines(box)
    with Load(box.url, box.key, "tiny") as load:
        wait_for(lambda: len(load.outcomes) > 8, "a load", 60)
        assert box.ask("model", "deploy", "tiny", "--settings", "0")["settings"] == {}
        wait_for(lambda: engines(box) and not engines(box) & middle, "engines without settings")
        asked = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > asked + 8, "answers of those")
    nothing_is_lost(load)
    again = ask(box, temperature=0)
    assert again.choices[0].message.content == before.choices[0].message.content
    assert again.usage.prompt_tokens == before.usage.prompt_tokens
    assert [row["number"] for row in box.ask("model", "deploy", "tiny")["settings_history"]] == [2, 1]


def nothing_is_lost(load):
    report = load.report()
    assert report.requests > 16 and (report.dropped, report.truncated, report.duplicated) == (0, 0, 0), report.errors
    print(f"{report.requests} requests over a change, longest {report.longest_s:.1f} s")


def what_is_set_is_what_engines_do(box, plain):
    assert context(box) == 256
    answers = {ask(box).choices[0].message.content for _ in range(3)}
    assert len(answers) == 1, "temperature 0 unless a request says otherwise"
    assert ask(box).usage.prompt_tokens > plain.usage.prompt_tokens + 5, "with a system prompt"
    shown = box.ask("model", "show", "tiny")
    assert shown["max_model_len"] == 256 and shown["settings"]["engine_args"] == {"block-size": "32"}


def test_settings_with_which_no_engine_starts_are_taken_back_without_a_lost_request(box):
    """vLLM's configuration takes MXFP4 on every device; that no kernel computes it here, its layers alone know."""
    before = ask(box, temperature=0).choices[0].message.content
    last = box.ask("model", "deploy", "tiny")
    with Load(box.url, box.key, "tiny") as load:
        wait_for(lambda: len(load.outcomes) > 8, "a load", 60)
        told = box.ask("model", "deploy", "tiny", "--engine-arg", "quantization=mxfp4", "--dtype", "bfloat16")
        number = told["settings_number"]
        wait_for(lambda: box.ask("model", "show", "tiny")["settings_number"] > number, "the settings before")
        wait_for(lambda: engines(box), "an engine with them")
        asked = len(load.outcomes)
        wait_for(lambda: len(load.outcomes) > asked + 8, "its answers")
    nothing_is_lost(load)
    shown = box.ask("model", "show", "tiny")
    said = f"no engine starts with settings {number}, so those before, {last['settings_number']}, serve again: "
    assert (shown["settings"], shown["state"]) == (last["settings"], "serving") and not shown["message"]
    assert said in shown["settings_note"] and "MXFP4" in shown["settings_note"], shown
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
def test_what_vllm_or_the_box_refuses_restarts_nothing(box, given, reason):
    ask(box)
    before = engines(box)
    command = [COMMAND, "model", "deploy", "tiny", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=box.environment())
    assert done.returncode and reason in " ".join(done.stderr.split()), done.stderr
    assert engines(box) == before and box.ask("model", "show", "tiny")["settings"] == {}
