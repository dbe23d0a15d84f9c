"""Errors of a bundle; each message is for people and says what to do.

BundleError
├── Unusable        the file, the key or the machine cannot be used for this
│   └── CutShort    the end of the file is missing
├── BadSignature    the signature is not one over this content
├── NotWhole        the content is not what was signed
└── Refused         the state of the machine, the releases or the box forbids it
"""

from __future__ import annotations

from collections.abc import Sequence


class BundleError(Exception):
    """Base of everything that `appliance.bundle` raises."""


class Unusable(BundleError):
    pass


class CutShort(Unusable):
    pass


class BadSignature(BundleError):
    pass


class NotWhole(BundleError):
    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Refused(BundleError):
    pass
