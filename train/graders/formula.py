"""The formula of a `multi` grader: arithmetic over the rewards of its graders, by name."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

from train.graders.errors import GradingErrors, GradingFailed, InvalidGrader

MAX_CHARACTERS = 4096
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
_ONE_ARGUMENT = set(_FUNCTIONS) - {"min", "max"}


def check(formula: str, names: set[str], param: str) -> None:
    """Raises InvalidGrader for what is not a formula over these names."""
    try:
        unknown = _names(_parsed(formula, param), param) - names
    except RecursionError:
        raise InvalidGrader(param, "is nested too deeply") from None
    if unknown:
        raise InvalidGrader(
            param, f"names {', '.join(sorted(unknown))}, but the graders are called {', '.join(sorted(names))}"
        )


def value(formula: str, rewards: Mapping[str, float]) -> float:
    """Raises GradingFailed when it has no value for these rewards (a division by zero, a root of a negative number)."""
    try:
        found = _value(_parsed(formula, "calculate_output"), rewards)
        if not math.isfinite(found):
            raise ValueError(f"it is {found}")
        return float(found)
    except (ArithmeticError, ValueError) as error:
        given = ", ".join(f"{name} = {reward:g}" for name, reward in rewards.items())
        raise GradingFailed(
            f"calculate_output has no value for {given}: {error}", GradingErrors(formula_parse_error=True)
        ) from None


def _parsed(formula: str, param: str) -> ast.expr:
    if len(formula) > MAX_CHARACTERS:
        raise InvalidGrader(param, f"has {len(formula)} characters; at most {MAX_CHARACTERS} are taken")
    try:
        # In formulas of OpenAI's API ^ is a power.
        return ast.parse(formula.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidGrader(param, f"cannot be read as a formula: {error}") from None


def _names(node: ast.expr, param: str) -> set[str]:
    """All names in it. Raises InvalidGrader for anything but arithmetic."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float()):
            return set()
        case ast.Name(id=name):
            return {name}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
            return _names(inner, param)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _names(left, param) | _names(right, param)
        case ast.Call(func=ast.Name(id=name), args=given, keywords=[]) if name in _FUNCTIONS and given:
            if name in _ONE_ARGUMENT and len(given) != 1:
                raise InvalidGrader(param, f"{name} takes one number, not {len(given)}")
            if name not in _ONE_ARGUMENT and len(given) < 2:
                raise InvalidGrader(param, f"{name} takes two numbers or more")
            return {inner for one in given for inner in _names(one, param)}
    raise InvalidGrader(
        param,
        f"has {ast.unparse(node)!r}; a formula has numbers, names of graders, + - * / ^ and {', '.join(_FUNCTIONS)}",
    )


def _value(node: ast.expr, rewards: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name):
            return rewards[name]
        case ast.UnaryOp(op=op, operand=inner):
            found = _value(inner, rewards)
            return -found if isinstance(op, ast.USub) else found
        case ast.BinOp(left=left, op=op, right=right):
            found = _BINARY[type(op)](_value(left, rewards), _value(right, rewards))
            if isinstance(found, complex):  # a power of a negative number, which no function takes
                raise ValueError(f"{ast.unparse(node)} is not a real number")
            return found
        case ast.Call(func=ast.Name(id=name), args=given):
            # floor and ceil give whole numbers without bounds, a power of which takes minutes and gigabytes.
            return float(_FUNCTIONS[name](*(_value(one, rewards) for one in given)))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")
