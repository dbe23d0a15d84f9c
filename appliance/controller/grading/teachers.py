"""Checks the teacher of a distillation job: a model of the box that the job's owner may ask. The job's validation
checks that both have the same tokens, because that takes a second (jobs.validation)."""

from __future__ import annotations

from typing import Any

from appliance.controller.access.model_access import check_may_ask, unknown_model
from appliance.controller.access.naming import Resolved, resolve
from appliance.controller.context.context import ControllerContext
from appliance.controller.grading import in_tokens
from appliance.controller.interfaces.errors import BadRequest, InvalidValue, shown
from appliance.controller.interfaces.principal import Principal
from appliance.controller.jobs.settings import tokenizer_of


def teacher_of(
    context: ControllerContext, name: Any, student: Resolved, longest: int, caller: Principal, param: str
) -> str:
    """The name, checked. longest: tokens of a prompt with its answer. Raises Forbidden and NotFound for a model that
    the caller may not ask, BadRequest for one that cannot teach this student."""
    if not isinstance(name, str) or not name:
        raise InvalidValue(
            f"Invalid '{param}': {shown(name)} was given, expected the name of a model (MODEL, MODEL@VERSION).", param
        )
    check_may_ask(context.db, caller, name, chats=False, param=param)
    teacher = resolve(context.db, name)
    if teacher is None:
        raise unknown_model(name, param)
    if why := _why_not(context, teacher, student, longest):
        raise BadRequest(
            f"{shown(name)} cannot teach {shown(student.name)}: {why}.", param=param, code="invalid_teacher"
        )
    return name


def _why_not(context: ControllerContext, teacher: Resolved, student: Resolved, longest: int) -> str:
    if teacher.model.task != "generate":
        return "it makes embeddings, and a teacher says how likely a text is"
    longest_text = in_tokens.LONGEST
    room = min(longest_text, context.sizes.context(teacher.model, teacher.version) or longest_text) - in_tokens.MADE
    if longest > room:
        return (
            f"its engines say how likely texts of at most {room:,} tokens are, and max_length, a prompt with its "
            f"answer, is {longest:,}; choose a smaller one, or a teacher with a longer context"
        )
    for one in (student, teacher):
        if tokenizer_of(context, one) is None:
            return (
                f"whether both have the same tokens cannot be seen while the files of {one.name} are neither on disk "
                "nor in shared memory; ask it something, which brings them back"
            )
    return ""
