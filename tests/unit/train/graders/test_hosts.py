"""Grading in another process: owners in turns, whatever is broken or given up, and nothing left."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from train.graders import hosts as hosts_module
from train.graders import worker
from train.graders.graders import Grader, ModelAnswer, parse
from train.graders.grading import Graded
from train.graders.hosts import MAX_BUSY, Bounds, ForkBroke, GraderHosts
from train.graders.templates import Sample

SAME = {"type": "string_check", "name": "c", "input": "{{sample.output_text}}", "reference": "{{item}}"}
CHECK = parse(SAME | {"operation": "eq"})
JUDGE = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "{{item}}"}]}

needs_confinement = pytest.mark.skipif(bool(worker.refusal()), reason=worker.refusal())


@pytest.fixture
async def hosts() -> AsyncIterator[GraderHosts]:
    made = GraderHosts()
    yield made
    process = made._process
    await made.stop()
    assert process is None or process.returncode is not None


def python(body: str):
    return parse({"type": "python", "name": "p", "source": f"def grade(sample, item):\n    {body}"})


async def graded(hosts: GraderHosts, grader: Grader, samples: list[tuple[Sample, Any]]) -> list[Graded]:
    return await hosts.grade("ann", grader, samples, [{}] * len(samples))


async def test_the_answers_of_models_are_graded(hosts: GraderHosts) -> None:
    judge, samples = parse(JUDGE), [(Sample("x"), "one"), (Sample("x"), "two")]
    answers = [{"j": ModelAnswer('{"reason": "", "result": 0.25}', "m", 5, 2)}, {"j": ModelAnswer(error="gone")}]
    found = await hosts.grade("ann", judge, samples, answers)
    assert [one.reward for one in found] == [0.25, 0] and found[0].tokens_by_model == {"m": 7}
    assert found[1].errors.model_grader_server_error_details == "gone"


async def test_after_a_worker_that_died_another_grades(hosts: GraderHosts) -> None:
    found = await graded(hosts, CHECK, [(Sample("a"), "a"), (Sample("a"), "b"), (Sample("你"), "你")])
    assert [one.reward for one in found] == [1, 0, 1]
    assert hosts._process is not None
    hosts._process.kill()  # not reaped yet: the request meets its end and is made again
    assert (await graded(hosts, CHECK, [(Sample("a"), "a")]))[0].reward == 1


async def test_grade_sample_that_takes_too_long_leaves_the_others_their_rewards(
    hosts: GraderHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def results(head: dict[str, Any], rows: list[Any], *_: Any) -> list[Any]:
        if any(row["item"] == "long" for row in rows):
            raise ForkBroke("it took longer than 60 s")
        return [Graded(1.0, True)] * len(rows)

    monkeypatch.setattr(hosts, "_results", results)
    found = await graded(hosts, CHECK, [(Sample(""), item) for item in ("a", "long", "b")])
    assert [one.reward for one in found] == [1, 0, 1] and found[1].errors.other_error


@needs_confinement
async def test_a_request_given_up_ends_its_processes(hosts: GraderHosts) -> None:
    slow = asyncio.create_task(graded(hosts, python("while True: pass"), [(Sample(""), None)]))
    child = psutil.Process(await _child_of(hosts))
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert (await graded(hosts, python("return 3"), [(Sample(""), None)]))[0].reward == 3
    await asyncio.to_thread(child.wait, 10)


async def _child_of(hosts: GraderHosts) -> int:
    while hosts._process is None or not (found := psutil.Process(hosts._process.pid).children()):
        await asyncio.sleep(0.01)
    return found[0].pid


@needs_confinement
@pytest.mark.parametrize(
    "body",
    [
        "import os; os.write(3, b'[' * 15000); os._exit(0)",
        "import os; os.write(3, b'{\"reward\": {}}\\n'); os._exit(0)",
        "import os\n    while True: os.write(3, b'x' * 4096)",
        "import time; time.sleep(60)",
    ],
)
async def test_grade_code_without_a_result_is_its_own_error(
    hosts: GraderHosts, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_module, "TIME_S", 1)
    (found,) = await graded(hosts, python(body), [(Sample(""), None)])
    assert found.errors.python_grader_runtime_error and found.reward == 0


@needs_confinement
@pytest.mark.parametrize(
    ("items", "rewards", "n_not_run"),
    [
        # Devices waited two minutes for each of a step's answers, and a step may have thousands.
        (["end"] * 5, [0] * 5, 2),
        # A grader that runs what the model wrote meets answers that end it.
        (["", *["end"] * 4], [1, 0, 0, 0, 0], 0),
    ],
)
async def test_grade_samples_that_end_their_process_have_no_reward(
    hosts: GraderHosts, items: list[str], rewards: list[int], n_not_run: int
) -> None:
    code = python("return 1 if not item else __import__('os')._exit(0)")
    found = await graded(hosts, code, [(Sample(""), item) for item in items])
    assert [one.reward for one in found] == rewards
    assert sum(one.errors.other_error for one in found) == n_not_run


@needs_confinement
async def test_code_is_told_nothing_of_where_the_box_is(hosts: GraderHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_DATA_DIR", "/srv/box")
    body = "import os\n    return os.readlink('/proc/self/cwd') == '/' and 'APPLIANCE_DATA_DIR' not in os.environ"
    assert (await graded(hosts, python(body), [(Sample(""), None)]))[0].reward == 1


async def test_a_schema_that_takes_for_ever_is_ended(hosts: GraderHosts) -> None:
    """By what it computes, so that a busy machine refuses no honest one."""
    with pytest.raises(ForkBroke, match="1 s of CPU"):
        await hosts.refused_items("ann", {"pattern": "(a+)+$"}, ["a" * 64 + "b"], Bounds(300, cpu_s=1))
    found = await hosts.refused_items("ann", {"type": "string"}, ["a", 1])
    assert found == [(1, "item: 1 is not of type 'string'")]


async def test_an_owner_that_grades_for_minutes_keeps_no_other_waiting(
    hosts: GraderHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, begun = asyncio.Event(), list[str]()

    async def results(head: dict[str, Any], rows: list[Any], *_: Any) -> list[Any]:
        if head["kind"] == "code":
            begun.append("checked")
            return [""]
        begun.append(rows[0]["item"])
        await end.wait()
        return [Graded(1.0, True)]

    monkeypatch.setattr(hosts, "_together", results)

    async def slow(owner: str) -> None:
        await hosts.grade(owner, CHECK, [(Sample(""), owner)], [{}])

    tasks = [asyncio.create_task(slow("greedy")) for _ in range(2 * MAX_BUSY)]
    tasks += [asyncio.create_task(slow(f"owner {number}")) for number in range(MAX_BUSY - 1)]
    tasks.append(asyncio.create_task(slow("late")))
    async with asyncio.timeout(60):
        while len(begun) < MAX_BUSY:
            await asyncio.sleep(0)
        # However many of one owner wait, they take one place, and none of a check.
        assert sorted(begun) == ["greedy", *(f"owner {number}" for number in range(MAX_BUSY - 1))]
        assert await hosts.unusable("greedy", {"source": ""}) == [] and begun[-1] == "checked"
        end.set()
        await asyncio.gather(*tasks)
    assert begun.count("greedy") == 2 * MAX_BUSY and "late" in begun
