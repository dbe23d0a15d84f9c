"""Grading in a worker process: several samples, none in another's way, and nothing left."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from train.graders import host as host_module
from train.graders import sandbox, worker
from train.graders.errors import GradingErrors, TookTooLong
from train.graders.graders import parse
from train.graders.grading import ModelAnswer
from train.graders.host import ForkBroke, GraderHost, WorkerBroke
from train.graders.templates import Sample


@pytest.fixture
async def host() -> AsyncIterator[GraderHost]:
    made = GraderHost()
    yield made
    await made.stop()
    assert made._process is None


def python(body: str):
    return parse({"type": "python", "name": "p", "source": f"def grade(sample, item):\n    {body}"})


async def test_samples_are_graded_in_order(host: GraderHost) -> None:
    check = parse(
        {
            "type": "string_check",
            "name": "c",
            "input": "{{sample.output_text}}",
            "reference": "{{item}}",
            "operation": "eq",
        }
    )
    found = await host.grade(check, [(Sample("a"), "a"), (Sample("a"), "b"), (Sample("你"), "你")])
    assert [one.reward for one in found] == [1, 0, 1]
    if not sandbox.refusal():
        found = await host.grade(python("return item"), [(Sample(""), number) for number in range(5)])
        assert [one.reward for one in found] == [0, 1, 2, 3, 4]


async def test_what_takes_long_to_import_is_imported_once_and_before_the_fork(host: GraderHost) -> None:
    if why := sandbox.refusal():
        pytest.skip(why)
    source = "import sys\nthere = 'sympy' in sys.modules\nimport sympy\ndef grade(sample, item):\n    return there"
    for _ in range(2):
        found = await host.grade(parse({"type": "python", "name": "p", "source": source}), [(Sample(""), None)])
        assert [one.reward for one in found] == [1]
    others = "import sys\ndef grade(sample, item):\n    return not sys.modules.keys() & {'skl' + 'earn', 'pan' + 'das'}"
    found = await host.grade(parse({"type": "python", "name": "p", "source": others}), [(Sample(""), None)])
    assert [one.reward for one in found] == [1]


async def test_models_are_asked_and_answer(host: GraderHost) -> None:
    judge = parse(
        {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "{{item}}"}]}
    )
    asked = await host.requests(judge, [(Sample("x"), "one"), (Sample("x"), "two")])
    assert [one["j"]["messages"][0]["content"] for one in asked] == ["one", "two"]
    answers = [{"j": ModelAnswer('{"reason": "", "result": 0.25}', "m", 5, 2)}, {"j": ModelAnswer(error="gone")}]
    found = await host.grade(judge, [(Sample("x"), "one"), (Sample("x"), "two")], answers)
    assert [one.reward for one in found] == [0.25, 0] and found[0].tokens_by_model == {"m": 7}
    assert found[1].errors.model_grader_server_error_details == "gone"


async def test_a_worker_that_dies_takes_no_sample_with_it(host: GraderHost) -> None:
    check = parse({"type": "string_check", "name": "c", "input": "a", "reference": "a", "operation": "eq"})
    assert (await host.grade(check, [(Sample(""), None)]))[0].reward == 1
    assert host._process is not None
    host._process.kill()
    found = await host.grade(check, [(Sample(""), None), (Sample(""), None)])
    assert [one.reward for one in found] == [1, 1]


async def test_whether_what_was_asked_or_the_worker_itself_broke_is_told(
    host: GraderHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = "import os; from train.graders import worker; worker.answer = lambda *_: os._exit(7); worker.main()"
    for begin, kind in ((ends, ForkBroke), ("raise SystemExit", WorkerBroke)):
        monkeypatch.setattr(host_module, "_BEGIN", begin)
        with pytest.raises(WorkerBroke) as caught:
            await host.unusable({"source": "def grade(sample, item): return 1"})
        assert type(caught.value) is kind


def test_a_package_that_cannot_be_imported_ends_no_worker(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises: the code that imports it says so."""
    (tmp_path / "package_that_breaks.py").write_text("raise AttributeError('of another release')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(worker.LOADED, "broken", ("package_that_breaks",))
    worker._load(["broken"])


async def test_a_request_given_up_does_not_answer_the_next(host: GraderHost) -> None:
    if why := sandbox.refusal():
        pytest.skip(why)
    slow = asyncio.create_task(host.grade(python("import time; time.sleep(60)"), [(Sample(""), None)]))
    while host._process is None:
        await asyncio.sleep(0.01)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    assert (await host.grade(python("return 3"), [(Sample(""), None)]))[0].reward == 3


@pytest.mark.parametrize("waited_for", [False, True])
async def test_what_a_step_waits_for_has_its_priority(
    host: GraderHost, monkeypatch: pytest.MonkeyPatch, waited_for: bool
) -> None:
    """At a lower one, grading was most of a step wherever other processes took the processors."""
    if why := sandbox.refusal():
        pytest.skip(why)
    await host.grade(python("return 1"), [(Sample(""), None)])
    assert host._process is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, host._process.pid) == own
    going = asyncio.create_task(host.grade(python("while True: pass"), [(Sample(""), None)], waited_for=waited_for))
    fork = await _child_of(host._process.pid)
    asked_for = own + (0 if waited_for else worker.NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, await _child_of(fork)) == min(asked_for, 19)  # what Linux has at most
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going


