"""The process that grades, started by hosts.py, which sends it one end of a socket for each request.

It forks a child for each request, so that it never holds an owner's data. The child writes its pid, by which the
client ends it; confines itself to computing (runtime/processes/confinement.py); reads the request, lines of JSON:
{"kind", ...}, then one for each row; and writes the result of each row as a line of JSON.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import resource
import signal
import site
import socket
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from runtime.processes.confinement import confine, missing
from runtime.processes.confinement import prepare as prepare_confinement
from runtime.processes.kernel import DiesAs, die_with_parent, dies_as
from train.graders.errors import GradingErrors, GradingFailed
from train.graders.graders import ModelAnswer, parse
from train.graders.grading import grade
from train.graders.templates import Sample

LOADED = {
    "bleu": ("nltk.translate.bleu_score",),
    "gleu": ("nltk.translate.gleu_score",),
    "meteor": ("nltk.translate.meteor_score",),
    "deepdiff": ("deepdiff",),
    "jsonschema": ("jsonschema",),
    "pandas": ("pandas",),
    "rouge_score": ("rouge_score.rouge_scorer",),
    "scipy": ("scipy.stats", "scipy.spatial.distance"),
    "sklearn": ("sklearn.metrics", "sklearn.feature_extraction.text"),
    "sympy": ("sympy",),
}
"""Modules that take 0.1 to 2 s of CPU to import, by the words of a request that may need them: imported before the
first fork for such a request, for all later ones."""
_DETAIL_CHARACTERS = 2000
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null")


def refusal() -> str:
    """Why no code runs on this machine, in words; empty if it does."""
    lack = missing()
    return f"python graders do not run on this machine: {lack}. Nothing else can confine them here" if lack else ""


def main() -> None:
    die_with_parent()
    dies_as(DiesAs.TRIAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    # What most graders use, and what a child needs to confine itself: no fork has to make it. numpy imports its random
    # numbers only on demand, which took half of a fork's time.
    import numpy.random  # noqa: F401
    from rapidfuzz import fuzz  # noqa: F401

    prepare_confinement()
    _readable()
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not descriptors:
            return
        bounds = json.loads(message)
        _load(bounds.pop("loads"))
        if os.fork() == 0:
            serve(descriptors[0], **bounds)
        os.close(descriptors[0])


def _load(names: Iterable[str]) -> None:
    for module in (module for name in names for module in LOADED[name]):
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - the code that imports it gets the error again
            print(f"{module} cannot be imported: {error!r}", file=sys.stderr)


def serve(client: int, nice: int, memory_bytes: int, cpu_s: int) -> NoReturn:
    """Answer the request that comes through the socket `client`, and end this process, a fork."""
    try:
        die_with_parent()
        os.nice(nice)
        os.dup2(client, 3)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode, closefd=False) for number, mode in enumerate("rww"))
        os.closerange(4, 1 << 16)  # nothing of the worker's
        with open(3, "wb", closefd=False) as out, open(3, "rb", closefd=False) as lines:
            out.write(b"%d\n" % os.getpid())
            out.flush()
            unconfined = _confine(memory_bytes, cpu_s)
            for result in results(json.loads(next(lines)), map(json.loads, lines), unconfined):
                text = json.dumps(result, default=asdict, ensure_ascii=False)
                # A lone surrogate, which JSON and users' code may contain, cannot be sent as text.
                out.write(text.encode(errors="replace") + b"\n")
                out.flush()
    finally:
        os._exit(0)


def _confine(memory_bytes: int, cpu_s: int) -> str:
    """Confine this process; return why it could not, "" if it did. Its limits hold in any case."""
    try:
        confine(_readable(), memory_bytes, cpu_s)
        return ""
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        return f"python graders cannot be confined here: {error.strerror or error}"


@cache
def _readable() -> tuple[Path, ...]:
    """Python's own files and its packages, and shared libraries."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return tuple(Path(path) for path in (*sorted(paths), *site.getsitepackages(), *_LIBRARIES))


