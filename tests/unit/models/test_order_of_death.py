"""What makes a model of somebody's file, or tries a part of it, is a child of the controller; for want of memory the
kernel takes it before any rank or engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.processes.oom import DiesAs

SCORE = "print('score', open('/proc/self/oom_score_adj').read())"
PROCESSES = {
    "a GGUF file": "from pathlib import Path\nfrom train.convert.gguf import main\nmain(Path('no model'), Path('out'))",
    "a chat template": 'import io, sys\nsys.stdin = io.StringIO(\'{"template": "{{ messages }}", "special": {}}\')\n'
    "from appliance.models.template_trial import main\nmain()",
}


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)
def test_it_dies_before_ranks_and_engines(process: str, tmp_path: Path) -> None:
    (tmp_path / "no model").write_bytes(b"GGUF, it says")
    done = subprocess.run(
        [sys.executable, "-c", f"{process}\n{SCORE}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert f"score {int(DiesAs.TRIAL)}" in done.stdout + done.stderr, done
