"""kill -9 of what supervises engines and ranks, and of an engine again and again, on a real box (`make soak`): all of
it comes back without a hand, nothing is given up, and no job fails."""

from __future__ import annotations

import os
import signal
import time

import openai
import psutil
import pytest

from tests.e2e.box_support import WholeBox, gsm8k, wait_for, whole_box
from tests.train_support.tiny import make_model_dir

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

KILLS = 10
WHOLE_S = 90.0
START_S = 300.0  # a cold box on a machine with other work


def supervisors(box: WholeBox) -> list[int]:
    """Ray's workers that hold an engine or a rank."""
    found = []
    for pid in box.running():
        try:
            title = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
        if title.startswith("ray::") and ("RankHost" in title or "Replica" in title):
            found.append(pid)
    return found


def answers(box: WholeBox) -> bool:
    try:
        box.client().with_options(timeout=5).completions.create(model="tiny", prompt="one two", max_tokens=4)
    except openai.APIError:
        return False
    return True


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    with whole_box(tmp_path_factory.mktemp("deaths"), "[box]\ndevices = 3\n") as one:
        one.key = one.ask("key", "create", "--name", "deaths", "--scope", "admin", "--scope", "inference")["key"]
        tiny = make_model_dir(one.data_dir / "tiny", hidden_size=128, intermediate_size=256)
        assert one.ask("model", "import", str(tiny), "--name", "tiny")["state"] == "succeeded"
        one.run("model", "deploy", "tiny", "--min-replicas", "1", "--max-replicas", "1")
        yield one


def test_all_supervisors_die_at_once(box, capsys):
    (box.data_dir / "train.jsonl").write_bytes(gsm8k("train", 2000))
    job_id = box.submit("tiny", box.data_dir / "train.jsonl", "--epochs 50 --batch-size 4 --set max_length=256")
    wait_for(lambda: box.losses(job_id), "the first step of the job", START_S)
    wait_for(lambda: answers(box), "the engine", START_S)
    for round_ in range(2):
        victims, step = supervisors(box), max(box.losses(job_id))
        assert len(victims) >= 2, victims
        began_s = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: answers(box), "an answer", WHOLE_S)
        served_s = time.monotonic() - began_s
        wait_for(lambda: max(box.losses(job_id)) > step, "a further step", WHOLE_S)  # noqa: B023
        trained_s = time.monotonic() - began_s
        with capsys.disabled():
            print(
                f"\nround {round_}: {len(victims)} supervisors killed; answers after {served_s:.1f} s, "
                f"the job is further than before after {trained_s:.1f} s",
                flush=True,
            )
    assert box.admin(f"jobs/{job_id}")["status"] in ("running", "queued")
    # The hand-over of a job whose supervisors are dead ends, and does not wait for them.
    for pid in supervisors(box):
        os.kill(pid, signal.SIGKILL)
    began_s = time.monotonic()
    box.run("job", "cancel", job_id)
    wait_for(lambda: not box.admin(f"jobs/{job_id}")["devices"], "the job's devices", 60)
    with capsys.disabled():
        print(f"cancelled under dead supervisors: {time.monotonic() - began_s:.1f} s", flush=True)


def test_an_engine_killed_again_and_again_comes_back_each_time(box, capsys):
    took = []
    for _ in range(KILLS):
        wait_for(lambda: answers(box), "the engine", WHOLE_S)
        (pid,) = box.pids_logging_to("engine-*.log")[:1]
        began_s = time.monotonic()
        os.killpg(pid, signal.SIGKILL) if os.getpgid(pid) == pid else os.kill(pid, signal.SIGKILL)
        wait_for(lambda: answers(box), "an answer", WHOLE_S)
        took.append(time.monotonic() - began_s)
    with capsys.disabled():
        print(f"\nkilled {KILLS} times; seconds to an answer: {', '.join(f'{s:.1f}' for s in took)}", flush=True)
    assert box.ask("model", "show", "tiny")["state"] == "serving"
