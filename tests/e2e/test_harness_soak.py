"""lm-evaluation-harness itself, in an environment of its own, asks a box by the command."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path

import pytest

from tests.e2e.box_support import whole_box
from tests.e2e.machines_support import deploy_tiny

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

PROJECT = Path(__file__).parents[2]
NEEDED = ("lm-eval[api]==0.4.13", "typer>=0.29,<1", "rich>=15", "orjson>=3.11", "nvidia-ml-py>=13")
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{more}
"""
CHOOSE = """doc_to_choice: [" Paris", " four", " blue"]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"""
ASK = """generation_kwargs: {max_gen_toks: 8, until: ["\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"""
ROWS = [("The capital of France is", " Paris"), ("Two and two is", " four"), ("The sky is", " blue")]


def test_own_tasks_are_asked_of_a_box(tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", *NEEDED], check=True)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in ROWS))
    for name, kind, more in (("choose", "multiple_choice", CHOOSE), ("ask", "generate_until", ASK)):
        text = TASK.format(name=name, kind=kind, data=tasks / "rows.jsonl", more=more)
        (tasks / f"{name}.yaml").write_text(text)
    (tmp_path / "box").mkdir()
    with whole_box(tmp_path / "box", "[box]\ndevices = 2\n") as box:
        deploy_tiny(box)
        command = [python, "-m", "appliance.cli.main", "eval", "harness", "tiny", "--tasks", "choose,ask"]
        command += ["--tasks-path", str(tasks), "--data-dir", str(box.data_dir), "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, timeout=900)
        assert done.returncode == 0, done.stderr
    rows = {row["task"]: row for row in json.loads(done.stdout)["data"]}
    assert rows["choose"]["as"] == "text" and rows["ask"]["as"] == "messages"
    assert rows["choose"]["questions"] == 3 and 0 <= rows["choose"]["value"] <= 1
