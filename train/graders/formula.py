"""The formula of a `multi` grader: arithmetic over the rewards of its graders, by name."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping

from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader

MAX_CHARACTERS = 4096
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    # Floats: a power of unbounded whole numbers takes minutes and gigabytes.
    "floor": lambda number: float(math.floor(number)),
    "ceil": lambda number: float(math.ceil(number)),
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_ARITHMETIC = (ast.UnaryOp, ast.UAdd, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Load)


def check(formula: str, names: set[str], param: str) -> None:
    """Raises InvalidGrader for anything but a formula over these names."""
    try:
        tree = _parsed(formula)
        compile(tree, "formula", "eval")
    except InvalidGrader as error:
        raise InvalidGrader(param, error.message) from None
    except (RecursionError, OverflowError) as error:
        raise InvalidGrader(param, f"cannot be read as a formula: {error}") from None
    unknown = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - names - set(_FUNCTIONS)
    if unknown:
        raise InvalidGrader(
            param, f"names {', '.join(sorted(unknown))}, but the graders are called {', '.join(sorted(names))}"
        )


def value(formula: str, rewards: Mapping[str, float]) -> float:
    """Raises GradingFailed when it has no value for these rewards (a division by zero, a root of a negative number)."""
    try:
        code = compile(_parsed(formula), "formula", "eval")
        found = eval(code, {"__builtins__": {}} | _FUNCTIONS, {name: float(one) for name, one in rewards.items()})
        if isinstance(found, complex) or not math.isfinite(found):
            raise ValueError(f"it is {found}")
        return float(found)
    except (ArithmeticError, TypeError, ValueError) as error:
        given = ", ".join(f"{name} = {reward:g}" for name, reward in rewards.items())
        raise GradingFailed(
            f"calculate_output has no value for {given}: {error}", GradingErrors(formula_parse_error=True)
        ) from None


def _parsed(formula: str) -> ast.Expression:
    """The formula as an expression of arithmetic alone, with floats as its numbers. Raises InvalidGrader."""
    if len(formula) > MAX_CHARACTERS:
        raise InvalidGrader("", f"has {len(formula)} characters; at most {MAX_CHARACTERS} are taken")
    try:
        # In formulas of OpenAI's API ^ is a power.
        tree = ast.parse(formula.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidGrader("", f"cannot be read as a formula: {error}") from None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree.body):
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                node.value = float(number)
            case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS:
                if (len(given) > 1) != (name in ("min", "max")) or not given:
                    wanted = "two numbers or more" if name in ("min", "max") else "one number"
                    raise InvalidGrader("", f"{name} takes {wanted}, not {len(given)}")
            case ast.Name(id=name) if name not in _FUNCTIONS or id(node) in called:
                pass
            case _ if not isinstance(node, _ARITHMETIC):
                shown = ast.unparse(node)
                expected = f"numbers, names of graders, + - * / ^ and {', '.join(_FUNCTIONS)}"
                raise InvalidGrader("", f"has {shown!r}; a formula has {expected}")
    return tree
