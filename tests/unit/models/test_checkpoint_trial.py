"""What an import makes of how a comparison ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.models.checkpoint_trial import Trial
from appliance.models.errors import TrialEnded
from weights.checkpoint.errors import NotACheckpoint


@pytest.mark.parametrize(
    ("code", "refusal"),
    [
        ("import os; os.kill(os.getpid(), 9)", TrialEnded),
        ("raise SystemExit('no such module')", NotACheckpoint),
        ("""print('{"unfit": "no such activation"}')""", NotACheckpoint),
    ],
    ids=["killed", "failed", "unfit"],
)
def test_result_without_a_comparison_raises_what_ended_it(tmp_path: Path, code: str, refusal: type[Exception]) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        with pytest.raises(refusal):
            Trial(process).result(tmp_path, "LlamaForCausalLM")
