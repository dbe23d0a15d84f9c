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
    except ValueError as error:
        raise InvalidGrader(param, str(error)) from None
    except (SyntaxError, RecursionError, MemoryError, OverflowError) as error:
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
        result = eval(code, {"__builtins__": {}} | _FUNCTIONS, {name: float(one) for name, one in rewards.items()})
        if isinstance(result, complex) or not math.isfinite(result):
            raise ValueError(f"it is {result}")
        return float(result)
    except (ArithmeticError, TypeError, ValueError) as error:
        given = ", ".join(f"{name} = {reward:g}" for name, reward in rewards.items())
        raise GradingFailed(
            f"calculate_output has no value for {given}: {error}", GradingErrors(formula_parse_error=True)
        ) from None


def _parsed(formula: str) -> ast.Expression:
    """The formula as an expression of arithmetic alone, with floats as its numbers. Raises ValueError, and what Python
    raises for what it cannot parse."""
    if len(formula) > MAX_CHARACTERS:
        raise ValueError(f"has {len(formula)} characters; at most {MAX_CHARACTERS} are taken")
    # In formulas of OpenAI's API ^ is a power.
    tree = ast.parse(formula.strip().replace("^", "**"), mode="eval")
    for node in ast.walk(tree.body):
        match node:
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                node.value = float(number)
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
                pass
            case _ if not isinstance(node, (ast.Name, *_ARITHMETIC)):
                expected = f"numbers, names of graders, + - * / ^ and {', '.join(_FUNCTIONS)}"
                raise ValueError(f"has {ast.unparse(node)!r}; a formula has {expected}")
    return tree
