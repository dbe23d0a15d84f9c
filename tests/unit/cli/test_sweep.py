"""`appliance sweep`: a file becomes a sweep of the box, shown as a table with bars."""

from __future__ import annotations

from pathlib import Path

from appliance.store.objects import sweeps
from tests.unit.cli.conftest import ControlledBox
from tests.unit.controller.conftest import chat_lines


def test_a_sweep_is_begun_listed_shown_and_cancelled(box: ControlledBox, tmp_path: Path):
    assert "no sweeps" in box.run("sweep", "list").stdout
    data = tmp_path / "train.jsonl"
    data.write_bytes(chat_lines())
    file_id = box.json("file", "upload", str(data))["id"]
    path = tmp_path / "rates.toml"
    lines = [
        'name = "rates"',
        "device_hours = 2",
        'train.model = "starter"',
        f'train.training_file = "{file_id}"',
        f'train.validation_file = "{file_id}"',
        "grid.learning_rate_multiplier = [0.5, 1.0]",
    ]
    path.write_text("\n".join(lines))
    sweep_id = box.json("sweep", "run", str(path))["id"]
    jobs = [{"job_id": "ftjob-1", "state": "succeeded", "loss": loss} for loss in (1.5, 1.25)]
    trials = [{"parameters": {"learning_rate_multiplier": 0.5 * (n + 1)}, "jobs": [jobs[n]]} for n in range(2)]
    box.do(lambda: sweeps.update(box.context.db, sweep_id, state="succeeded", trials=trials, best=1, spent_s=1800.0))
    told = box.run("sweep", "show", sweep_id).stdout
    assert "learning_rate_multiplier = 1.0" in told and "1.2500" in told and "0.5 of 2" in told
    bars = [line.split()[-1] for line in told.splitlines() if line.endswith("#")]
    assert [len(bar) for bar in bars] == [1, 40], "the best first, and the worst with all cells"
    assert "rates" in box.run("sweep", "list").stdout
    assert box.run("sweep", "cancel", sweep_id).stdout.strip() == f"{sweep_id}: succeeded"
