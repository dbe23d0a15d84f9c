"""Runs each training method on a whole box with the same faults: mode changes under load, kill -9 of ranks, controller,
engines and the whole box. No step of the job may be missing, no other request may be cut off or answered twice, and a
method with fixed data must have the losses of an undisturbed job."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.demo import Load
from tests.e2e.box_support import WholeBox, wait_for, whole_box
from tests.e2e.test_box_rewards import GRADER, asked, sums, teacher
from train.methods.methods import METHODS, method_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1500)]
# The job has two devices; its teacher answers on the third.
DEVICES = 3
WORKERS = 2
# A smaller world sums in another order (bf16 on a processor that has it); a lost or repeated step changes it by tenths.
CURVE_TOLERANCE = 0.02


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeBox]:
    settings = f"[box]\ndevices = {DEVICES}\n"
    with whole_box(tmp_path_factory.mktemp("box"), settings) as one:
        one.make_starter()
        yield one


def data_of(method: str, rows: int) -> bytes:
    if method_of(method).judged_by:
        return sums(1, rows)
    said = [{"role": "assistant", "content": text} for text in ("{0}.", "I cannot add {0}.")]

    def row(n: int) -> dict[str, Any]:
        right, wrong = ([{**one, "content": one["content"].format(n + n % 7)}] for one in said)
        if method == "dpo":
            return {"input": {"messages": asked(n)}, "preferred_output": right, "non_preferred_output": wrong}
        return {"messages": [*asked(n), *right]}

    return "".join(json.dumps(row(n)) + "\n" for n in range(1, rows + 1)).encode()


def job_of(box: WholeBox, method: str) -> str:
    judge = method_of(method).judged_by
    more: dict[str, Any] = {"packing": False, "n_epochs": 2} if not judge else {"max_completion_tokens": 12}
    how = {"n_epochs": 1, "batch_size": 2, "snapshot_every_s": 2, **more}
    by = {"grader": GRADER} if judge == "grader" else {"teacher": teacher(box)} if judge == "teacher" else {}
    rows = data_of(method, 96 if judge else 160)
    return box.tune("starter", rows, method=method, judge=by, devices=None, request={"seed": 5}, **how)


def kill(box: WholeBox, logs: str) -> int:
    """Kill the processes with these logs; return their number."""
    pids = box.pids_logging_to(logs)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return len(pids)


@pytest.mark.parametrize("method", METHODS)
def test_mode_changes_and_deaths_under_load_lose_no_step(box: WholeBox, method: str):
    box.set_mode(policy="split", train_devices=1)
    job_id = job_of(box, method)

    def goes_on(why: str) -> None:
        done = max(box.losses(job_id), default=0)
        wait_for(lambda: max(box.losses(job_id), default=0) > done, f"a step {why}", 300)

    with Load(box.url, box.key, "starter", workers=WORKERS, max_tokens=16) as load:
        wait_for(lambda: load.finished >= WORKERS, "the load to flow", 300)
        wait_for(lambda: box.losses(job_id), "the first step", 300)
        for mode in ({"policy": "serve"}, {"policy": "train"}, {"policy": "serve"}, {"policy": "train"}):
            answered = load.finished
            box.set_mode(**mode)
            wait_for(lambda answered=answered: load.finished > answered, f"an answer in the mode {mode}", 300)
        wait_for(lambda: box.job(job_id)["snapshot"], "a snapshot", 120)
        goes_on("on two devices")
        assert kill(box, f"{job_id}-rank*.log") >= 1
        goes_on("after the death of all ranks")
        box.kill_controller()
        goes_on("after the death of the controller")
        engines = kill(box, "engine-*.log")
        answered = load.finished
        wait_for(lambda: load.finished > answered, "an answer after the death of the engines", 300)
        goes_on("after the death of the engines")
        box.set_mode(policy="serve")
    report = load.report()
    print(f"{method}: {report}, steps until then {len(box.losses(job_id))}, engines killed {engines}")
    assert (report.truncated, report.duplicated) == (0, 0), report
    assert engines and report.dropped <= WORKERS * engines, report

    os.kill(box.main_pid(), signal.SIGKILL)
    wait_for(lambda: not box.running(), "everything to end", 60)
    box.up()
    box.set_mode(policy="train")
    goes_on("after the death of everything")
    tuned = box.tuned(job_id)
    losses = box.losses(job_id)
    assert {row["devices"] for row in box.steps(job_id) if row["loss"] is not None} == {1, 2}
    assert sorted(losses) == list(range(1, max(losses) + 1)), "no step of the job is missing"
    box.set_mode(policy="split", train_devices=1)
    answer = box.client(max_retries=5).chat.completions.create(
        model=tuned, messages=asked(3), max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 4, "what came of it answers"
    if not method_of(method).judged_by:
        undisturbed = job_of(box, method)
        box.tuned(undisturbed)
        expected = box.losses(undisturbed)
        assert expected.keys() == losses.keys()
        worst = max(abs(losses[step] - loss) for step, loss in expected.items())
        print(f"{method}: {len(losses)} steps, worst difference of a loss {worst:.1e}")
        assert worst < CURVE_TOLERANCE