async def _child_of(pid: int) -> int:
    while not (found := psutil.Process(pid).children()):
        await asyncio.sleep(0.01)
    return found[0].pid


@pytest.mark.parametrize(
    ("loops", "run", "rewards"),
    [
        # Devices waited two minutes for each of a step's answers, and a step may have thousands.
        ("abcde", 3, [0] * 5),
        ("abce", 3, [0] * 5),
        # A grader that runs what the model wrote meets answers that loop.
        ("bcde", 5, [1, 0, 0, 0, 0]),
    ],
    ids=["always", "until then", "some answers"],
)
def test_code_that_never_ends_is_not_run_for_every_answer(
    monkeypatch: pytest.MonkeyPatch, loops: str, run: int, rewards: list[int]
) -> None:
    """loops: the answers of which it never ends."""

    def run_python(source: str, sample: dict[str, Any], item: Any, **_: Any) -> float:
        if sample["output_text"] in loops:
            raise TookTooLong("it took too long", GradingErrors(python_grader_runtime_error=True))
        return 1.0

    monkeypatch.setattr(worker, "run_python", run_python)
    samples = [{"sample": {"output_text": text}, "item": None} for text in "abcde"]
    source = "def grade(sample, item): return 1"
    told = worker.answer({"grader": {"type": "python", "name": "p", "source": source}, "samples": samples})["graded"]
    assert [one["reward"] for one in told] == rewards
    messages = ["; ".join(one["messages"]) for one in told]
    assert sum("it took too long" in text for text in messages) == run - sum(rewards)
    assert sum("not run: its first 3 calls all ran out of time" in text for text in messages) == len(told) - run


async def test_code_is_told_nothing_of_where_the_box_is(host: GraderHost, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := sandbox.refusal():
        pytest.skip(why)
    monkeypatch.setenv("APPLIANCE_DATA_DIR", "/srv/box")
    body = "import os\n    return os.readlink('/proc/self/cwd') == '/' and 'APPLIANCE_DATA_DIR' not in os.environ"
    assert (await host.grade(python(body), [(Sample(""), None)]))[0].reward == 1


async def test_half_a_sign_is_no_text_that_is_told(host: GraderHost) -> None:
    """JSON and users' code may hold it; nobody could be answered it, nor a model be asked it."""
    judge = parse(
        {
            "type": "score_model",
            "name": "j",
            "model": "m",
            "input": [{"role": "user", "content": "{{ sample.output_json.a }}é你"}],
        }
    )
    (asked,) = await host.requests(judge, [(Sample('{"a": "\\ud800"}'), None)])
    assert asked["j"]["messages"][0]["content"] == "?é你"
    if not sandbox.refusal():
        (found,) = await host.grade(python("raise ValueError('\\ud800')"), [(Sample(""), None)])
        assert found.messages == ["p: ValueError: ? (line 2)"]


async def test_long_questions_and_answers_are_not_read_on_the_loop(host: GraderHost, monkeypatch) -> None:
    read_on: list[int] = []
    loads, dumps = host_module.json.loads, host_module._written

    def noted(read: Any) -> Any:
        return lambda *given, **more: read_on.append(threading.get_ident()) or read(*given, **more)

    monkeypatch.setattr(host_module.json, "loads", noted(loads))
    monkeypatch.setattr(host_module, "_written", noted(dumps))
    texts = {"input": "{{sample.output_text}}", "reference": "a", "operation": "eq"}
    graded = await host.grade(parse({"type": "string_check", "name": "c", **texts}), [(Sample("a"), {})])
    assert [one.reward for one in graded] == [1.0]
    assert len(read_on) == 2 and threading.get_ident() not in read_on
