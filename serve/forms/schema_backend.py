"""Gives each form to a grammar backend that enforces all of it.

vLLM gives a schema to xgrammar first, which passes over what it does not know, and over much that it does
(followed_schemas.py). Here such a schema goes to llguidance. So do regular expressions: xgrammar keeps every way in
which a text may match, and `(.{1,8}){32}`, twelve characters, took 1.7 s for one mask with a vocabulary of 4,096, while
all requests of the engine wait for it in their step. llguidance builds automata lazily and stops at bounds of its own:
0.008 s at most for all that was tried. The gateway bounds expressions that xgrammar has to follow: those of tools,
which are structural tags, and of `propertyNames` (appliance.gateway.payload.expression_ways).

The gateway refuses a client's schema that no backend enforces. Arguments of tools without `strict` are not promised:
xgrammar follows them as far as it can.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

from serve.forms.followed_schemas import fault, goes_to_llguidance

CHECK, DECLINES = "validate_xgrammar_grammar", "has_guidance_unsupported_json_features"


def apply(xgrammars: Any, llguidances: Any) -> None:
    """vLLM's modules of the two backends. Its check of a form runs xgrammar's before it chooses, by the module's name
    for it, and holds that llguidance has no `patternProperties`, which it has."""
    setattr(xgrammars, CHECK, _declines(getattr(xgrammars, CHECK)))
    setattr(llguidances, DECLINES, lambda schema: False)


def _declines(check: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(check)
    def run(params: Any) -> None:
        form = params.structured_outputs
        schema = _parsed(form.json) if form is not None else None
        if form is not None and (form.regex or (schema is not None and goes_to_llguidance(schema))):
            raise VLLMValidationError("llguidance follows it.")
        if schema is None or fault(schema) is None:
            check(params)  # else a tool's: vLLM would try llguidance too, and refuse the request

    return run


def _parsed(schema: Any) -> dict[str, Any] | None:
    """None for what is not a schema, which vLLM's check refuses."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return None
    return schema if isinstance(schema, dict) and schema else None
