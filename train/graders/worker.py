"""The process that grades: `python -m train.graders.worker`. It forks for every request, and the fork reads its request
itself, so that no code of a user runs where another's data was.

Protocol (host.py has the other side): `L` and one byte on stdin have it import what that place of `LOADED` names; one
byte asks for a fork, `F` for a request that yields to the box's
work, `W` for one that work of the box waits for; the fork reads `<length: 8 bytes><JSON>`; on stdout it answers
`R<length: 8 bytes><JSON>`, and when it has ended the worker writes `E` and one byte, 0 if all was well.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import struct
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable

from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as
from train.graders import similarity
from train.graders.code import LOADED, why_refused
from train.graders.errors import GradingErrors, GradingFailed, TookTooLong
from train.graders.graders import parse
from train.graders.grading import Graded, ModelAnswer, RunPython, grade, requests
from train.graders.sandbox import NICENESS, only_compute, prepare, run_python
from train.graders.templates import Sample

LENGTH = struct.Struct(">Q")
FORK, WAITED_FOR, LOAD, RESULT, END = b"F", b"W", b"L", b"R", b"E"
MEMORY_BYTES = 4 << 30
WAITED_FOR_CPU_S = 2.0
"""Processor time for which a request that work of the box waits for has the priority of that work: at a lower one,
sixteen calls of 9 ms took 5 to 17 s where other processes took both processors, most of a step of training."""
LOOPS = 3
"""If this many calls of the same code run out of time before any call ends, a request runs it no more: otherwise a
job's devices waited two minutes for each of its answers, which is hours for a grader that never ends."""
_REFUSED_SHOWN = 20
CHECK_CPU_S = 10
CHECK_BYTES = 1 << 30
"""The memory of a check of items: a schema's patterns can take for ever, and its references can go in circles."""


