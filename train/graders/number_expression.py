"""Writes the regular expression that a judge's number has to match, for a range of rewards."""

from __future__ import annotations

import math

_EACH_OF = 101
"""How many whole numbers of a range an expression lists; for a wider range it only has digits, and the score is
clipped."""
_DECIMALS = 4
"""Behind the point of a judge's number."""


def numbers(low: float, high: float) -> str:
    """An expression for the numbers of a range."""
    least, most = math.ceil(low), math.floor(high)
    if most - least >= _EACH_OF:
        digits, sign = len(str(math.ceil(max(abs(low), abs(high))))), "-?" if low < 0 else ""
        # JSON has no 007, and a judge that wrote it would have given no grade.
        return rf"{sign}(0|[1-9][0-9]{{0,{digits - 1}}})(\.[0-9]{{1,4}})?"
    if (least, most) != (low, high):
        if low >= 0:
            return _between(low, high)
        if high < 0:  # else 0 has to be among them, without a sign
            return f"-({_between(-high, -low)})"
        return f"{_between(0, high)}|-({_between(0, -low)})"
    # From each whole number up to the next one: -0.5 lies between -1 and 0.
    above = [str(one) if one >= 0 else f"-{-one - 1}" for one in range(least, most)]
    return rf"({'|'.join(above)})(\.[0-9]{{1,4}})?|({least}|{most})(\.0)?"


def _between(low: float, high: float) -> str:
    """An expression for the numbers from 0 ≤ low to high, one of which is not whole, with _DECIMALS decimals; if the
    range contains none with so few, for the nearest one, and the score is clipped to the range."""
    scale = 10**_DECIMALS
    least, most = math.ceil(round(low * scale, 3)), math.floor(round(high * scale, 3))
    most = max(least, most)
    ways = list[str]()
    for whole in range(least // scale, most // scale + 1):
        first, last = max(least - whole * scale, 0), min(most - whole * scale, scale - 1)
        behind = rf"(\.({_decimals(f'{first:0{_DECIMALS}}', f'{last:0{_DECIMALS}}')}))"
        ways.append(f"{whole}{behind}{'' if first else '?'}")
    return f"({'|'.join(ways)})"


def _decimals(first: str, last: str) -> str:
    """An expression for decimals, from 0.first to 0.last, with or without zeros at the end."""
    if not first.strip("0") and not last.strip("9"):
        return f"[0-9]{{1,{len(first)}}}"
    begins, ends = int(first[0]), int(last[0])
    if len(first) == 1:
        return f"[{begins}-{ends}]"
    lowest, highest = "0" * (len(first) - 1), "9" * (len(first) - 1)
    ways, free = list[str](), list[int]()
    for digit in range(begins, ends + 1):
        rest = (first[1:] if digit == begins else lowest, last[1:] if digit == ends else highest)
        if rest == (lowest, highest):
            free.append(digit)  # they follow each other
        else:
            ways.append(f"{digit}({_decimals(*rest)}){'' if rest[0].strip('0') else '?'}")
    if free:
        ways.append(f"[{free[0]}-{free[-1]}][0-9]{{0,{len(lowest)}}}")
    return "|".join(ways)
