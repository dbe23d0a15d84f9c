"""What a box does by itself at night, on real devices of this machine: a job whose loss is no number any more goes back
to its snapshot with half the rate, past one that is broken already, and is done by the morning; the doctor measures
every device at the hour that is set.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.paths import BoxPaths
from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box
from tests.train_support.tiny import make_model_dir
from weights.format.errors import VersionLeased
from weights.format.names import version_name
from weights.format.torch_views import as_tensor
from weights.memory.store import WeightStore

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

STEPS, WARM_STEPS, RATE = 12, 8, 10.0
"""The rate grows by 1.25 a step: the first weights are sound, and at about the eighth step those of so small a model
overflow what it squares. From one of the first steps on, at half of the rates they overflow at the eleventh or not at
all, at a quarter never within twelve. Up to sixteen losses no jump is a spike: nothing is usual yet."""


def anomalies(box: WholeBox, job_id: str) -> list[dict[str, Any]]:
    events = box.client().fine_tuning.jobs.list_events(job_id, limit=100).data
    return [event.data["anomaly"] for event in reversed(events) if event.data and "anomaly" in event.data]


def import_tiny(box: WholeBox, folder: Path) -> None:
    tiny = make_model_dir(folder / "tiny", hidden_size=128, intermediate_size=256)
    assert box.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"


def submit(box: WholeBox, folder: Path, rate: float, **more: Any) -> str:
    """A job of `STEPS` steps, the first `WARM_STEPS` of them on the way to `rate`. more: further hyperparameters."""
    train = folder / "train.jsonl"
    train.write_bytes(gsm8k("train", 32 * STEPS))
    sets = {
        "learning_rate": 1,
        "warmup_ratio": 0.66,
        "lr_scheduler": "constant",
        "weight_decay": 0,
        "precision": "fp32",
        "max_length": 256,
        "packing": "false",
        "snapshot_every_s": 0,
        **more,
    }
    options = "--full --epochs 1 --batch-size 32 --learning-rate-multiplier " + str(rate)
    return box.submit(
        "tiny", train, options, *(part for one in sets.items() for part in ("--set", "=".join(map(str, one))))
    )


def ended(box: WholeBox, job_id: str) -> dict[str, Any]:
    return wait_for(
        lambda: (now := box.admin(f"jobs/{job_id}"))["phase"] in ("succeeded", "failed") and now, "its end", 600
    )


def pause_after(box: WholeBox, job_id: str, step: int) -> int:
    """The step of the snapshot of a job that is paused as soon as it has done `step`: it leaves the next one."""
    wait_for(lambda: max(box.losses(job_id), default=0) >= step, f"step {step}", 300)
    box.client().fine_tuning.jobs.pause(job_id)
    paused = wait_for(lambda: (now := box.admin(f"jobs/{job_id}"))["phase"] == "paused" and now, "a snapshot", 120)
    return paused["snapshot"]["step"]


def break_snapshot(box: WholeBox, job_id: str, step: int) -> None:
    """In place of the snapshot of this step in memory, one whose weights are no numbers, whole by every checksum."""
    store = WeightStore(BoxPaths.of(box.data_dir).shm_root, budget_bytes=None)
    sound = store.find("snapshot", job_id, version_name(step))
    assert sound is not None
    with store.lease(sound) as lease:
        layout, meta = lease.layout, sound.manifest.meta
        tensors = {name: bytes(view) for name, view in lease.views().items()}

    def is_removed() -> bool:
        try:
            store.remove(sound)
        except VersionLeased:  # it is copied to the disk just now
            return False
        return True

    wait_for(is_removed, "its copy to the disk", 60)
    with store.reserve(layout, kind="snapshot", model=job_id, version=version_name(step)) as draft:
        for placed in layout:
            name = placed.spec.name
            draft.view(name)[:] = tensors[name]
            if name.startswith("master."):
                as_tensor(draft.view(name), placed.spec.dtype, placed.spec.shape).fill_(math.nan)
        draft.commit(meta=meta)


def resumed(box: WholeBox, job_id: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[int, float]]:
    """The job that went on to its end, its anomalies, and its learning rate by step."""
    box.run("job", "resume", job_id)
    done = ended(box, job_id)
    return done, anomalies(box, job_id), {row["step"]: row["learning_rate"] for row in box.steps(job_id)}


def test_a_loss_without_a_number_and_the_doctors_round_at_night(tmp_path: Path) -> None:
    data_dir = tmp_path / "box"
    data_dir.mkdir()
    due_s = time.time() + 180
    at = time.strftime("%H:%M", time.localtime(due_s))
    with whole_box(data_dir, f'[box]\ndevices = 2\nstart_timeout_s = 600\n[doctor]\ndeep_at = "{at}"\n') as box:
        wait_for(lambda: (data_dir / "last-checkup.json").exists(), "the doctor's look after the start", 400)
        import_tiny(box, tmp_path)
        job_id = submit(box, tmp_path, RATE, on_loss_spike="rollback")
        kept = pause_after(box, job_id, 1)
        assert 1 <= kept <= 3, f"the machine was too fast: the snapshot is of step {kept}"
        done, told, rates = resumed(box, job_id)
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


def test_a_rollback_passes_over_a_snapshot_that_is_broken_already(tmp_path: Path) -> None:
    """Of a step without a number nothing is kept, so nothing that trains leaves such a snapshot for certain: the test
    makes one of a sound one."""
    data_dir, rate = tmp_path / "box", 1e-3
    data_dir.mkdir()
    with whole_box(
        data_dir, "[box]\ndevices = 2\nstart_timeout_s = 600\n[weights.disk.snapshots]\nkeep_last = 2\n"
    ) as box:
        import_tiny(box, tmp_path)
        job_id = submit(box, tmp_path, rate, on_loss_spike="rollback")
        good = pause_after(box, job_id, 1)
        box.run("job", "resume", job_id)
        broken = pause_after(box, job_id, good + 1)
        assert good < broken < STEPS, f"the machine was too fast: snapshots of steps {good} and {broken}"
        break_snapshot(box, job_id, broken)
        done, told, rates = resumed(box, job_id)
        print(f"snapshots of {good}, {broken}; {told}; rates {rates}; losses {box.losses(job_id)}", flush=True)
        assert done["phase"] == "succeeded", done["error"]
        assert [(one["step"], one["action"], one["poisoned"]) for one in told] == [
            (broken + 1, "rollback", None),
            (broken + 1, "rollback", broken),
        ]
        assert done["resolved"]["rate_cuts"] == [broken, good]
        assert rates == {
            step: pytest.approx(rate * min(1, step / WARM_STEPS) * 0.5 ** ((step > good) + (step > broken)))
            for step in range(1, STEPS + 1)
        }
        assert len(box.losses(job_id)) == STEPS
        assert box.client().completions.create(model=done["fine_tuned_model"], prompt="2+2", max_tokens=4).choices
