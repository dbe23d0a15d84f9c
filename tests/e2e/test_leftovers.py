"""What a box leaves when all of its processes are killed at once, none of which could clean up: gone after the next
`up` and `down`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.box_support import WholeBox, gsm8k, shared_memory_files, wait_for
from tests.train_support.tiny import make_model_dir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def test_nothing_is_left_after_everything_was_killed(tmp_path):
    box, before = WholeBox(tmp_path / "box"), seen()
    box.data_dir.mkdir()
    (box.data_dir / "appliance.toml").write_text("[box]\ndevices = 4\n")
    try:
        box.up()
        tiny = make_model_dir(box.data_dir / "tiny", hidden_size=128, intermediate_size=256)
        assert box.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
        box.run("model", "deploy", "tiny", "--tensor-parallel", "2", "--min-replicas", "1", "--max-replicas", "1")
        (box.data_dir / "train.jsonl").write_bytes(gsm8k("train", 500))
        box.run("mode", "set", "split", "--train", "2", "--wait")
        job = box.ask(
            "job",
            "submit",
            "--model",
            "tiny",
            "--file",
            str(box.data_dir / "train.jsonl"),
            "--epochs",
            "50",
            "--batch-size",
            "4",
            "--set",
            "max_length=256",
        )["id"]
        wait_for(lambda: box.losses(job), "a step of the job", 300)
        wait_for(lambda: any(is_wide(replica) for replica in box.admin("status")["replicas"]), "an engine", 200)
        main = psutil.Process(box.main_pid())
        kill_all([main.pid, *box.running()])
        # The kernel takes their memory back before they are gone: seconds on a machine that has other work.
        wait_for(lambda: not box.running() and not main.is_running(), "the killed to be gone", 120)
        print(f"\nleft by the kill: {box.left()}")
        assert sorted(seen() - before), "a box that was killed leaves its versions"

        box.up()
        wait_for(lambda: box.admin("status")["devices"], "the devices", 60)
        box.run("down")
        assert box.left() == []
        assert seen() - before == set()
    finally:
        box.destroy()


def is_wide(replica) -> bool:
    return replica["state"] == "open" and len(replica["devices"]) == 2


def kill_all(pids: list[int]) -> None:
    """SIGKILL these processes while all of them stand still: none sees another die."""
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, sig)
            except ProcessLookupError:
                continue


def seen() -> set[str]:
    """Files in shared memory, of ours and of others' making, and what lies in /tmp beside them, but for torch's own
    cache of compiled code, which all programs of a user share."""
    beside = {f"/tmp/{path.name}" for path in Path("/tmp").iterdir() if not path.name.startswith("torchinductor_")}
    return shared_memory_files() | beside
