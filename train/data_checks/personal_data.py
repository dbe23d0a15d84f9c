"""Finds personal data and secrets in text by their form, and by their checksum if they have one.

Names and addresses have no fixed form and are not found. No pattern backtracks: every repetition is bounded or
possessive, so the cost of a text is proportional to its length, whatever its content.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import NamedTuple


class Match(NamedTuple):
    kind: str
    value: str

    def hint(self) -> str:
        """Enough to locate it, too little to reveal it: reports are stored and shown."""
        return f"{self.value[:3]}… ({len(self.value)} characters)"


# Cheap tests, much faster than the patterns: what every match of a kind has.
_NUMBER = re.compile(r"[0-9](?:[ ().\-/]{0,2}[0-9]){6}")
_DOTTED = re.compile(r"[0-9]\.[0-9]|:[0-9A-Fa-f]{0,4}:")
_KEY_SIGNS = re.compile(r"sk-|AKIA|AIza|gh._|github_pat_|glpat-|xox.-|hf_|npm_|k_live_|eyJ|PRIVATE KEY")
_AT = re.compile("@")
_SECRET = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[^-]{0,8192}+-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
    r"|(?<![A-Za-z0-9])(?:"
    r"sk-[A-Za-z0-9_\-]{20,200}+|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_\-]{35}|gh[pousr]_[A-Za-z0-9]{36,255}+"
    r"|github_pat_[A-Za-z0-9_]{22,255}+|glpat-[A-Za-z0-9_\-]{20,64}+|xox[abprs]-[A-Za-z0-9\-]{10,200}+"
    r"|hf_[A-Za-z0-9]{30,64}+|npm_[A-Za-z0-9]{36}|[sr]k_live_[A-Za-z0-9]{16,200}+"
    r"|eyJ[A-Za-z0-9_\-]{8,4000}+\.eyJ[A-Za-z0-9_\-]{8,8000}+\.[A-Za-z0-9_\-]{8,4000}+)"
)
_CARD = re.compile(
    r"(?<![0-9])(?:[0-9]{4}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{4}([ \-])[0-9]{6}\2[0-9]{5}|[0-9]{14,19}+)"
    r"(?![0-9])"
)
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+\-])[A-Za-z0-9._%+\-]{1,64}+@(?:[A-Za-z0-9\-]{1,63}+\.){1,6}[A-Za-z]{2,24}(?![A-Za-z0-9])"
)
_IP = re.compile(
    r"(?<![0-9A-Za-z.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z]|\.[0-9])"
    r"|(?<![0-9A-Za-z:.])[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?![0-9A-Za-z:])"
)
_PHONE = re.compile(
    r"(?<![0-9A-Za-z+])\+[1-9](?:[ ().\-/]{0,2}[0-9]){6,14}(?![0-9])"  # +49 30 1234567
    r"|(?<![0-9A-Za-z])\([2-9][0-9]{2}\) ?[0-9]{3}[\-. ][0-9]{4}(?![0-9])"  # (212) 555-0123
    r"|(?<![0-9A-Za-z.\-/])[2-9][0-9]{2}([\-.])[2-9][0-9]{2}\1[0-9]{4}(?![0-9A-Za-z\-])"  # 212-555-0123
    # 030/1234567, 0176 12345678
    r"|(?<![0-9A-Za-z.,\-/])(?<![0-9] )\(?0[1-9][0-9]{1,3}\)?[ /\-][0-9]{3,8}(?:[ \-][0-9]{1,5}){0,3}(?![0-9A-Za-z])"
    r"|(?<![0-9A-Za-z])1[3-9][0-9]{9}(?![0-9A-Za-z])"  # Chinese mobile
)


def personal_data(text: str) -> list[Match]:
    """The matches of all kinds, in the order of the kinds."""
    matches: list[Match] = []
    for kind, sign, pattern, is_valid in _KINDS:
        if sign.search(text):
            found = [match for match in pattern.finditer(text) if is_valid(match[0])]
            matches += [Match(kind, match[0]) for match in found]
            edges = [0, *(edge for match in found for edge in match.span()), len(text)]
            text = " ".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    return matches


def _is_card(text: str) -> bool:
    """Whether it has the first digit of a payment card, its length and Luhn's checksum."""
    digits = [int(character) for character in text if character.isdigit()]
    if digits[0] not in (2, 3, 4, 5, 6) or len(set(digits)) == 1:
        return False
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_public(text: str) -> bool:
    """Whether it is an address on the internet: a private one, or a version such as 1.2.3.4.5, identifies nobody."""
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False


def _is_phone(text: str) -> bool:
    return 9 <= sum(map(str.isdigit, text)) <= 15


# In this order: where two kinds overlap, the first wins.
_KINDS: tuple[tuple[str, re.Pattern[str], re.Pattern[str], Callable[[str], bool]], ...] = (
    ("secret", _KEY_SIGNS, _SECRET, lambda _: True),
    ("card", _NUMBER, _CARD, _is_card),
    ("email", _AT, _EMAIL, lambda _: True),
    ("ip", _DOTTED, _IP, _is_public),
    ("phone", _NUMBER, _PHONE, _is_phone),
)
