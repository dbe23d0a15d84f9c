"""A program beside the box takes the host's memory: what the box gives back, what its clients see, and that all of it
comes back by itself.

The box keeps a large reserve, so that memory is short for it while the machine has plenty: nobody else on the machine
is harmed, and the kernel kills nobody.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from appliance.demo.load_generator import Load
from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box
from tests.train_support.tiny import make_model_dir

GB = 10**9
KEPT = 3 * GB  # never less than this is left on the machine, whatever is asserted
HOG = """
import sys
held = []
for line in sys.stdin:
    held.append(b"x" * int(line))
    print("held", flush=True)
"""
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@contextmanager
def hog(until_available: int) -> Iterator[None]:
    """Another program, which holds so much that no more than `until_available` is left, for as long as it runs."""
    process = subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        while (left := psutil.virtual_memory().available) > max(until_available, KEPT):
            process.stdin.write(f"{max(4096, min(GB // 2, left - max(until_available, KEPT)) // 4096 * 4096)}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def running_job(box: WholeBox, job_id: str) -> bool:
    return box.job(job_id)["phase"] == "running"


def test_under_another_program_training_waits_serving_stays_and_all_of_it_comes_back(tmp_path: Path):
    data_dir = tmp_path / "box"
    data_dir.mkdir()
    before = psutil.virtual_memory().available
    reserve = before // 2
    with whole_box(data_dir, f"[box]\ndevices = 4\nmemory_reserve_bytes = {reserve}\n") as box:
        tiny = make_model_dir(tmp_path / "tiny", hidden_size=128, intermediate_size=256)
        assert box.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
        train = tmp_path / "train.jsonl"
        train.write_bytes(gsm8k("train", 2000))
        job_id = box.submit("tiny", train, "--epochs 50 --batch-size 4 --set max_length=256")
        box.client().completions.create(model="tiny", prompt="Hello", max_tokens=4)
        wait_for(lambda: running_job(box, job_id) and len(box.losses(job_id)) > 5, "the job to train")

        engines, ranks = box.pids_logging_to("engine-*.log"), box.pids_logging_to(f"{job_id}-rank*.log")
        gateway, controller = box.pids_logging_to("gateway.log"), box.pids_logging_to("controller.log")
        order = [{score(pid) for pid in pids} for pids in (ranks, engines, gateway, controller, [box.main_pid()])]
        assert all(len(scores) == 1 for scores in order), order
        assert order == sorted(order, key=lambda scores: -min(scores)) and len(set(map(min, order))) == 5, order

        with Load(box.url, box.key, "tiny", workers=2, max_tokens=8) as load:
            began_s = time.monotonic()
            with hog(reserve - GB // 2):
                status = wait_for(
                    lambda: (now := box.admin("status"))["memory"]["host"]["waiting_jobs"] and now,
                    "the box to be short of memory",
                    60,
                )
                short_s = time.monotonic() - began_s
                assert status["notes"][0].startswith("memory is short: ") and "training waits" in status["notes"][0]
                wait_for(lambda: not running_job(box, job_id), "the job to be suspended", 60)
                suspended_s = time.monotonic() - began_s
                assert "Memory is short" in box.run("job", "queue")
                answered = load.finished
                wait_for(lambda: load.finished > answered + 10, "answers while memory is short", 60)
                done = [one["what"] for one in box.admin("status")["memory"]["host"]["given_back"]]
                assert "engine" not in done and done.index("job") == len(done) - 1 - done[::-1].index("job")
            freed_s = time.monotonic()
            step = max(box.losses(job_id))
            wait_for(lambda: running_job(box, job_id) and max(box.losses(job_id)) > step, "the job to train again", 120)
            back_s = time.monotonic() - freed_s
        report = load.report()
        said = box.admin("status")
        print(
            f"short after {short_s:.1f} s, ranks gone after {suspended_s:.1f} s, training {back_s:.1f} s after the "
            f"program ended; {report.requests} requests, longest {report.longest_s:.1f} s",
            flush=True,
        )
        assert (report.dropped, report.truncated, report.duplicated) == (0, 0, 0), report.errors
        assert said["degraded"] == [] and not said["memory"]["host"]["short"]
        audit = box.admin("audit?limit=200")["data"]
        assert {"memory.given", "memory.taken"} <= {row["action"] for row in audit}
