"""Grading in separate processes: fair queue of owners, cleanup, and confinement of Python graders.

Each escape is tried in a process confined like the grader processes of the box."""

import asyncio
import errno
import json
import os
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from train.graders import sandbox
from train.graders.graders import Grader, ModelAnswer, parse
from train.graders.grading import Graded
from train.graders.sandbox import MAX_BUSY, Bounds, ForkBroke, GraderHosts
from train.graders.templates import Sample

SAME = {"type": "string_check", "name": "c", "input": "{{sample.output_text}}", "reference": "{{item}}"}
CHECK = parse(SAME | {"operation": "eq"})
JUDGE = {"type": "score_model", "name": "j", "model": "m", "input": [{"role": "user", "content": "{{item}}"}]}


@pytest.fixture(scope="module", autouse=True)
def _confinable() -> None:
    if why := sandbox.refusal():
        pytest.skip(why)


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


async def test_grade_uses_answers_of_judge_models(hosts: GraderHosts) -> None:
    judge, samples = parse(JUDGE), [(Sample("x"), "one"), (Sample("x"), "two")]
    answers = [{"j": ModelAnswer('{"reason": "", "result": 0.25}', "m", 5, 2)}, {"j": ModelAnswer(error="gone")}]
    found = await hosts.grade("ann", judge, samples, answers)
    assert [one.reward for one in found] == [0.25, 0] and found[0].tokens_by_model == {"m": 7}
    assert found[1].errors.model_grader_server_error_details == "gone"


async def test_grade_restarts_after_worker_death(hosts: GraderHosts) -> None:
    found = await graded(hosts, CHECK, [(Sample("a"), "a"), (Sample("a"), "b"), (Sample("你"), "你")])
    assert [one.reward for one in found] == [1, 0, 1]
    assert hosts._process is not None
    hosts._process.kill()  # not yet reaped: the request fails and is retried
    assert (await graded(hosts, CHECK, [(Sample("a"), "a")]))[0].reward == 1


async def test_grade_timeout_of_one_sample_keeps_other_rewards(
    hosts: GraderHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def results(head: dict[str, Any], rows: list[Any], *_: Any) -> list[Any]:
        if any(row["item"] == "long" for row in rows):
            raise ForkBroke("it took longer than 60 s")
        return [Graded(1.0, True)] * len(rows)

    monkeypatch.setattr(hosts, "_results", results)
    found = await graded(hosts, CHECK, [(Sample(""), item) for item in ("a", "long", "b")])
    assert [one.reward for one in found] == [1, 0, 1] and found[1].errors.other_error


async def test_cancelled_grade_ends_its_processes(hosts: GraderHosts) -> None:
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


@pytest.mark.parametrize(
    "body",
    [
        "import os; os.write(3, b'[' * 15000); os._exit(0)",
        "import os; os.write(3, b'{\"reward\": {}}\\n'); os._exit(0)",
        "import os\n    while True: os.write(3, b'x' * 4096)",
        "import time; time.sleep(60)",
    ],
)
async def test_grade_code_without_result_is_runtime_error(
    hosts: GraderHosts, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "TIME_S", 1)
    (found,) = await graded(hosts, python(body), [(Sample(""), None)])
    assert found.errors.python_grader_runtime_error and found.reward == 0


@pytest.mark.parametrize(
    ("items", "rewards", "n_not_run"),
    [
        # After three deaths the other samples are not run: a step may have thousands.
        (["end"] * 5, [0] * 5, 2),
        # A grader that runs generated code may be killed by an answer.
        (["", *["end"] * 4], [1, 0, 0, 0, 0], 0),
    ],
)
async def test_grade_samples_that_kill_process_have_no_reward(
    hosts: GraderHosts, items: list[str], rewards: list[int], n_not_run: int
) -> None:
    code = python("return 1 if not item else __import__('os')._exit(0)")
    found = await graded(hosts, code, [(Sample(""), item) for item in items])
    assert [one.reward for one in found] == rewards
    assert sum(one.errors.other_error for one in found) == n_not_run


async def test_grader_code_sees_no_paths_of_box(hosts: GraderHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_DATA_DIR", "/srv/box")
    body = "import os\n    return os.readlink('/proc/self/cwd') == '/' and 'APPLIANCE_DATA_DIR' not in os.environ"
    assert (await graded(hosts, python(body), [(Sample(""), None)]))[0].reward == 1


async def test_refused_items_ends_slow_schema_by_cpu_time(hosts: GraderHosts) -> None:
    """The limit is CPU time, so that a busy machine does not reject valid schemas."""
    with pytest.raises(ForkBroke, match="1 s of CPU"):
        await hosts.refused_items("ann", {"pattern": "(a+)+$"}, ["a" * 64 + "b"], Bounds(300, cpu_s=1))
    found = await hosts.refused_items("ann", {"type": "string"}, ["a", 1])
    assert found == [(1, "item: 1 is not of type 'string'")]


async def test_slow_owner_does_not_block_other_owners(hosts: GraderHosts, monkeypatch: pytest.MonkeyPatch) -> None:
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
        # All requests of one owner together use one slot; checks have separate slots.
        assert sorted(begun) == ["greedy", *(f"owner {number}" for number in range(MAX_BUSY - 1))]
        assert await hosts.unusable("greedy", {"source": ""}) == [] and begun[-1] == "checked"
        end.set()
        await asyncio.gather(*tasks)
    assert begun.count("greedy") == 2 * MAX_BUSY and "late" in begun


# --- in a child process

SECRET = "a secret of the box"
INDENT = "\n    "


def ask(head: dict[str, Any], *rows: Any, cpu_s: int = 1) -> list[bytes]:
    """The output lines of a child."""
    mine, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        sandbox.serve(theirs.fileno(), nice=0, memory_bytes=2 << 30, cpu_s=cpu_s)
    theirs.close()
    with mine, mine.makefile("rb") as lines:
        assert int(lines.readline()) == pid
        mine.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in (head, *rows)))
        mine.shutdown(socket.SHUT_WR)
        written = lines.read().splitlines()
    os.waitpid(pid, 0)
    return written


