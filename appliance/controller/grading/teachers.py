"""Teachers of jobs that distil: models of the box that the job's owner may ask, whose tokens are the student's."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import orjson

from appliance.controller.access.model_access import check_may_ask, unknown_model
from appliance.controller.access.naming import Resolved, resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import BadRequest, shown
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.settings import tokenizer_of
from serve.core import scoring

_FILE = "tokenizer.json"
_MOST_BYTES = 64 << 20
"""Of a tokenizer that is read here; larger ones are compared byte by byte."""


def teacher_of(
    context: ControllerContext, name: Any, student: Resolved, longest: int, caller: Principal, param: str
) -> str:
    """The name, checked. longest: tokens of a prompt with its answer. Raises Forbidden and NotFound for a model that
    the caller may not ask, BadRequest for one that cannot teach this student."""
    if not isinstance(name, str) or not name:
        raise BadRequest(
            f"Invalid '{param}': {shown(name)} was given, expected the name of a model (MODEL, MODEL@VERSION).",
            param=param,
            code="invalid_value",
        )
    check_may_ask(context.db, caller, name, chats=False)
    teacher = resolve(context.db, name)
    if teacher is None:
        raise unknown_model(name)
    if why := _why_not(context, teacher, student, longest):
        raise BadRequest(
            f"{shown(name)} cannot teach {shown(student.name)}: {why}.", param=param, code="invalid_teacher"
        )
    return name


def _why_not(context: ControllerContext, teacher: Resolved, student: Resolved, longest: int) -> str:
    if teacher.model.task != "generate":
        return "it makes embeddings, and a teacher says how likely a text is"
    room = min(scoring.LONGEST, context.sizes.context(teacher.model, teacher.version) or scoring.LONGEST) - scoring.MADE
    if longest > room:
        return (
            f"its engines say how likely texts of at most {room:,} tokens are, and max_length, a prompt with its "
            f"answer, is {longest:,}; choose a smaller one, or a teacher with a longer context"
        )
    folders = [tokenizer_of(context, one) for one in (student, teacher)]
    for folder, one in zip(folders, (student, teacher), strict=True):
        if folder is None:
            return (
                f"whether both have the same tokens cannot be seen while the files of {one.name} are neither on disk "
                "nor in shared memory; ask it something, which brings them back"
            )
    return _differ(*(folder / _FILE for folder in folders if folder is not None))


def _differ(student: Path, teacher: Path) -> str:
    """In what the tokens of two tokenizers differ; "" if every token means the same to both."""
    if filecmp.cmp(student, teacher, shallow=False):
        return ""
    if max(path.stat().st_size for path in (student, teacher)) > _MOST_BYTES:
        return "their tokenizers are not the same file, and too large to be compared token by token"
    theirs, ours = _tokens(teacher), _tokens(student)
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            here, there = (shown(one[number]) if number in one else "none" for one in (ours, theirs))
            return f"it reads tokens, and their tokenizers differ: {number} is {here} to the student and {there} to it"
    return ""


def _tokens(path: Path) -> dict[int, str]:
    """By number."""
    made = orjson.loads(path.read_bytes())
    vocabulary = made["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # of unigrams, each with its score
        found = {number: str(one[0]) for number, one in enumerate(vocabulary)}
    else:
        found = {number: text for text, number in vocabulary.items()}
    return found | {one["id"]: one["content"] for one in made.get("added_tokens") or ()}
