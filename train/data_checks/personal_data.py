"""Finds and masks personal data and secrets in text by their form, and by their checksum if they have one.

Names and addresses have no fixed form and are not found. No pattern backtracks: every repetition is bounded or
possessive, so the cost of a text is proportional to its length, whatever its content.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Found(NamedTuple):
    """One piece of personal data: text[start:end]."""

    kind: str
    start: int
    end: int


# A cheap test first, a hundred times as fast as the patterns: every digit becomes 0, and separators within a number are
# removed. Few texts then have so many zeros in a row.
_ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))
_BETWEEN, _FEWEST_DIGITS = b" ().-", 7

_EMAIL = re.compile(r"[A-Za-z0-9._%+\-]{1,64}+@[A-Za-z0-9\-]{1,63}+(?:\.[A-Za-z0-9\-]{1,63}+){1,6}+")
_AT_LEAST_TLD = re.compile(r"[A-Za-z]{2,24}")
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}+")
_CARD = re.compile(
    r"(?<![0-9])(?:[0-9]{4}([ \-])[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{4}([ \-])[0-9]{6}\2[0-9]{5}|[0-9]{14,19}+)"
    r"(?![0-9])"
)
_ID_NUMBER = re.compile(
    r"(?<![0-9A-Za-z])[1-9][0-9]{5}(?:18|19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])[0-9]{3}[0-9Xx]"
    r"(?![0-9A-Za-z])"
)
_IPV4 = re.compile(r"(?<![0-9A-Za-z.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z]|\.[0-9])")
_DOTTED = re.compile(rb"0\.0{1,3}\.0{1,3}\.0")
_IPV6 = re.compile(r"(?<![0-9A-Za-z:.])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![0-9A-Za-z:])")
_PHONE = re.compile(
    r"(?<![0-9A-Za-z+])\+[1-9](?:[ ().\-/]{0,2}[0-9]){6,14}(?![0-9])"  # +49 30 1234567
    r"|(?<![0-9A-Za-z])\([2-9][0-9]{2}\) ?[0-9]{3}[\-. ][0-9]{4}(?![0-9])"  # (212) 555-0123
    r"|(?<![0-9A-Za-z.\-/])[2-9][0-9]{2}([\-.])[2-9][0-9]{2}\1[0-9]{4}(?![0-9A-Za-z\-])"  # 212-555-0123
    # 030/1234567, 0176 12345678
    r"|(?<![0-9A-Za-z.,\-/])(?<![0-9] )\(?0[1-9][0-9]{1,3}\)?[ /\-][0-9]{3,8}(?:[ \-][0-9]{1,5}){0,3}(?![0-9A-Za-z])"
    r"|(?<![0-9A-Za-z])1[3-9][0-9]{9}(?![0-9A-Za-z])"  # Chinese mobile
)
_SECRET = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    r"|(?<![A-Za-z0-9])(?:"
    r"sk-[A-Za-z0-9_\-]{20,200}+|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_\-]{35}|gh[pousr]_[A-Za-z0-9]{36,255}+"
    r"|github_pat_[A-Za-z0-9_]{22,255}+|glpat-[A-Za-z0-9_\-]{20,64}+|xox[abprs]-[A-Za-z0-9\-]{10,200}+"
    r"|hf_[A-Za-z0-9]{30,64}+|npm_[A-Za-z0-9]{36}|[sr]k_live_[A-Za-z0-9]{16,200}+"
    r"|eyJ[A-Za-z0-9_\-]{8,4000}+\.eyJ[A-Za-z0-9_\-]{8,8000}+\.[A-Za-z0-9_\-]{8,4000}+)"
)
_SECRET_SIGNS = (
    "sk-",
    "AKIA",
    "AIza",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "xox",
    "hf_",
    "npm_",
    "k_live_",
    "eyJ",
    "PRIVATE KEY",
)
_KEY_BLOCK_END = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY-----")
_MOST_KEY_BLOCK = 8192

# How many characters an IBAN of a country has (ISO 13616, SWIFT's registry).
_IBAN_LENGTHS = {
    country: int(length)
    for length, countries in {
        "15": "NO",
        "16": "BE",
        "18": "DK FI FO GL NL SD FK",
        "19": "MK SI",
        "20": "AT BA EE KZ LT LU XK",
        "21": "CH CR HR LI LV",
        "22": "BG BH DE GB GE IE ME RS VA",
        "23": "AE GI IL IQ OM SO TL",
        "24": "AD CZ ES MD PK RO SA SE SK TN VG",
        "25": "LY PT ST",
        "26": "IS TR",
        "27": "BI DJ FR GR IT MC MR SM",
        "28": "AL AZ BY CY DO GT HU LB NI PL SV",
        "29": "BR EG PS QA UA",
        "30": "JO KW MU YE",
        "31": "MT SC",
        "32": "LC",
        "33": "RU",
    }.items()
    for country in countries.split()
}
_CARD_BEGINS = tuple("23456")
_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_ID_CHECKS = "10X98765432"


def find(text: str) -> list[Found]:
    """All finds in a text, in order; no two overlap."""
    found: list[Found] = []
    for of_a_kind in _candidates(text):
        found = _joined(found, of_a_kind)
    return found


def masked(text: str) -> tuple[str, list[str]]:
    """The text with [EMAIL], [CARD] … in place of the finds, and their kinds."""
    found = find(text)
    pieces, at = [], 0
    for kind, start, end in found:
        pieces += [text[at:start], f"[{kind.upper()}]"]
        at = end
    return "".join([*pieces, text[at:]]), [one.kind for one in found]


def hinted(text: str, found: Found) -> str:
    """Enough to locate it, too little to reveal it: reports are kept and shown."""
    value = text[found.start : found.end]
    return f"{value[:3]}… ({len(value)} characters)"


def _joined(found: list[Found], more: Iterable[Found]) -> list[Found]:
    """Merges both in order, without finds that overlap an earlier one. Each takes one step, because a text may be full
    of them."""
    at, new = 0, []
    for one in more:
        while at < len(found) and found[at].end <= one.start:
            at += 1
        if at == len(found) or found[at].start >= one.end:
            new.append(one)
    return sorted([*found, *new], key=lambda one: one.start) if new else found


def _candidates(text: str) -> Iterator[Iterable[Found]]:
    """The candidates of each kind, from the text's beginning to its end. A kind wins over those behind it where two
    overlap."""
    raw = text.encode("utf-8", "surrogatepass")
    zeros = raw.translate(_ZEROS)
    numbers = b"0" * _FEWEST_DIGITS in zeros.translate(None, _BETWEEN)
    if any(sign in text for sign in _SECRET_SIGNS):
        yield (Found("secret", match.start(), _secret_end(text, match)) for match in _SECRET.finditer(text))
    if numbers:
        yield _ibans(text)
        yield (Found("card", *match.span()) for match in _CARD.finditer(text) if is_card(match[0]))
        yield (Found("id_number", *match.span()) for match in _ID_NUMBER.finditer(text) if is_id_number(match[0]))
    if "@" in text:
        yield _emails(text)
    if zeros.count(b"0.0") >= 2 and _DOTTED.search(zeros):
        yield _addresses(text, _IPV4)
    if b"::" in raw or raw.count(b":") >= 7:
        yield _addresses(text, _IPV6)
    if numbers:
        yield (Found("phone", *match.span()) for match in _PHONE.finditer(text) if 9 <= _digits(match[0]) <= 15)


def _digits(text: str) -> int:
    return sum(map(str.isdigit, text))


def _secret_end(text: str, match: re.Match[str]) -> int:
    """A block of a private key ends with its last line."""
    if not match[0].startswith("-----BEGIN"):
        return match.end()
    last = _KEY_BLOCK_END.search(text, match.end(), match.end() + _MOST_KEY_BLOCK)
    return last.end() if last else match.end()


def _ibans(text: str) -> Iterator[Found]:
    for match in _IBAN.finditer(text):
        length = _IBAN_LENGTHS.get(match[0][:2])
        places = [at for at in range(match.start(), match.end()) if text[at] != " "]
        if length is None or len(places) < length:
            continue
        end = places[length - 1] + 1
        if is_iban(text[match.start() : end]) and not text[end : end + 1].isalnum():
            yield Found("iban", match.start(), end)


def _emails(text: str) -> Iterator[Found]:
    for match in _EMAIL.finditer(text):
        whole = match[0].rstrip("-")
        if _AT_LEAST_TLD.fullmatch(whole.rpartition(".")[2]) and ".." not in whole:
            yield Found("email", match.start(), match.start() + len(whole))


def _addresses(text: str, pattern: re.Pattern[str]) -> Iterator[Found]:
    """Public addresses only: a private one, or a version such as 1.2.3.4.5, identifies nobody."""
    for match in pattern.finditer(text):
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            continue
        if address.is_global:
            yield Found("ip", *match.span())


def is_card(text: str) -> bool:
    """Whether it has the digits of a payment card: how it begins, how long it is, and Luhn's checksum."""
    digits = [int(character) for character in text if character.isdigit()]
    if not 14 <= len(digits) <= 19 or len(set(digits)) == 1 or str(digits[0]) not in _CARD_BEGINS:
        return False
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def is_iban(text: str) -> bool:
    """Whether the number of a bank account has its country's length and the right checksum (ISO 7064, modulo 97)."""
    compact = text.replace(" ", "")
    if _IBAN_LENGTHS.get(compact[:2]) != len(compact):
        return False
    return int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97 == 1


def is_id_number(text: str) -> bool:
    """Whether a Chinese identity number has the right last place (GB 11643)."""
    total = sum(int(digit) * weight for digit, weight in zip(text[:17], _ID_WEIGHTS, strict=True))
    return text[17].upper() == _ID_CHECKS[total % 11]
