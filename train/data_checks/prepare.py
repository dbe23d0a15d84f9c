"""Writes a new data file from what a scan has read, without the examples that the user wants left out, and reports what
it did.

It changes only what the user asked for: a line that stays has the same bytes, unless personal data in it is masked, or
files of different shapes are mixed and all their examples become chats.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from train.data.formats import Record
from train.data_checks.options import CHECKS, BadOption, PrepareOptions
from train.data_checks.personal_data import masked
from train.data_checks.scan import BIT, Scan
from train.data_checks.texts import with_strings

_DEFAULT_DROPS = "bad_lines", "empty"


class Unusable(Exception):
    """The result would be a file that cannot be trained on; the text says which options to change."""


def prepare(scan: Scan, options: PrepareOptions, target: Path, validation: Path | None = None) -> dict[str, Any]:
    """Write the examples that stay to `target`, and with `options.split` a share of them to `validation` (both JSONL,
    mode 0600); the lineage of both. Raises Unusable, BadOption and OSError; then neither is there."""
    kept, dropped = _kept(scan, options)
    kept = _mixed(scan, options, kept, dropped)
    parts = {target: kept}
    if options.split is not None:
        if validation is None:
            raise BadOption("a split needs a place for the validation file")
        held_out = _held_out(scan, options, kept)
        parts = {target: kept[~held_out], validation: kept[held_out]}
    if not all(len(part) for part in parts.values()):
        raise Unusable("no example would be left in " + ("one of the two files" if len(parts) > 1 else "the new file"))
    masks: Counter[str] = Counter()
    made: list[dict[str, Any]] = []
    begun: list[Path] = []
    try:
        for path, part in parts.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                begun.append(path)
                made.append({"file": str(path), **_write(scan, options, out, _ordered(scan, options, part), masks)})
    except BaseException:
        for path in begun:  # and none that was there before
            path.unlink(missing_ok=True)
        raise
    return {
        "object": "file.lineage",
        "made": made,
        "from": [{"file": source.name, "bytes": source.bytes, "sha256": source.sha256} for source in scan.sources],
        "asked": _asked(options),
        "read_examples": len(scan),
        "dropped": {name: len(lines) for name, lines in dropped.items()},
        "dropped_lines": dropped,
        "masked": dict(masks),
    }


def _kept(scan: Scan, options: PrepareOptions) -> tuple[np.ndarray, dict[str, list[list[int]]]]:
    """Indices that stay, and by check the [source, line] or [source, line, source, line of what it repeats] that go,
    each under the first check that found it. Dropping near duplicates also drops exact ones."""
    flags = np.frombuffer(scan.flags, np.uint16)
    drop = {*options.drop, *(("duplicates",) if "near_duplicates" in options.drop else ())}
    for name in _DEFAULT_DROPS:
        count = int(((flags & BIT[name]) != 0).sum())
        if count and name not in drop:
            first = scan.found[name].shown[0]["line"]
            raise Unusable(f"{count} examples are {name.replace('_', ' ')}, the first on line {first}; drop them too")
    gone, dropped = np.zeros(len(flags), bool), dict[str, list[list[int]]]()
    for name in sorted(CHECKS, key=lambda name: name == "near_duplicates"):
        if name in drop:
            new = np.flatnonzero(((flags & BIT[name]) != 0) & ~gone)
            if name == "near_duplicates":  # what it resembles has to stay, or nothing would
                new = np.array([index for index in new if not gone[scan.of[int(index)]]], np.int64)
            gone[new] = True
            dropped[name] = [_dropped(scan, int(index)) for index in new]
    return np.flatnonzero(~gone), dropped


def _dropped(scan: Scan, index: int) -> list[int]:
    of = scan.of.get(index)
    return [*scan.place(index), *(scan.place(of) if of is not None else ())]


def _mixed(scan: Scan, options: PrepareOptions, kept: np.ndarray, dropped: dict[str, list[list[int]]]) -> np.ndarray:
    """Takes each source's share of the largest total for which every source has enough."""
    if not options.mix:
        return kept
    shares = _shares(scan, options)
    sources = np.frombuffer(scan.source, np.uint16)[kept]
    sizes = np.bincount(sources, minlength=len(shares))
    total = min(size / share for size, share in zip(sizes, shares, strict=True) if share)
    random = np.random.Generator(np.random.PCG64(options.seed))
    taken = np.zeros(len(kept), bool)
    for source, share in enumerate(shares):
        own = np.flatnonzero(sources == source)
        taken[random.permutation(own)[: round(total * share)]] = True
    dropped["mixed_out"] = [_dropped(scan, int(index))[:2] for index in kept[~taken]]
    return kept[taken]


