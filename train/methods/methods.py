"""The table of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.methods import distillation, dpo, kto, orpo, reinforcement, supervised
from train.methods.method import Method
from train.plan.auto import common_names
from train.plan.errors import InvalidSpec

if TYPE_CHECKING:
    from train.data.formats import Record


def table(*methods: Method) -> dict[str, Method]:
    """By name. Raises ValueError for what would hide another row, or a hyperparameter that every method has: two
    methods may have an option of one name, each with its own bounds and meaning, and one is read by its method."""
    common, rows = common_names(), dict[str, Method]()
    for method in methods:
        if method.name in rows:
            raise ValueError(f"two methods are called {method.name!r}; expected a name of its own for each")
        names = [option.name for option in method.options]
        for name in names:
            if name in common or names.count(name) > 1:
                raise ValueError(f"option {name!r} of method {method.name!r} is one already; expected another name")
        rows[method.name] = method
    return rows


DEFAULT = supervised.METHOD
METHODS = table(supervised.METHOD, dpo.METHOD, kto.METHOD, orpo.METHOD, reinforcement.METHOD, distillation.METHOD)


def method_of(name: str) -> Method:
    """Raises InvalidSpec."""
    try:
        return METHODS[name]
    except KeyError:
        raise InvalidSpec(f"method {name!r} is not known; expected one of {', '.join(METHODS)}") from None


def convert(record: Record, shape: str) -> Record | None:
    """Converts a record as the first method does that takes its shape: the check of a file of which no job is known
    yet. Raises BadRecord."""
    method = next((method for method in METHODS.values() if method.refuses(shape) is None), DEFAULT)
    return method.convert(record, shape)