def run(source: str, *items: object, cpu_s: int = 1) -> list[Graded]:
    rows = [{"sample": {"output_text": "hello"}, "item": item, "answers": {}} for item in items or [None]]
    grader = {"type": "python", "name": "p", "source": source}
    written = ask({"kind": "grade", "grader": grader}, *rows, cpu_s=cpu_s)
    return [TypeAdapter(Graded).validate_json(line) for line in written]


def grade(body: str, item: object = None) -> Graded:
    (graded,) = run(f"def grade(sample, item):{INDENT}{body.replace(chr(10), INDENT)}", item)
    return graded


MODULE = """
import re, json, math, statistics, datetime, difflib, threading, zoneinfo, pickle
from dataclasses import dataclass
import numpy as np
from pydantic import BaseModel
from rapidfuzz import fuzz

@dataclass
class Kept:
    b: float

class Inner(BaseModel):
    a: float

class Outer(BaseModel):
    inner: Inner

def grade(sample, item):
    assert np.linalg.norm(np.ones((200, 200)) @ np.ones((200, 200))) == 40000
    assert fuzz.ratio("a", "a") == 100 and zoneinfo.ZoneInfo("UTC").utcoffset(None).total_seconds() == 0
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    print("x" * 10_000_000)
    assert pickle.loads(pickle.dumps(Kept(1))).b == 1 and Outer.model_validate({"inner": {"a": 1}}).inner.a == 1
    return np.float64(len(sample["output_text"]) + item["n"])
"""


def test_grade_code_may_use_module_level_names() -> None:
    assert run(MODULE, {"n": 2}, {"n": 3}) == [Graded(7, True), Graded(8, True)]