def _shares(scan: Scan, options: PrepareOptions) -> list[float]:
    """Raises BadOption."""
    given = {path.resolve(): share for path, share in options.mix}
    shares = [given.pop(source.path.resolve(), None) for source in scan.sources]
    unsaid = shares.count(None)
    left = 1 - sum(share for share in shares if share is not None)
    if given:
        raise BadOption(f"{next(iter(given))} is in the mix, and was not read")
    if unsaid and left <= 1e-9 or not unsaid and left > 1e-9:
        raise BadOption("the shares of a mix are together 1, with what is left for the files whose share is not said")
    return [left / unsaid if share is None else share for share in shares]


def _held_out(scan: Scan, options: PrepareOptions, kept: np.ndarray) -> np.ndarray:
    """(kept,) bool: which examples go into the validation file. Their content decides, so that equal and nearly equal
    examples are on the same side, and an example stays on its side when others are added."""
    roots = np.array([scan.root(int(index)) for index in kept], np.int64)
    salt = np.uint64(int.from_bytes(hashlib.blake2b(str(options.seed).encode(), digest_size=8).digest()))
    drawn = (scan.digests()[roots, 0] ^ salt) * np.uint64(0x9E3779B97F4A7C15)
    held_out = (drawn >> np.uint64(11)).astype(np.float64) / 2.0**53 < options.split
    if not held_out.any() and len(set(roots)) > 1:
        held_out = roots == roots[int(np.argmin(drawn))]
    return held_out


def _ordered(scan: Scan, options: PrepareOptions, part: np.ndarray) -> np.ndarray:
    if options.order == "length":
        return part[np.argsort(np.frombuffer(scan.tokens, np.uint32)[part], kind="stable")]
    # Otherwise the files of a mix would follow each other, and a run would learn them one after the other.
    if options.order == "shuffled" or options.mix:
        return np.random.Generator(np.random.PCG64(options.seed + 1)).permutation(part)
    return part


def _write(scan: Scan, options: PrepareOptions, out: BinaryIO, part: np.ndarray, masks: Counter[str]) -> dict[str, Any]:
    as_chats = len({source.shape for source in scan.sources}) > 1
    digest, size = hashlib.sha256(), 0
    for index in part:
        line = _line(scan, options, int(index), as_chats, masks) + b"\n"
        digest.update(line)
        size += out.write(line)
    out.flush()
    os.fsync(out.fileno())
    return {"examples": len(part), "bytes": size, "sha256": digest.hexdigest()}


def _line(scan: Scan, options: PrepareOptions, index: int, as_chats: bool, masks: Counter[str]) -> bytes:
    """The bytes of an example as in its file, but on one line and with personal data masked."""
    if as_chats:
        return orjson.dumps(_without_personal_data(scan.made(index), options, masks))
    raw = scan.raw(index)
    found = options.mask and scan.flags[index] & BIT["personal_data"]
    if found or b"\n" in raw:
        return orjson.dumps(_without_personal_data(scan.record(index), options, masks))
    return raw


def _without_personal_data(record: Record, options: PrepareOptions, masks: Counter[str]) -> Record:
    if not options.mask:
        return record

    def change(text: str) -> str:
        changed, kinds = masked(text)
        masks.update(kinds)
        return changed

    return with_strings(record, change)


def _asked(options: PrepareOptions) -> dict[str, Any]:
    return {
        "drop": list(options.drop),
        "mask": options.mask,
        "split": options.split,
        "mix": [[str(path), share] for path, share in options.mix],
        "order": options.order,
        "seed": options.seed,
    }
