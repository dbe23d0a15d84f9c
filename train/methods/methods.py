"""The table of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.methods import distillation, dpo, kto, orpo, reinforcement, supervised
from train.methods.method import Method
from train.plan.errors import InvalidSpec

if TYPE_CHECKING:
    from train.data.formats import Record


DEFAULT = supervised.METHOD
METHODS: dict[str, Method] = {
    one.METHOD.name: one.METHOD for one in (supervised, dpo, kto, orpo, reinforcement, distillation)
}


def method_of(name: str) -> Method:
    """Raises InvalidSpec."""
    try:
        return METHODS[name]
    except KeyError:
        raise InvalidSpec(f"method {name!r} is not known; expected one of {', '.join(METHODS)}") from None


def convert(record: Record, shape: str) -> Record:
    """Converts a record as the first method does that takes its shape: the check of a file of which no job is known
    yet. Raises BadRecord."""
    method = next((method for method in METHODS.values() if method.refuses(shape) is None), DEFAULT)
    return method.convert(record, shape)
