"""Graders and items as requests give them: checked for the caller."""

from __future__ import annotations

from typing import Any

from appliance.controller.access.model_access import caller_may_use, unknown_model
from appliance.controller.context.context import ControllerContext
from appliance.controller.interfaces.errors import BadRequest
from appliance.controller.interfaces.principal import Principal
from train.graders import sandbox
from train.graders.errors import InvalidGrader
from train.graders.graders import Grader, LabelModel, Python, ScoreModel, leaves, parse

MAX_DEPTH = 128
"""Levels of an item: it is written and read again by recursion."""


def grader_of(context: ControllerContext, given: Any, caller: Principal, param: str = "grader") -> Grader:
    """Raises BadRequest for what is no grader, or one that this machine cannot run; NotFound for a model that the
    caller may not use."""
    try:
        grader = parse(given)
    except InvalidGrader as error:
        path = f"{param}.{error.param}" if error.param else param
        raise BadRequest(f"Invalid '{path}': {error.message}.", param=path, code="invalid_grader") from None
    for leaf in leaves(grader).values():
        if isinstance(leaf, Python) and (why := sandbox.refusal()):
            raise BadRequest(f"{why[:1].upper()}{why[1:]}.", param=param, code="python_graders_unavailable")
        if isinstance(leaf, ScoreModel | LabelModel) and not caller_may_use(context.db, caller, leaf.model):
            raise unknown_model(leaf.model)
    return grader
