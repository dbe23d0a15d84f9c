"""Code of a python grader computes, and can do nothing else: each escape is tried for real, in a process confined like
those of the box."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from train.graders import worker
from train.graders.graders import parse
from train.graders.grading import Graded

SECRET = "a secret of the box"


@pytest.fixture(scope="module", autouse=True)
def _confinable() -> None:
    if why := worker.refusal():
        pytest.skip(why)


def ask(head: dict[str, Any], *samples: Any, memory_bytes: int = 2 << 30) -> bytes:
    """The line that a child writes; empty if it ends without one."""
    mine, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        worker.serve(theirs.fileno(), nice=0, memory_bytes=memory_bytes, cpu_s=1)
    theirs.close()
    with mine, mine.makefile("rb") as lines:
        assert int(lines.readline()) == pid
        mine.sendall(b"".join(json.dumps(one).encode() + b"\n" for one in (head, *samples)))
        mine.shutdown(socket.SHUT_WR)
        written = lines.readline(1 << 20)
    os.waitpid(pid, 0)
    return written


def run(source: str, item: object = None) -> Graded:
    grader = {"type": "python", "name": "p", "source": source}
    written = ask(
        {"kind": "grade", "grader": grader}, {"sample": {"output_text": "hello"}, "item": item, "answers": {}}
    )
    (graded,) = TypeAdapter(list[Graded]).validate_json(written)
    return graded


def grade(body: str, item: object = None) -> Graded:
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    return run(f"def grade(sample, item):\n{indented}", item)


def unusable(source: str) -> str:
    return str(json.loads(ask({"kind": "code", "source": source})))


@pytest.mark.parametrize(
    ("body", "reward"),
    [
        ("return len(sample['output_text']) + item['n']", 7),
        ("import re, json, math, statistics, datetime, difflib\nreturn math.sqrt(4)", 2),
        ("import numpy as np\nreturn np.linalg.norm(np.ones((200, 200)) @ np.ones((200, 200)))", 40000),
        ("from rapidfuzz import fuzz\nreturn fuzz.ratio('a', 'a')", 100),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()\nreturn True", 1),
        ("print('x' * 10_000_000)\nreturn 1", 1),
        ("import zoneinfo\nreturn zoneinfo.ZoneInfo('UTC').utcoffset(None).total_seconds()", 0),
    ],
)
def test_it_computes(body: str, reward: float) -> None:
    assert grade(body, {"n": 2}) == Graded(reward, reward > 0.5)


def test_serve_code_may_start_few_threads() -> None:
    threads = int(Path("/proc/loadavg").read_text().rpartition("/")[2].split()[0])
    limit = grade("import resource\nreturn resource.getrlimit(resource.RLIMIT_NPROC)[1]").reward
    assert threads - 1000 < limit < threads + 1000


CLASSES = {
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass A:\n    b: float\n{}return A(1).b",
    "a model in a model": "from pydantic import BaseModel\nclass A(BaseModel):\n    b: float\n"
    "class C(BaseModel):\n    a: A\n{}return C.model_validate({{'a': {{'b': 1}}}}).a.b",
    "one that is pickled": "import pickle\nclass A:\n    b = 1\n{}return pickle.loads(pickle.dumps(A())).b",
}


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_the_code_are_those_of_a_module(name: str) -> None:
    assert run(CLASSES[name].format("def grade(sample, item):\n    ")).reward == 1


ESCAPES = {
    "read a file": "open(item['secret']).read()",
    "write a file": "open(item['folder'] + '/new', 'w')",
    "delete a file": "import os\nos.unlink(item['secret'])",
    "read another's environment": "open(f\"/proc/{item['pid']}/environ\").read()",
    "read another's memory": "open(f\"/proc/{item['pid']}/mem\", 'rb').read(1)",
    "write shared memory": "open('/dev/shm/new', 'w')",
    "memory that no limit counts": "import os\nos.memfd_create('x')",
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', item['port']))",
    "run a program": "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
    "fork": "import os\nos.fork()",
    "signal": "import os\nos.kill(item['pid'], 0)",
    "raise a limit": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "become another user": "import os\nos.setuid(1)",
    "a file of the box's code": f"open({str(Path(worker.__file__).parents[2] / 'pyproject.toml')!r}).read()",
    "own a descriptor's signals": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, item['pid'])",
}


@pytest.mark.parametrize("body", ESCAPES.values(), ids=ESCAPES)
def test_it_does_nothing_else(body: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    item = {"secret": str(tmp_path / "secret"), "folder": str(tmp_path), "pid": os.getpid(), "port": 1}
    graded = grade(body + "\nreturn 1", item)
    assert re.search("Error|gaierror", graded.messages[0]) and graded.errors.python_grader_runtime_error
    assert [path.name for path in tmp_path.iterdir()] == ["secret"] and (tmp_path / "secret").read_text() == SECRET


CALLS = {
    "ptrace": "ptrace(16, item['pid'], 0, 0)",
    "mount": "mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
    "unshare": "unshare(0x10000000)",
    "setns": "setns(0, 0)",
    "bpf": "syscall(321, 0, 0, 0)",
    "io_uring": "syscall(425, 1, 0)",
    "perf_event_open": "syscall(298, 0, 0, -1, -1, 0)",
    "shmget": "shmget(1, 100, 0o1777)",
    "read another's memory": "process_vm_readv(item['pid'], 0, 0, 0, 0, 0)",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls by the numbers of x86_64")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_past_python_are_refused(call: str) -> None:
    body = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfailed = libc.{call} == -1\n"
    body += "return ctypes.get_errno() if failed else -1"
    assert grade(body, {"pid": os.getpid()}).reward == 1  # EPERM


ENDS = {
    "much memory": ("return len(bytearray(3 << 30))", "MemoryError"),
    "no number": ("return 'good'", "returned str; expected a number"),
    "no finite number": ("return float('nan')", "which is not a reward"),
    "an error that hides": ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E: its text"),
    "deep recursion": ("f = lambda n: f(n + 1)\nf(0)", "RecursionError"),
}


@pytest.mark.parametrize(("body", "message"), ENDS.values(), ids=ENDS)
def test_run_python_error_is_reported(body: str, message: str) -> None:
    graded = grade(body)
    assert message in graded.messages[0] and graded.errors.python_grader_runtime_error and graded.reward == 0


@pytest.mark.parametrize(
    "body", ["while True: pass", "import os\nos._exit(0)", "import ctypes\nctypes.string_at(0)"], ids=str.split
)
def test_serve_code_that_ends_its_process_writes_no_result(body: str) -> None:
    grader = {"type": "python", "name": "p", "source": f"def grade(sample, item):\n    {body.replace(chr(10), ';')}"}
    assert not ask({"kind": "grade", "grader": grader}, {"sample": {"output_text": ""}, "item": None, "answers": {}})


def test_an_error_names_its_line_and_an_invalid_source_is_one() -> None:
    assert "ZeroDivisionError: division by zero (line 3)" in grade("x = 1\nreturn x / 0").messages[0]
    assert "SyntaxError" in run("def grade(").messages[0]
    assert "no function `grade" in run("grades = 1").messages[0]


def test_runs_do_not_see_each_other_and_leave_nothing() -> None:
    assert grade("import builtins\nbuiltins.kept = 1\nreturn 1").reward == 1
    assert grade("import builtins\nreturn hasattr(builtins, 'kept')").reward == 0
    assert len({grade("import random\nreturn random.random()").reward for _ in range(3)}) == 3


def test_where_nothing_can_confine_it_no_code_runs_and_all_else_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise OSError("no such call")

    check = {"type": "string_check", "name": "c", "input": "a", "reference": "a", "operation": "eq"}
    for name, replacement in (("missing", lambda: "the kernel offers no Landlock"), ("confine", fails)):
        with monkeypatch.context() as patch:
            patch.setattr(worker, name, replacement)
            assert grade("return 1").errors.python_grader_server_error
            sample = {"sample": {"output_text": ""}, "item": None, "answers": {}}
            (graded,) = json.loads(ask({"kind": "grade", "grader": check}, sample))
            assert graded["reward"] == 1


GRADE = "def grade(sample, item):\n    return 1.0\n"


@pytest.mark.parametrize(
    "source",
    [
        GRADE,
        "def grade(*given): return 1",
        "from operator import itemgetter as grade",
        f"try:\n    import rdkit\nexcept ImportError:\n    rdkit = None\n{GRADE}",
        "def grade(sample, item): return item['answer']",
    ],
)
def test_source_that_can_grade_is_taken(source: str) -> None:
    assert unusable(source) == ""


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def grade(sample, item) return 1", "SyntaxError"),
        (f"import rdkit\n{GRADE}", "ModuleNotFoundError"),
        (f"1 / 0\n{GRADE}", "ZeroDivisionError"),
        ("grade = 1", "the source defines no function"),
        ("def grade(sample): return 1", "`grade` is called as"),
        ("async def grade(sample, item): return 1", "`grade` is a coroutine"),
    ],
)
def test_source_that_cannot_grade_is_refused(source: str, why: str) -> None:
    assert unusable(source).startswith(why)


def test_documented_packages_compute_where_code_runs() -> None:
    """By names as OpenAI's documentation has them, in forks of a process that has loaded none of them."""
    uses = {
        "numpy": "import numpy as np\nx = np.arange(3).sum() == 3",
        "scipy": "from scipy import stats\nx = stats.spearmanr([1, 2, 3], [1, 2, 3]).statistic > 0.99",
        "sympy": "import sympy\nx = sympy.simplify('x + x') == sympy.sympify('2*x')",
        "pandas": "import pandas as pd\nx = pd.DataFrame({'a': [1, 2]}).a.sum() == 3",
        "rapidfuzz": "from rapidfuzz import fuzz\nx = fuzz.ratio('a', 'a') == 100",
        "sklearn": "from sklearn.metrics import f1_score\nx = f1_score([0, 1], [0, 1]) == 1",
        "rouge_score": "from rouge_score import rouge_scorer\n"
        "x = rouge_scorer.RougeScorer(['rougeL'], use_stemmer=True).score('a cat', 'a cat')['rougeL'].fmeasure == 1",
        "deepdiff": "from deepdiff import DeepDiff\nx = not DeepDiff({'a': 1}, {'a': 1})",
        "jsonschema": "import jsonschema\njsonschema.validate({}, {'type': 'object'})\nx = True",
        "pydantic": "from pydantic import BaseModel\nclass A(BaseModel):\n    a: int\nx = A(a='1').a == 1",
        "yaml": "import yaml\nx = yaml.safe_load('a: 1') == {'a': 1}",
        "nltk": "from nltk.translate import bleu_score as b\nx = b.sentence_bleu([list('abcd')], list('abcd')) == 1",
        "sqlparse": "import sqlparse\nx = len(sqlparse.parse('select 1')) == 1",
        "ast_grep_py": "from ast_grep_py import SgRoot\n"
        "x = SgRoot('a = 1', 'python').root().find(pattern='a = $A') is not None",
    }
    assert set(worker.LOADED) <= set(uses)
    for name, code in uses.items():
        source = f"{code}\ndef grade(sample, item):\n    return bool(x)\n"
        grader = parse({"type": "python", "name": "p", "source": source})
        assert worker.loads_of(grader) == [name] * (name in worker.LOADED)
        assert run(source).reward == 1.0, name
