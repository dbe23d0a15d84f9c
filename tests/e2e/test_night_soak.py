"""What a box does by itself at night, on real devices of this machine: a job whose loss is no number any more goes back
to its snapshot with half the rate and is done by the morning; the doctor measures every device at the hour that is set.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box
from tests.train_support.tiny import make_model_dir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2100)]

STEPS, WARM_STEPS, RATE = 12, 8, 10.0
"""The rate grows by 1.25 a step: the first weights are sound, and at about the eighth step those of so small a model
overflow what it squares. From one of the first steps on, at half of the rates they overflow at the eleventh or not at
all, at a quarter never within twelve. Up to sixteen losses no jump is a spike: nothing is usual yet."""


def anomalies(box: WholeBox, job_id: str) -> list[dict[str, Any]]:
    events = box.client().fine_tuning.jobs.list_events(job_id, limit=100).data
    return [event.data["anomaly"] for event in reversed(events) if event.data and "anomaly" in event.data]


def test_a_loss_without_a_number_and_the_doctors_round_at_night(tmp_path: Path) -> None:
    data_dir = tmp_path / "box"
    data_dir.mkdir()
    due_s = time.time() + 180
    at = time.strftime("%H:%M", time.localtime(due_s))
    with whole_box(data_dir, f'[box]\ndevices = 2\n[doctor]\ndeep_at = "{at}"\n') as box:
        wait_for(lambda: (data_dir / "last-checkup.json").exists(), "the doctor's look after the start", 120)
        tiny = make_model_dir(tmp_path / "tiny", hidden_size=128, intermediate_size=256)
        assert box.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
        train = tmp_path / "train.jsonl"
        train.write_bytes(gsm8k("train", 32 * STEPS))
        options = "--full --epochs 1 --batch-size 32 --learning-rate-multiplier " + str(RATE)
        sets = {
            "learning_rate": 1,
            "warmup_ratio": 0.66,
            "lr_scheduler": "constant",
            "weight_decay": 0,
            "precision": "fp32",
            "max_length": 256,
            "packing": "false",
            "snapshot_every_s": 0,
            "on_loss_spike": "rollback",
        }
        job_id = box.submit(
            "tiny", train, options, *(part for one in sets.items() for part in ("--set", f"{one[0]}={one[1]}"))
        )
        wait_for(lambda: box.losses(job_id), "a step", 300)
        box.run("job", "pause", job_id)
        paused = wait_for(lambda: (now := box.admin(f"jobs/{job_id}"))["phase"] == "paused" and now, "a snapshot", 120)
        kept = paused["snapshot"]["step"]
        assert 1 <= kept <= 3, f"the machine was too fast: the snapshot is of step {kept}"
        box.run("job", "resume", job_id)
        done = wait_for(
            lambda: (now := box.admin(f"jobs/{job_id}"))["phase"] in ("succeeded", "failed") and now, "its end", 600
        )
        told = anomalies(box, job_id)
        rates = {row["step"]: row["learning_rate"] for row in box.steps(job_id)}
        print(f"snapshot of step {kept}; {told}; rates {rates}; losses {box.losses(job_id)}", flush=True)
        assert done["phase"] == "succeeded", done["error"]
        assert {(one["kind"], one["action"]) for one in told} == {("not_finite", "rollback")} and len(told) in (1, 2)
        assert done["resolved"]["rate_cuts"] == [kept] * len(told)
        assert rates == {
            step: pytest.approx(RATE * min(1, step / WARM_STEPS) * (1 if step <= kept else 0.5 ** len(told)))
            for step in range(1, STEPS + 1)
        }
        assert all(loss is not None for loss in box.losses(job_id).values())
        assert box.client().completions.create(model=done["fine_tuned_model"], prompt="2+2", max_tokens=4).choices
        # Nobody sets an idle time: awake, its engine keeps one of the two devices until nobody has asked for minutes.
        engine = {one["id"] for one in box.admin("status")["replicas"] if one["state"] == "open"}
        assert engine

        def measured() -> dict[str, Any] | None:
            found = {one["id"]: one["check"] for one in box.admin("devices")["data"]}
            return found if all(found.values()) else None

        checks = wait_for(measured, f"the round of {at}", 900)
        print({name: (check["state"], check["rates"]) for name, check in checks.items()}, flush=True)
        for check in checks.values():
            assert check["at_s"] >= due_s - 60 and check["rates"]
        wait_for(lambda: all(one["health"] == "ok" for one in box.admin("devices")["data"]), "all devices back", 60)
        # It slept where it was, and is awake again without a request.
        wait_for(
            lambda: engine <= {one["id"] for one in box.admin("status")["replicas"] if one["state"] == "open"}, "it", 60
        )
        told = [step for one in box.admin("handovers")["data"] for step in one["steps"] if step["target"] in engine]
        assert {"sleep_replica", "wake_replica"} <= {step["verb"] for step in told}
        answered = box.client().completions.create(model="tiny", prompt="Hello", max_tokens=4)
        assert answered.choices[0].text is not None