def main() -> None:
    die_with_parent()
    dies_as(DiesAs.TRIAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _preload()
    while (byte := os.read(0, 1)) in (FORK, WAITED_FOR, LOAD):
        if byte == LOAD:
            _load(list(LOADED)[_read(1)[0]])
            continue
        pid = os.fork()
        if pid == 0:
            _answer(byte == WAITED_FOR)
        _, status = os.waitpid(pid, 0)
        os.write(1, END + bytes([min(255, abs(os.waitstatus_to_exitcode(status)))]))


def _preload() -> None:
    """What graders use, so that a fork need not import it."""
    import random  # noqa: F401
    import re  # noqa: F401
    import statistics  # noqa: F401

    # nltk imports these if they are installed, for parts that no metric uses: a worker then took 2 s longer to start
    # and 100 MB more. Users' code that names them gets them, see LOADED.
    left_out = [name for name in ("pandas", "scipy", "sklearn") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(left_out))  # type: ignore[arg-type]

    # numpy imports it only when somebody asks for it, which every fork does: that took half of its time.
    import numpy.random  # noqa: F401

    prepare()
    for metric in similarity.METRICS:
        similarity.similarity(metric, "a b c d e f", "a b c d e f")
    for name in left_out:
        del sys.modules[name]


def _load(name: str) -> None:
    for module in LOADED[name]:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - whoever imports it has it anew
            print(f"{module} cannot be imported: {error!r}", file=sys.stderr)


def _answer(waited_for: bool) -> None:
    """Never returns."""
    status = 1
    try:
        die_with_parent()
        if not waited_for:  # only whoever has a higher priority can have a lower one
            os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        (length,) = LENGTH.unpack(_read(LENGTH.size))
        request = json.loads(_read(length))
        # A lone surrogate, which JSON and users' code may contain, cannot be sent as text.
        written = json.dumps(answer(request, waited_for), ensure_ascii=False).encode(errors="replace")
        _write(RESULT + LENGTH.pack(len(written)) + written)
        status = 0
    finally:
        os._exit(status)


def unusable(sources: dict[str, str]) -> list[tuple[str, str]]:
    """(path, why) of the code that cannot grade."""
    return [(path, why) for path, source in sources.items() if (why := why_refused(source))]


def answer(request: dict[str, Any], waited_for: bool = False) -> dict[str, Any]:
    """`{"grader", "samples": [{"sample", "item", "answers"?}]}` -> `{"graded": [...]}`; without `answers` for a grader
    that asks models `{"requests": [...]}`, by name for each sample. waited_for: this process has the priority of what
    waits for it, and gives it up after WAITED_FOR_CPU_S."""
    if "schema" in request:
        import jsonschema  # noqa: F401 - before files are closed to this process

        only_compute(CHECK_BYTES, request.get("cpu_s", CHECK_CPU_S))
        return {"refused": refused_items(request["schema"], request["items"])}
    if "sources" in request:
        only_compute(CHECK_BYTES, CHECK_CPU_S)
        return {"unusable": unusable(request["sources"])}
    grader = parse(request["grader"])
    samples = [(Sample(**one["sample"]), one["item"], one.get("answers")) for one in request["samples"]]
    if request.get("only_requests"):
        return {"requests": [requests(grader, sample, item) for sample, item, _ in samples]}
    graded, calls = [], Calls()
    for sample, item, answers in samples:
        model_answers = {name: ModelAnswer(**given) for name, given in (answers or {}).items()}
        run = run_python
        if waited_for and (left_s := WAITED_FOR_CPU_S - _cpu_s()) > 0:
            run = partial(run_python, yields_after_s=left_s)
        elif waited_for:
            os.nice(NICENESS)
            waited_for = False
        graded.append(asdict(grade(grader, sample, item, model_answers, partial(calls.run, run))))
    return {"graded": graded}


class Calls:
    """Those of one request."""

    def __init__(self) -> None:
        self._too_long, self._others = Counter[str](), Counter[str]()

    def run(self, run: RunPython, source: str, sample: dict[str, Any], item: Any) -> float:
        """Raises GradingFailed."""
        if self._too_long[source] >= LOOPS and not self._others[source]:
            raise GradingFailed(
                f"it was not run: its first {LOOPS} calls all ran out of time", GradingErrors(other_error=True)
            )
        try:
            reward = run(source, sample, item)
        except TookTooLong:
            self._too_long[source] += 1
            raise
        except GradingFailed:
            self._others[source] += 1
            raise
        self._others[source] += 1
        return reward


def _cpu_s() -> float:
    """Processor time of this process and of those of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def refused_items(schema: Any, items: list[Any]) -> list[tuple[int, str]]:
    """(place, why) of the first few items that do not follow a JSON schema; place -1: it is not a schema."""
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        # Without a registry it opens whatever `$ref` names: files of the box, and addresses that only the box can
        # reach.
        validator = jsonschema.Draft202012Validator(schema, registry=Registry())
        return _refused(validator, items)
    except jsonschema.SchemaError as error:
        place = ".".join(map(str, error.absolute_path))[:200]
        return [(-1, f"it is no JSON schema{' at ' + place if place else ''}: {error.message[:500]}")]
    except RecursionError:
        return [(-1, "the schema refers to itself without end, or it or an item is nested too deep")]
    except Unresolvable as error:
        return [(-1, f"the reference {error.ref[:200]!r} leads nowhere; one may only lead to a place in the schema")]


def _refused(validator: Any, items: list[Any]) -> list[tuple[int, str]]:
    refused = []
    for place, item in enumerate(items):
        error = next(validator.iter_errors(item), None)
        if error is not None:
            where = "".join(f".{step}" for step in error.absolute_path)
            refused.append((place, f"item{where}: {error.message[:500]}"))
            if len(refused) == _REFUSED_SHOWN:
                break
    return refused


def graded_of(fields: dict[str, Any]) -> Graded:
    """The other way round, in the host."""
    return Graded(**{**fields, "errors": GradingErrors(**fields["errors"])})


def _read(length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        more = os.read(0, min(length - len(found), 1 << 20))
        if not more:
            raise EOFError("the host has gone")
        found += more
    return bytes(found)


def _write(left: bytes) -> None:
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    main()
