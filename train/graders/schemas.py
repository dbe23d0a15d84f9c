"""Items against a JSON schema. A schema's patterns can take for ever and its references go in circles: a process that
serves others has it checked by worker.py."""

from __future__ import annotations

from itertools import islice
from typing import Any

_SHOWN = 20


def refused_items(schema: Any, items: list[Any]) -> list[tuple[int, str]]:
    """(place, why) of the first few items that do not follow the schema; place -1: it is not a schema."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
        # Without a registry it opens whatever `$ref` names: files of the box, and addresses that only the box can
        # reach.
        validator = jsonschema.Draft202012Validator(schema, registry=Registry())
        found = ((place, next(validator.iter_errors(item), None)) for place, item in enumerate(items))
        refused = ((place, error) for place, error in found if error is not None)
        return [
            (place, f"item{''.join(f'.{step}' for step in error.absolute_path)}: {error.message[:500]}")
            for place, error in islice(refused, _SHOWN)
        ]
    except jsonschema.SchemaError as error:
        where = ".".join(map(str, error.absolute_path))[:200]
        return [(-1, f"it is no JSON schema{' at ' + where if where else ''}: {error.message[:500]}")]
    except RecursionError:
        return [(-1, "the schema refers to itself without end, or it or an item is nested too deep")]
    except Unresolvable as error:
        return [(-1, f"the reference {error.ref[:200]!r} leads nowhere; one may only lead to a place in the schema")]