def results(request: dict[str, Any], rows: Iterable[Any], unconfined: str) -> Iterator[Any]:
    """The result of each row of a request, by its "kind". unconfined: why no code may run here, "" if it may.

    grade: {"sample", "item", "answers"} by "grader" -> Graded.
    code: a source -> why it cannot grade, "" if it can.
    jsonschema: an item by "schema" -> refused_items.
    """
    match request["kind"]:
        case "jsonschema":
            yield from refused_items(request["schema"], rows)
        case "code":
            yield from (unconfined or why_unusable(source) for source in rows)
        case _:
            grader, run = parse(request["grader"]), partial(run_python, unconfined)
            for row in rows:
                answers = {name: ModelAnswer(**of) for name, of in row["answers"].items()}
                yield grade(grader, Sample(**row["sample"]), row["item"], answers, run)


def refused_items(schema: Any, items: Iterable[Any]) -> Iterator[tuple[bool, str]]:
    """(whether the schema itself is at fault, why the item does not follow it, "" if it does) of each item.

    Its patterns can take for ever and its references go in circles: only a child does this."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    fault = ""
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path))[:200]
        fault = f"it is not a JSON schema{' at ' + where if where else ''}: {error.message[:500]}"
    # Without a registry it opens whatever `$ref` names: files of the box, and addresses that only the box can reach.
    validator = jsonschema.Draft202012Validator(schema, registry=Registry())
    for item in items:
        try:
            error = None if fault else next(validator.iter_errors(item), None)
            path = "".join(f".{step}" for step in error.absolute_path) if error else ""
            yield bool(fault), f"item{path}: {error.message[:500]}" if error else fault
        except RecursionError:
            yield True, "the schema refers to itself without end, or it or an item is nested too deep"
        except Unresolvable as error:
            yield True, f"the reference {error.ref[:200]!r} leads nowhere; one may only lead to a place in the schema"


def run_python(unconfined: str, source: str, sample: dict[str, Any], item: Any) -> float:
    """The number that `grade(sample, item)` returns; in a confined child alone. Raises GradingFailed."""
    if unconfined:
        flags = GradingErrors(python_grader_server_error=True, python_grader_server_error_type=unconfined)
        raise GradingFailed(unconfined, flags)
    try:
        reward = _function(source)(sample, item)
        # Also what numpy calls a number, and True.
        if isinstance(reward, str | bytes) or not hasattr(reward, "__float__"):
            raise _Unfit(f"grade() returned {type(reward).__name__}; expected a number")
        return float(reward)
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything; it is reported
        why = _described(error)
        flags = GradingErrors(python_grader_runtime_error=True, python_grader_runtime_error_details=why)
        raise GradingFailed(why, flags) from None


class _Unfit(Exception):
    """What is wrong with the code, in words."""


def why_unusable(source: str) -> str:
    """Why the source cannot grade; empty if its module runs and has a function `grade(sample, item)`."""
    try:
        function = _function(source)
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise _Unfit("`grade` is a coroutine or a generator; expected a function that returns a number")
        with suppress(ValueError):  # a builtin, which has no signature
            signature = inspect.signature(function)
            try:
                signature.bind({}, {})
            except TypeError as error:
                raise _Unfit(f"`grade` is called as `grade(sample, item)`: {error}") from None
    except BaseException as error:  # noqa: BLE001 - as above
        return _described(error)
    return ""


def _function(source: str) -> Callable[..., Any]:
    """Its `grade`. Raises _Unfit, and whatever the code raises."""
    import random

    import numpy as np

    random.seed()
    np.random.seed()
    # Registered like any other module: dataclasses, pydantic and pickle look it up by the name in its classes. It is
    # compiled without this file's `annotations` import, which the code need not have.
    sys.modules["grader"] = module = ModuleType("grader")
    exec(compile(source, "grader.py", "exec", dont_inherit=True), module.__dict__)
    function = getattr(module, "grade", None)
    if not callable(function):
        raise _Unfit("the source defines no function `grade(sample, item)`")
    return function


def _described(error: BaseException) -> str:
    if isinstance(error, _Unfit):
        return str(error)
    read = traceback.TracebackException.from_exception(error)  # whose text cannot fail
    places = [f" (line {frame.lineno})" for frame in read.stack if frame.filename == "grader.py"]
    return f"{type(error).__name__}: {read}"[:_DETAIL_CHARACTERS] + "".join(places[-1:])


if __name__ == "__main__":
    main()
