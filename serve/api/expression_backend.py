"""Regular expressions are followed by llguidance, not by xgrammar.

vLLM gives each form to xgrammar first. xgrammar reads an expression as a grammar and keeps every way in which a text
may match: `(.{1,8}){32}`, twelve characters, took 1.7 s for one mask with a vocabulary of 4,096, and all requests of
the engine wait for it in their step. llguidance builds automata for expressions lazily and stops at bounds of its own:
0.008 s at most for all that was tried. So `regex`, and schemas with `pattern`, go to it.

A schema with `patternProperties` or `propertyNames` stays with xgrammar, because llguidance has neither. The gateway
bounds its expressions (appliance.gateway.payload.expression_ways), and those of tools, which are structural tags.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from vllm.exceptions import VLLMValidationError

CHECK = "validate_xgrammar_grammar"
_XGRAMMARS_OWN = ("patternProperties", "propertyNames")


def apply(backend: Any) -> None:
    """backend: vLLM's module of xgrammar; its check runs before vLLM gives it a form, by the module's name for it."""
    setattr(backend, CHECK, _declines_expressions(getattr(backend, CHECK)))


def _declines_expressions(check: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(check)
    def run(params: Any) -> None:
        form = params.structured_outputs
        if form is not None and (form.regex or (form.json and has_expression(form.json))):
            raise VLLMValidationError("Regular expressions are followed by llguidance.")
        check(params)

    return run


def has_expression(schema: Any) -> bool:
    """Whether a JSON schema (text or parsed) has a `pattern` that llguidance may follow. Text that is not JSON has
    none."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:
            return False
    found, stack = False, [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if any(name in node for name in _XGRAMMARS_OWN):
                return False
            found = found or isinstance(node.get("pattern"), str)
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return found