ESCAPES = {
    "read a file": "open(item['secret']).read()",
    "write a file": "open(item['folder'] + '/new', 'w')",
    "delete a file": "import os; os.unlink(item['secret'])",
    "read another's environment": "open(f\"/proc/{item['pid']}/environ\").read()",
    "read another's memory": "open(f\"/proc/{item['pid']}/mem\", 'rb').read(1)",
    "write shared memory": "open('/dev/shm/new', 'w')",
    "memory that no limit counts": "import os; os.memfd_create('x')",
    "connect": "import socket; socket.create_connection(('127.0.0.1', item['port']))",
    "run a program": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "fork": "import os; os.fork()",
    "signal": "import os; os.kill(item['pid'], 0)",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "become another user": "import os; os.setuid(1)",
    "a file of the box's code": f"open({str(Path(sandbox.__file__).parents[2] / 'pyproject.toml')!r}).read()",
    "own a descriptor's signals": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, item['pid'])",
}
EACH_IN_TURN = """
def grade(sample, item):
    exec(item["code"])
    return -1
"""


def test_grade_code_cannot_escape_sandbox(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    around = {"secret": str(tmp_path / "secret"), "folder": str(tmp_path), "pid": os.getpid(), "port": 1}
    found = run(EACH_IN_TURN, *({"code": code, **around} for code in ESCAPES.values()))
    for name, graded in zip(ESCAPES, found, strict=True):
        assert graded.errors.python_grader_runtime_error, name
        assert re.search("Error|gaierror", graded.messages[0]), name
    assert [path.name for path in tmp_path.iterdir()] == ["secret"] and (tmp_path / "secret").read_text() == SECRET


CALLS = {
    "ptrace": "ptrace(16, item, 0, 0)",
    "mount": "mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
    "unshare": "unshare(0x10000000)",
    "setns": "setns(0, 0)",
    "bpf": "syscall(321, 0, 0, 0)",
    "io_uring": "syscall(425, 1, 0)",
    "perf_event_open": "syscall(298, 0, 0, -1, -1, 0)",
    "shmget": "shmget(1, 100, 0o1777)",
    "process_vm_readv": "process_vm_readv(item, 0, 0, 0, 0, 0)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls by the numbers of x86_64")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_grade_direct_system_call_is_refused(call: str) -> None:
    body = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfailed = libc.{call} == -1"
    assert grade(f"{body}\nreturn ctypes.get_errno() if failed else -1", os.getpid()).reward == errno.EPERM


def test_grade_may_start_few_threads() -> None:
    threads = int(Path("/proc/loadavg").read_text().rpartition("/")[2].split()[0])
    limit = grade("import resource\nreturn resource.getrlimit(resource.RLIMIT_NPROC)[1]").reward
    assert threads - 1000 < limit < threads + 1000


ENDS = {
    "return len(bytearray(3 << 30))": "MemoryError",
    "return 'good'": "returned str; expected a number",
    "return float('nan')": "which is not a reward",
    "class E(Exception):\n    def __str__(self): raise self\nraise E": "E: <exception str() failed>",
    "f = lambda n: f(n + 1)\nf(0)": "RecursionError",
    "x = 1\nreturn x / 0": "ZeroDivisionError: division by zero (line 3)",
}


@pytest.mark.parametrize(("body", "message"), ENDS.items())
def test_grade_error_is_reported(body: str, message: str) -> None:
    graded = grade(body)
    assert message in graded.messages[0] and graded.errors.python_grader_runtime_error and graded.reward == 0


@pytest.mark.parametrize("body", ["while True: pass", "import os; os._exit(0)", "import ctypes; ctypes.string_at(0)"])
def test_serve_writes_no_result_if_code_ends_process(body: str) -> None:
    assert run(f"def grade(sample, item):{INDENT}{body}") == []


def test_grade_children_do_not_see_each_other() -> None:
    assert grade("import builtins\nbuiltins.kept = 1\nreturn 1").reward == 1
    assert grade("import builtins\nreturn hasattr(builtins, 'kept')").reward == 0
    assert len({one.reward for one in run("import random\ndef grade(*_): return random.random()", 1, 2, 3)}) == 3


def test_grade_without_confinement_runs_only_other_graders(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no such call")

    check = {"type": "string_check", "name": "c", "input": "a", "reference": "a", "operation": "eq"}
    monkeypatch.setattr(sandbox, "confine", fails)
    assert grade("return 1").errors.python_grader_server_error
    (written,) = ask({"kind": "grade", "grader": check}, {"sample": {"output_text": ""}, "item": None, "answers": {}})
    assert json.loads(written)["reward"] == 1


GRADE = "def grade(sample, item):\n    return 1.0\n"
SOURCES = {
    GRADE: "",
    "def grade(*given): return 1": "",
    "from operator import itemgetter as grade": "",
    f"try:\n    import rdkit\nexcept ImportError:\n    rdkit = None\n{GRADE}": "",
    "def grade(sample, item): return item['answer']": "",
    "def grade(sample, item) return 1": "SyntaxError",
    f"import rdkit\n{GRADE}": "ModuleNotFoundError",
    f"1 / 0\n{GRADE}": "ZeroDivisionError",
    "grade = 1": "the source defines no function",
    "def grade(sample): return 1": "`grade` is called as",
    "async def grade(sample, item): return 1": "`grade` is a coroutine",
}


def test_why_unusable_names_error_in_source() -> None:
    found = [json.loads(line) for line in ask({"kind": "code"}, *SOURCES)]
    for (source, why), reason in zip(SOURCES.items(), found, strict=True):
        assert bool(reason) == bool(why) and reason.startswith(why), source


def test_grade_documented_packages_compute() -> None:
    """Packages named in OpenAI's documentation, in a fork of a process that has imported none of them."""
    uses = {
        "numpy": "x.arange(3).sum() == 3",
        "scipy.stats": "x.spearmanr([1, 2, 3], [1, 2, 3]).statistic > 0.99",
        "sympy": "x.simplify('x + x') == x.sympify('2*x')",
        "pandas": "x.DataFrame({'a': [1, 2]}).a.sum() == 3",
        "sklearn.metrics": "x.f1_score([0, 1], [0, 1]) == 1",
        "rouge_score.rouge_scorer": "x.RougeScorer(['rougeL'], True).score('a cat', 'a cat')['rougeL'].fmeasure == 1",
        "deepdiff": "not x.DeepDiff({'a': 1}, {'a': 1})",
        "jsonschema": "x.validate({}, {'type': 'object'}) is None",
        "yaml": "x.safe_load('a: 1') == {'a': 1}",
        "nltk.translate.bleu_score": "x.sentence_bleu([list('abcd')], list('abcd')) == 1",
        "sqlparse": "len(x.parse('select 1')) == 1",
        "ast_grep_py": "x.SgRoot('a = 1', 'python').root().find(pattern='a = $A') is not None",
    }
    loaded = {modules[0] for word, modules in sandbox.LOADED.items() if word not in ("gleu", "meteor")}
    assert loaded <= uses.keys()
    source = (
        "from importlib import import_module\n"
        "def grade(sample, item): return bool(eval(item[1], {'x': import_module(item[0])}))"
    )
    found = run(source, *uses.items(), cpu_s=60)
    assert [name for name, one in zip(uses, found, strict=True) if one.reward != 1] == []


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_refused_items_never_opens_external_reference(tmp_path: Path, keyword: str) -> None:
    (tmp_path / "secret.json").write_text(json.dumps({"const": "secret"}))
    for reference in (f"file://{tmp_path}/secret.json", "secret.json", "https://json-schema.org/nosuch"):
        ((of_schema, why),) = sandbox.refused_items({"$id": "http://a/b", keyword: reference}, [{"a": 1}])
        assert of_schema and "leads nowhere" in why and "'secret'" not in why


def test_refused_items_follows_internal_reference() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    found = list(sandbox.refused_items(schema, [{"a": 1}, {"a": "x"}]))
    assert found == [(False, ""), (False, "item.a: 'x' is not of type 'integer'")]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself without end"),
        ({"pattern": "(("}, "is not a 'regex'"),
        ({"type": "object", "properties": {"a": {"required": True}}}, "at properties.a.required"),
    ],
)
def test_refused_items_names_faulty_schema(schema: dict[str, Any], why: str) -> None:
    ((of_schema, reason),) = sandbox.refused_items(schema, ["a"])
    assert of_schema and why in reason
