"""Estimates in how many ways at once an engine's grammar may read a text that a regular expression describes. Pure.

xgrammar follows all of them, for each byte of each token of the vocabulary, in the step in which all requests wait for
their next token: one mask for `(.{1,8}){32}` took 1.7 s with 4,096 tokens. Parts of variable length, one after the
other or repeated, multiply the ways: `.{0,200}` has one, `.{0,16}` twelve times has two hundred (0.3 s). Engines give
expressions to llguidance, which builds automata from them (0.008 s at most), except where a schema has to go to
xgrammar: tools whose arguments are enforced, `patternProperties` and `propertyNames`.
"""

from __future__ import annotations

from typing import Final

# Two parts of bounded, different length that most tokens fit took 4 ms with 4,096 tokens, four 90 ms.
MOST_WAYS: Final = 16
_BROAD: Final = 8
_NARROW: Final = 1
# A part that is repeated without bound counts as this many.
_UNBOUNDED: Final = 8
_MANY: Final = 1 << 20
_DIGITS: Final = 9
_WIDE_ESCAPES: Final = "wWDSpP"
# A class of at most this many characters is narrow.
_FEW: Final = 3


class _Part:
    """A group, or a single atom. ways: of what is inside; varies: alternatives have different lengths."""

    def __init__(self) -> None:
        self.ways = 0
        self.unit = _NARROW
        self.atoms = 0
        self.lengths: list[int] = []

    def end_alternative(self) -> None:
        self.lengths.append(self.atoms)
        self.atoms = 0
        if len(self.lengths) > _FEW:
            self.unit = _BROAD


def ways(pattern: str) -> int:
    """The measure of one expression, to be compared with MOST_WAYS. It parses no more than that needs; the engine
    refuses what is not an expression."""
    open_groups = [_Part()]
    last = _Part()
    at, end = 0, len(pattern)
    while at < end:
        char, group = pattern[at], open_groups[-1]
        if char == "(":
            open_groups.append(_Part())
            at += 3 if pattern.startswith("(?:", at) else 1
        elif char == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            last.end_alternative()
            _add(open_groups[-1], last)
            at += 1
        elif char == "|":
            group.end_alternative()
            at += 1
        elif (bounds := quantifier(pattern, at)) is not None:
            low, high, at = bounds
            before, last.ways = last.ways, min(_repeated(last, low, high), _MANY)
            group.ways += last.ways - before
            if pattern.startswith("?", at):
                at += 1  # lazy: the same texts
        else:
            last = _Part()
            last.unit, at = _atom(pattern, at)
            _add(group, last)
            group.atoms += 1
    while len(open_groups) > 1:  # a group that is never closed
        inner = open_groups.pop()
        _add(open_groups[-1], inner)
    return open_groups[0].ways


def _add(group: _Part, inner: _Part) -> None:
    group.ways += inner.ways
    group.unit = max(group.unit, inner.unit)
    group.atoms += max(inner.lengths, default=0)


def _repeated(part: _Part, low: int, high: int) -> int:
    """high: 0 without bound."""
    times = high or max(low, _UNBOUNDED)
    found = part.ways * times
    if times > 1 and len(set(part.lengths)) > 1:
        found += part.unit * (len(part.lengths) - 1) * times
    if high and low != high:
        found += part.unit
    return found


def quantifier(pattern: str, at: int) -> tuple[int, int, int] | None:
    """The quantifier at this position: lowest, highest (0: none), and where it ends. None for anything else, including
    braces that are not a quantifier."""
    char = pattern[at]
    if char in "*+?":
        return int(char == "+"), int(char == "?"), at + 1
    close = pattern.find("}", at) if char == "{" else 0
    low, comma, high = pattern[at + 1 : close].partition(",") if close > 0 else ("", "", "")
    if not (low + high).isdecimal() or (comma == "" and low == ""):
        return None
    lowest = _number(low)
    return lowest, (_number(high) if comma else lowest), close + 1


def _number(digits: str) -> int:
    """A number with more digits exceeds every limit, or begins with zeros."""
    return min(int(digits or "0"), _MANY) if len(digits) <= _DIGITS else _MANY


def _atom(pattern: str, at: int) -> tuple[int, int]:
    """How much one character, escape or class matches, and where it ends."""
    end = atom_end(pattern, at)
    if pattern[at] == "\\":
        return (_BROAD if pattern[at + 1 : end] in tuple(_WIDE_ESCAPES) else _NARROW), end
    if pattern[at] != "[":
        return (_BROAD if pattern[at] == "." else _NARROW), end
    inside = pattern[at + 1 : end - 1].replace("0-9", "").replace("\\d", "")
    wide = inside.startswith("^") or len(inside) > _FEW or any(f"\\{kind}" in inside for kind in _WIDE_ESCAPES)
    return (_BROAD if wide or "-" in inside[1:-1] and not inside.isdecimal() else _NARROW), end


def atom_end(pattern: str, at: int) -> int:
    """Where one character, escape or class ends; beyond the pattern if it breaks off."""
    if pattern[at] == "\\":
        return at + 2
    if pattern[at] != "[":
        return at + 1
    at += 1
    while at < len(pattern) and pattern[at] != "]":
        at += 2 if pattern[at] == "\\" else 1
    return at + 1
