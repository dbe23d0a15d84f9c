"""The table of methods."""

from __future__ import annotations

from train.methods import distillation, dpo, reinforcement, supervised
from train.methods.method import Method
from train.plan.errors import InvalidSpec

DEFAULT = supervised.METHOD
METHODS: dict[str, Method] = {one.METHOD.name: one.METHOD for one in (supervised, dpo, reinforcement, distillation)}


def method_of(name: str) -> Method:
    """Raises InvalidSpec."""
    try:
        return METHODS[name]
    except KeyError:
        raise InvalidSpec(f"method {name!r} is not known; expected one of {', '.join(METHODS)}") from None
