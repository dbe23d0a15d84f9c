"""Code of a python grader computes, and can do nothing else: each escape is tried for real, in a process confined like
those of the box."""

import errno
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from train.graders import worker
from train.graders.grading import Graded

SECRET = "a secret of the box"
INDENT = "\n    "


@pytest.fixture(scope="module", autouse=True)
def _confinable() -> None:
    if why := worker.refusal():
        pytest.skip(why)


def ask(head: dict[str, Any], *rows: Any, cpu_s: int = 1) -> list[bytes]:
    """The lines that a child writes."""
    mine, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        worker.serve(theirs.fileno(), nice=0, memory_bytes=2 << 30, cpu_s=cpu_s)
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


def test_grade_computes_with_what_a_module_has() -> None:
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
    "a file of the box's code": f"open({str(Path(worker.__file__).parents[2] / 'pyproject.toml')!r}).read()",
    "own a descriptor's signals": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, item['pid'])",
}
EACH_IN_TURN = """
def grade(sample, item):
    exec(item["code"])
    return -1
"""


def test_grade_does_nothing_but_compute(tmp_path: Path) -> None:
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
def test_grade_system_call_past_python_is_refused(call: str) -> None:
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
def test_serve_code_that_ends_its_process_writes_no_result(body: str) -> None:
    assert run(f"def grade(sample, item):{INDENT}{body}") == []


def test_grade_children_do_not_see_each_other() -> None:
    assert grade("import builtins\nbuiltins.kept = 1\nreturn 1").reward == 1
    assert grade("import builtins\nreturn hasattr(builtins, 'kept')").reward == 0
    assert len({one.reward for one in run("import random\ndef grade(*_): return random.random()", 1, 2, 3)}) == 3


def test_grade_without_confinement_runs_no_code_and_grades_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no such call")

    check = {"type": "string_check", "name": "c", "input": "a", "reference": "a", "operation": "eq"}
    monkeypatch.setattr(worker, "confine", fails)
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


def test_why_unusable_names_what_is_wrong_with_a_source() -> None:
    found = [json.loads(line) for line in ask({"kind": "code"}, *SOURCES)]
    for (source, why), reason in zip(SOURCES.items(), found, strict=True):
        assert bool(reason) == bool(why) and reason.startswith(why), source


def test_grade_documented_packages_compute() -> None:
    """By names as OpenAI's documentation has them, in a fork of a process that has loaded none of them."""
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
    loaded = {modules[0] for word, modules in worker.LOADED.items() if word not in ("gleu", "meteor")}
    assert loaded <= uses.keys()
    source = (
        "from importlib import import_module\n"
        "def grade(sample, item): return bool(eval(item[1], {'x': import_module(item[0])}))"
    )
    found = run(source, *uses.items(), cpu_s=60)
    assert [name for name, one in zip(uses, found, strict=True) if one.reward != 1] == []


@pytest.mark.parametrize("keyword", ["$ref", "$dynamicRef"])
def test_refused_items_reference_outside_the_schema_is_not_opened(tmp_path: Path, keyword: str) -> None:
    (tmp_path / "secret.json").write_text(json.dumps({"const": "secret"}))
    for reference in (f"file://{tmp_path}/secret.json", "secret.json", "https://json-schema.org/nosuch"):
        ((of_schema, why),) = worker.refused_items({"$id": "http://a/b", keyword: reference}, [{"a": 1}])
        assert of_schema and "leads nowhere" in why and "'secret'" not in why


def test_refused_items_takes_a_reference_within_the_schema() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    found = list(worker.refused_items(schema, [{"a": 1}, {"a": "x"}]))
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
def test_refused_items_faulty_schema_is_named(schema: dict[str, Any], why: str) -> None:
    ((of_schema, reason),) = worker.refused_items(schema, ["a"])
    assert of_schema and why in reason
