"""The scripts of `examples/` against a whole box: real training, engines and evaluations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box_support import WholeBox, gsm8k, whole_box

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("box")) as one:
        one.make_starter()
        one.set_mode(policy="split", train_devices=2)
        yield one


def run(box: WholeBox, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OPENAI_BASE_URL": box.url, "OPENAI_API_KEY": box.key}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_answers_of_a_teacher_are_counted_or_become_rows(box: WholeBox, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} and {n}?"}) + "\n" for n in range(4)))
    arguments = ["--teacher", "starter", "--max-tokens", "64", "--poll", "0.5", str(prompts)]
    done = run(box, "answers_of_a_teacher.py", *arguments)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert rows or "cut off" in done.stderr


@pytest.mark.soak
def test_retrain_makes_a_version_of_each_days_files_and_its_gate_decides(box: WholeBox, tmp_path: Path) -> None:
    client = box.client()
    check: Any = {
        "type": "string_check",
        "name": "any",
        "operation": "ne",
        "input": "{{ sample.output_text }}",
        "reference": "",
    }
    schema: Any = {"type": "custom", "item_schema": {"type": "object"}, "include_sample_schema": True}
    made = client.evals.create(data_source_config=schema, testing_criteria=[check])
    items = [{"item": {"messages": [{"role": "user", "content": f"{n} and 1?"}]}} for n in range(8)]
    content = "".join(json.dumps(item) + "\n" for item in items).encode()
    source: Any = {
        "type": "completions",
        "model": "starter",
        "source": {"type": "file_id", "id": client.files.create(file=("s.jsonl", content), purpose="user_data").id},
        "input_messages": {"type": "item_reference", "item_reference": "item.messages"},
        "sampling_params": {"max_completion_tokens": 16},
    }
    client.evals.runs.create(made.id, data_source=source)
    folder = tmp_path / "new"
    folder.mkdir()
    arguments = ["--base", "starter", "--name", "sums", "--data", str(folder), "--eval", made.id, "--poll", "0.5"]
    assert "no new data" in run(box, "retrain_on_schedule.py", *arguments).stdout
    lines = gsm8k("train", 40).splitlines(keepends=True)
    said = []
    for day, part in enumerate((lines[:20], lines[20:])):
        (folder / f"{day}.jsonl").write_bytes(b"".join(part))
        said.append(run(box, "retrain_on_schedule.py", *arguments).stdout)
    assert all("passed" in one for one in said), said
    newest = client.fine_tuning.jobs.list().data[0].to_dict()
    assert newest["gate"]["activated"] is True and len(newest["gate"]["runs"]) == 2
    assert box.admin("models/sums")["active_version"] == newest["gate"]["version"]
