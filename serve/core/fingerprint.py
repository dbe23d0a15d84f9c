"""Compares one token of a loaded version with the one that training computed when it published the version.

The manifest of a trained version holds it in its `meta`: `{"fingerprint": {"prompt": [token ids], "token": id,
"logprob": nats}}`, or None where the weights computed no numbers. Of a version without a record, such as an imported
one, only that its numbers are finite can be said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.core.errors import FingerprintMismatch, NotFinite, WithoutNumbers
from weights.format.manifest import Manifest
from weights.format.names import MANIFEST_FILE

META_KEY = "fingerprint"


@dataclass(frozen=True)
class Record:
    """token: the most likely one after `prompt`; logprob: its log-probability in nats."""

    prompt: tuple[int, ...]
    token: int
    logprob: float


def record_of(version_path: str | Path) -> Record | None:
    """What training recorded in the version's manifest, if it did. Raises WithoutNumbers."""
    path = Path(version_path)
    meta = Manifest.read(path).meta if (path / MANIFEST_FILE).exists() else {}
    if META_KEY not in meta:
        return None
    if (found := meta[META_KEY]) is None:
        raise WithoutNumbers(f"version {path} computes no finite numbers, as its training found")
    return Record(tuple(found["prompt"]), found["token"], found["logprob"])


def check(answer: Mapping[int, float], record: Record | None, *, tolerance: float, what: str) -> dict[str, Any]:
    """Compare the most likely next tokens, by their log-probabilities in nats, with the record.

    `tolerance` in nats: other kernels round differently. `what` names the version. Raises NotFinite, or
    FingerprintMismatch.
    """
    if not all(map(math.isfinite, answer.values())):
        raise NotFinite(f"{what} does not compute finite numbers")
    if record is None:
        return {"verdict": "unrecorded"}
    here = answer.get(record.token)
    if here is None or abs(here - record.logprob) > tolerance:
        found = "is not among the most likely" if here is None else f"has log-probability {here:.3f}"
        raise FingerprintMismatch(
            f"{what} does not answer the fingerprint prompt as recorded: token {record.token} {found}, "
            f"recorded with {record.logprob:.3f}"
        )
    return {"token": record.token, "logprob": here, "verdict": "verified"}
