"""Computes and compares fingerprints of versions: what a model answers to one fixed prompt.

The prompt is a fixed walk over the vocabulary, so that it needs no tokenizer and touches many embedding rows; one
forward pass gives the first-ranked token and its log-probability at every position (greedy, teacher-forced), which
depends on every weight. The first trusted load of a version, in which the loader writes plain parameters as vLLM does,
records it; every later wake and swap of that version must reproduce it before it takes traffic.

Two answers agree when every log-probability lies within a tolerance, and every token is the same unless both
candidates are within that tolerance of each other: bf16 kernels round differently on another batch shape.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.replace_file import replace_file
from serve.core.errors import FingerprintMismatch, NotFinite
from weights.format.names import MANIFEST_FILE
from weights.memory.lease import StoredVersion

PROMPT_TOKENS = 4
_HASH_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Fingerprint:
    """`tokens` and `logprobs` (nats) per prompt position; or `embedding` of a pooling model.

    `origin` is "load" (an engine's first load, which is trusted) or "transfer" (a version first loaded in a swap).
    """

    origin: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()

    @classmethod
    def from_answer(cls, origin: str, answer: Mapping[str, Any]) -> Fingerprint:
        return cls(origin, **{key: tuple(value) for key, value in answer.items()})

    @property
    def digest(self) -> str:
        """Short name of this fingerprint for logs and records; equal only for identical answers."""
        body = json.dumps([self.tokens, self.logprobs, self.embedding])
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, (*self.logprobs, *self.embedding)))

    def disagreement(self, other: Fingerprint, tolerance: float) -> str | None:
        """Return why `other` is another model's answer, or None. `tolerance` in nats (or of a cosine, embeddings)."""
        if not (self.finite and other.finite):
            return "not all log-probabilities are finite numbers"
        if self.embedding or other.embedding:
            cosine = _cosine(self.embedding, other.embedding)
            return None if cosine >= 1 - tolerance / 10 else f"embedding's cosine is {cosine:.4f}"
        if len(self.tokens) != len(other.tokens):
            return f"{len(other.tokens)} positions instead of {len(self.tokens)}"
        for position, (a, b) in enumerate(zip(self.logprobs, other.logprobs, strict=True)):
            if abs(a - b) > tolerance:
                return f"log-probability at position {position} is {b:.4f} instead of {a:.4f}"
        # If the top token's log-probability is this close, one different token can be a near tie; many at once cannot.
        different = sum(a != b for a, b in zip(self.tokens, other.tokens, strict=True))
        if different > len(self.tokens) // 4:
            return f"{different} of {len(self.tokens)} greedy tokens differ"
        return None


def _cosine(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    if len(a) != len(b) or not a:
        return -1.0
    norm = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else -1.0


def fingerprint_prompt(vocab_size: int) -> list[int]:
    """PROMPT_TOKENS token ids spread over the vocabulary by the golden ratio; the same for every model of that size."""
    return [int(vocab_size * ((index + 1) * 0.6180339887498949 % 1.0)) for index in range(PROMPT_TOKENS)]


def version_key(
    version_path: str | Path,
    *,
    dtype: str,
    kind: str,
    tensor_parallel: int,
    task: str,
    rounding: Sequence[str] = (),
) -> str:
    """Return a version's identity combined with everything that changes its rounding. rounding: such arguments of its
    engine (serve.core.model_settings): quantised when it is loaded, a version answers as another model does.

    A stored version never changes under its manifest's name and time of creation (checksums are added later, so
    the manifest's bytes are not its identity). The headers, sizes and modification times of its files identify a
    directory without a manifest.
    """
    path, digest = Path(version_path), hashlib.sha256()
    digest.update(json.dumps([dtype, kind, tensor_parallel, task, PROMPT_TOKENS, *rounding]).encode())
    digest.update((path / "config.json").read_bytes())
    if (path / MANIFEST_FILE).exists():
        stored = StoredVersion.read(path)
        digest.update(json.dumps([stored.kind, stored.model, stored.version, stored.manifest.created_s]).encode())
    else:
        for file in sorted(path.glob("*.safetensors")):
            facts = file.stat()
            digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
            with open(file, "rb") as stream:
                digest.update(stream.read(_HASH_BLOCK_BYTES))
    return digest.hexdigest()


class FingerprintBook:
    """Recorded fingerprints of one box, one small file per version key, shared by its engines."""

    def __init__(self, shm_root: str | Path):
        self._dir = Path(shm_root) / "fingerprints"

    def find(self, key: str) -> Fingerprint | None:
        try:
            data = json.loads((self._dir / f"{key}.json").read_text())
        except FileNotFoundError:
            return None
        return Fingerprint.from_answer(data.pop("origin"), data)

    def record(self, key: str, fingerprint: Fingerprint) -> None:
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._dir / f"{key}.json", json.dumps(asdict(fingerprint)).encode())

    def open(self, key: str, *, what: str, tolerance: float) -> FingerprintRecord:
        """Read the record of one version. `what` names the version in errors; `tolerance` as in `disagreement`."""
        return FingerprintRecord(self, key, what, tolerance, self.find(key))


@dataclass(frozen=True)
class FingerprintRecord:
    """The recorded fingerprint of one version, read before a pause, which then needs only arithmetic to check it."""

    book: FingerprintBook
    key: str
    what: str
    tolerance: float
    known: Fingerprint | None

    def check(self, answer: Mapping[str, Any], origin: str) -> Fingerprint:
        """Return the fingerprint of an answer. Raises FingerprintMismatch if it differs from the version's record, as
        NotFinite if it is no numbers.

        A trusted load overrides a record made by a transfer, and so reveals a wrong record.
        """
        fingerprint = Fingerprint.from_answer(origin, answer)
        known = fingerprint if self.known is None or self._yields_to(fingerprint) else self.known
        reason = known.disagreement(fingerprint, self.tolerance)
        if reason is not None:
            mismatch = FingerprintMismatch if fingerprint.finite else NotFinite
            raise mismatch(f"{self.what} does not answer the fingerprint prompt as recorded: {reason}")
        return fingerprint

    def keep(self, fingerprint: Fingerprint) -> dict[str, Any]:
        """Record a checked fingerprint if it is the first or the more trusted one. Returns digest and verdict."""
        first = self.known is None or self._yields_to(fingerprint)
        if first:
            self.book.record(self.key, fingerprint)
        return {"digest": fingerprint.digest, "verdict": "recorded" if first else "verified"}

    def _yields_to(self, fingerprint: Fingerprint) -> bool:
        return self.known.origin == "transfer" and fingerprint.origin == "load"
