"""The process that grades: `python -m train.graders.worker`. It forks for every request, and the fork reads its request
itself, so that no code of a user runs where another's data was.

Protocol (host.py has the other side): a request is two frames, `<length: 8 bytes><JSON>`: {"loads": names of LOADED,
"waited_for"} for the worker, and the question for its fork. On stdout the fork answers `R` and a frame; when it has
ended, the worker writes `E` and one byte, 0 if all was well.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import struct
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from referencing import Registry
from referencing.exceptions import Unresolvable

from runtime.processes.kernel import die_with_parent
from runtime.processes.oom import DiesAs, dies_as
from train.graders.errors import GradingErrors, GradingFailed, TookTooLong
from train.graders.graders import Grader, Python, TextSimilarity, leaves, parse
from train.graders.grading import Graded, ModelAnswer, grade, requests
from train.graders.sandbox import only_compute, prepare, run_python, why_unusable
from train.graders.templates import Sample

LENGTH = struct.Struct(">Q")
RESULT, END = b"R", b"E"
LOADED = {
    "deepdiff": ("deepdiff",),
    "nltk": ("nltk.translate.bleu_score", "nltk.translate.gleu_score", "nltk.translate.meteor_score"),
    "pandas": ("pandas",),
    "rouge_score": ("rouge_score.rouge_scorer",),
    "scipy": ("scipy.stats", "scipy.spatial.distance"),
    "sklearn": ("sklearn.metrics", "sklearn.feature_extraction.text"),
    "sympy": ("sympy",),
}
"""Packages that take 0.5 to 2 s of CPU to import, by the names that code imports: a worker imports one once, before it
forks for the first grader that needs it, and every later call has it."""
NICENESS = 10
"""Higher than that of the box's work, so that users' code yields to it."""
MEMORY_BYTES = 4 << 30
MOST_TIMEOUTS = 3
"""If this many calls run out of time before any returns, the request makes no more of them: otherwise a job's devices
would wait two minutes for each of its answers."""
_REFUSED_SHOWN = 20
CHECK_CPU_S = 10
CHECK_BYTES = 1 << 30
"""The memory of a check of items: a schema's patterns can take for ever, and its references can go in circles."""


def loads_of(grader: Grader) -> set[str]:
    """The packages of LOADED that the grader needs or may import."""
    each = leaves(grader).values()
    code = [leaf.source for leaf in each if isinstance(leaf, Python)]
    found = {name for name in LOADED if any(name in source for source in code)}
    metrics = {leaf.evaluation_metric for leaf in each if isinstance(leaf, TextSimilarity)}
    return found | ({"nltk"} if metrics & {"bleu", "gleu", "meteor"} else set())


def main() -> None:
    die_with_parent()
    dies_as(DiesAs.TRIAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _preload()
    while True:
        try:
            request = json.loads(_read_frame())
        except EOFError:
            return
        _load(request["loads"])
        pid = os.fork()
        if pid == 0:
            _answer(request["waited_for"])
        _, status = os.waitpid(pid, 0)
        os.write(1, END + bytes([min(255, abs(os.waitstatus_to_exitcode(status)))]))


def _preload() -> None:
    """Import modules that most graders use, so that no fork has to."""
    import random  # noqa: F401
    import re  # noqa: F401
    import statistics  # noqa: F401

    # numpy imports it only on demand, which every fork has: that took half of its time.
    import numpy.random  # noqa: F401
    from rapidfuzz import fuzz  # noqa: F401

    prepare()


def _load(names: Collection[str]) -> None:
    for module in (module for name in names for module in LOADED[name]):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the code that imports it gets the error again
            print(f"{module} cannot be imported: {error!r}", file=sys.stderr)


def _answer(waited_for: bool) -> None:
    """Never returns."""
    status = 1
    try:
        die_with_parent()
        if not waited_for:
            os.nice(NICENESS)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        # A lone surrogate, which JSON and users' code may contain, cannot be sent as text.
        written = json.dumps(answer(json.loads(_read_frame())), ensure_ascii=False).encode(errors="replace")
        _write(RESULT + LENGTH.pack(len(written)) + written)
        status = 0
    finally:
        os._exit(status)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """`{"grader", "samples": [{"sample", "item", "answers"?}]}` -> `{"graded": [...]}`; with `only_requests` for a
    grader that asks models `{"requests": [...]}`, by name for each sample; `{"sources"}` -> `{"unusable": [(path,
    why)]}`; `{"schema", "items", "cpu_s"?}` -> `{"refused": [(place, why)]}`."""
    if "schema" in request:
        import jsonschema  # noqa: F401 - before files are closed to this process

        only_compute(CHECK_BYTES, request.get("cpu_s", CHECK_CPU_S))
        return {"refused": refused_items(request["schema"], request["items"])}
    if "sources" in request:
        found = [(path, why_unusable(source)) for path, source in request["sources"].items()]
        return {"unusable": [(path, why) for path, why in found if why]}
    grader = parse(request["grader"])
    samples = [(Sample(**one["sample"]), one["item"], one.get("answers")) for one in request["samples"]]
    if request.get("only_requests"):
        return {"requests": [requests(grader, sample, item) for sample, item, _ in samples]}
    timeouts, returned = Counter[str](), set[str]()

    def run(source: str, sample: dict[str, Any], item: Any) -> float:
        """Raises GradingFailed."""
        if timeouts[source] >= MOST_TIMEOUTS and source not in returned:
            why = f"it was not run: its first {MOST_TIMEOUTS} calls all ran out of time"
            raise GradingFailed(why, GradingErrors(other_error=True))
        try:
            reward = run_python(source, sample, item)
        except TookTooLong:
            timeouts[source] += 1
            raise
        returned.add(source)
        return reward

    graded = []
    for sample, item, answers in samples:
        model_answers = {name: ModelAnswer(**given) for name, given in (answers or {}).items()}
        graded.append(asdict(grade(grader, sample, item, model_answers, run)))
    return {"graded": graded}


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


def _read_frame() -> bytes:
    (length,) = LENGTH.unpack(_read(LENGTH.size))
    return _read(length)


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
