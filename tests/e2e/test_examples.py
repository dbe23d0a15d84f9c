"""The scripts of `examples/` against a whole box: real training, engines and evaluations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.box_support import WholeBox, whole_box

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
