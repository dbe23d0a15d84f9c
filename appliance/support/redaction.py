"""Replaces in a text what is nobody else's business: secrets by what they are, people and machines by stable names.

The best effort of patterns, as with every tool of this kind (https://troubleshoot.sh/docs/redact): a person looks
before anything leaves. What can be known for certain, the box's own secrets, is found by value wherever it stands.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable

SHORTEST_SECRET = 8  # a shorter known value would be found within words

# What repeats has a bound: a log may hold megabytes without a blank, and a search that looks to the end of them from
# each of its letters takes days. The order matters: what names a secret goes before what only resembles one.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
_API_KEY = re.compile(r"\bsk-[A-Za-z0-9_-]{6,}")
_JOIN_TOKEN = re.compile(r"\bjoin-[A-Za-z0-9_-]{8,}")
_CREDENTIALS = re.compile(r"\b(Bearer|Basic)(\s+)[A-Za-z0-9._~+/=-]{6,}", re.IGNORECASE)
_CLOUD_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")
# Of the hub, GitHub, GitLab and Slack by how they begin; of a login provider, which are JSON in base64 between dots.
_TOKEN = re.compile(
    r"\b(?:hf_|gh[opsru]_)[A-Za-z0-9]{20,}|\b(?:github_pat_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{10,}"
    r"|\beyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]{6,}\.[A-Za-z0-9_-]*"
)
# On a command line, or in a list of arguments as Python or JSON writes it; what is quoted goes on to its end.
_OPTION = re.compile(
    r"""(--[a-z-]{0,30}(?:token|secret|password|api-key)(?:\\?["'],\s{0,4}|\s{1,4})(?P<quote>\\?["'])?)
        (?![-<\\])(?(quote)[^"'\\\n]+|[^\s"',<]+)""",
    re.VERBOSE,
)
_COOKIE = re.compile(
    r"""(\b(?:cookie|x-appliance-page)(?:\\?["'])?\s*[=:]\s*(?:\\?["'])?)[^"'\\\s<][^"'\\\n]*""", re.IGNORECASE
)
# `hf_token = "…"`, `"secret_key": "…"`, `PASSWORD=…`, `x-api-key: …`; quotes may be escaped, in JSON within JSON. What
# is quoted goes on to its end, however long, or to that of its line: messages are cut short in the midst of a value.
_FIELD = re.compile(
    r"""((?:token|secret|password|passwd|passphrase|credentials?|(?:api|access|private|secret)[_-]?key)
        (?:\\?["'])?\s*[=:]\s*)
        (?: (\\?")([^"\n]+)("?) | (\\?')([^'\n]+)('?) | ([^\s"',;&}\])]+))""",
    re.IGNORECASE | re.VERBOSE,
)
_NOT_SECRET = re.compile(r"(?:null|none|true|false|\d{1,6}|\*+|<[a-z ]+>)", re.IGNORECASE)
_USER_OF_URL = re.compile(r"([a-z][a-z0-9+.-]{0,30}://)[^\s/@\"'<>]{1,1024}@", re.IGNORECASE)
_QUERY_OF_URL = re.compile(r"([a-z][a-z0-9+.-]{0,30}://[^\s?\"'<>]{1,1024})\?[^\s\"'<>]+", re.IGNORECASE)
_MAIL = re.compile(r"\b[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,8}\.[A-Za-z]{2,63}\b")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_IPV6 = re.compile(r"(?<![0-9A-Za-z:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![0-9A-Za-z:])")
_HOME = re.compile(r"(/home/|/Users/)([^/\s\"':]+)")


class Redaction:
    """One for a whole bundle, so that a person or an address has one name in all its files.

    counts: how often each kind was replaced.
    """

    def __init__(self, secrets: Iterable[str] = (), names: Iterable[str] = ()):
        """secrets: values of this box; those shorter than 8 characters are ignored. names: of people and keys, replaced
        as whole words."""
        self.counts: Counter[str] = Counter()
        self._named: dict[tuple[str, str], str] = {}
        self._kinds: Counter[str] = Counter()  # names of each that were given
        known = sorted({one for one in secrets if len(one) >= SHORTEST_SECRET}, key=len, reverse=True)
        self._secrets = _any_of(known)
        self._names = _any_of(sorted({one for one in names if one}, key=len, reverse=True), words=True)

    def apply(self, text: str) -> str:
        """Twice applied is once applied."""
        if self._secrets:
            text = self._secrets.sub(self._by("secret", "<secret of the box>"), text)
        text = _PRIVATE_KEY.sub(self._by("private key", "<private key>"), text)
        text = _API_KEY.sub(self._by("API key", "<API key>"), text)
        text = _JOIN_TOKEN.sub(self._by("join token", "<join token>"), text)
        text = _CREDENTIALS.sub(self._by("credentials", r"\1\2<credentials>"), text)
        text = _CLOUD_KEY.sub(self._by("cloud key", "<cloud key>"), text)
        text = _TOKEN.sub(self._by("token", "<token>"), text)
        text = _OPTION.sub(self._by("option that names a secret", r"\1<secret>"), text)
        text = _COOKIE.sub(self._by("cookie", r"\1<cookie>"), text)
        text = _FIELD.sub(self._field, text)
        text = _USER_OF_URL.sub(self._by("user of a URL", r"\1"), text)
        text = _QUERY_OF_URL.sub(self._by("query of a URL", r"\1"), text)
        text = _MAIL.sub(lambda found: self._pseudonym("mail", found[0]), text)
        text = _HOME.sub(lambda found: found[1] + self._pseudonym("home", found[2]), text)
        text = _IPV4.sub(self._address, text)
        text = _IPV6.sub(self._address, text)
        if self._names:
            text = self._names.sub(lambda found: self._pseudonym("name", found[0]), text)
        return text

    def _by(self, kind: str, replacement: str) -> Callable[[re.Match[str]], str]:
        def replaced(found: re.Match[str]) -> str:
            self.counts[kind] += 1
            return found.expand(replacement)

        return replaced

    def _field(self, found: re.Match[str]) -> str:
        quote, value, end = (found[2], found[3], found[4]) if found[2] else (found[5], found[6], found[7])
        if not quote:
            quote, value, end = "", found[8], ""
        if _NOT_SECRET.fullmatch(value.removesuffix("\\") if quote.startswith("\\") else value):
            return found[0]
        self.counts["field that names a secret"] += 1
        return f"{found[1]}{quote}<secret>{quote if end else ''}"

    def _address(self, found: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(found[0])
        except ValueError:
            return found[0]
        if address.is_loopback or address.is_unspecified:
            return found[0]
        return self._pseudonym("ip", str(address))

    def _pseudonym(self, kind: str, value: str) -> str:
        if re.fullmatch(rf"{kind}-\d+", value):
            return value
        self.counts[kind] += 1
        if (kind, value) not in self._named:
            self._kinds[kind] += 1
            self._named[kind, value] = f"{kind}-{self._kinds[kind]}"
        return self._named[kind, value]


def _any_of(values: list[str], words: bool = False) -> re.Pattern[str] | None:
    if not values:
        return None
    text = "|".join(map(re.escape, values))
    return re.compile(rf"(?<![\w-])(?:{text})(?![\w-])" if words else text)
