"""Writes a new data file from a checked one, without the examples that the user wants left out.

A line that stays has the same bytes, unless personal data in it is masked.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson

from train.data.lines import examples, parse
from train.data_checks.check import Check, Row
from train.data_checks.personal_data import Match, mask_record


class Unusable(ValueError):
    """The result would be a file that cannot be trained on; the text says which options to change."""


def prepare(
    check: Check, path: Path, targets: list[Path], *, drop: Collection[str], mask: bool, split: float | None
) -> dict[str, Any]:
    """Write the examples of `path` that stay; return the lineage.

    Args:
        check: has read `path`.
        targets: the new file and, for a split, the validation file (both JSONL, mode 0600).
        drop: names of checks whose matches are left out.
        mask: whether personal data is masked.
        split: share of the examples that go into the validation file.

    Raises:
        Unusable, OSError: then no target is there that was not there before.
    """
    dropped = _dropped(check, drop)
    # Their content decides, so that (nearly) equal examples are on one side, and stay there when others are added.
    target_of = [
        None if name else int(split is not None and _draw(check, row) < split)
        for name, row in zip(dropped, check.rows, strict=True)
    ]
    if not all(number in target_of for number in range(len(targets))):
        raise Unusable("no example would be left in " + ("one of the two files" if split else "the new file"))
    if there := next((target for target in targets if target.exists()), None):
        raise FileExistsError(f"{there} exists")
    matches: list[Match] = []
    try:
        made = [
            _write(target, check, path, [one == number for one in target_of], mask, matches)
            for number, target in enumerate(targets)
        ]
    except BaseException:
        for target in targets:
            target.unlink(missing_ok=True)
        raise
    return {
        "object": "file.lineage",
        "made": made,
        "from": {"file": str(path), "bytes": check.bytes, "sha256": check.sha256, "examples": len(check.rows)},
        "asked": {"drop": list(drop), "mask": mask, "split": split},
        "dropped": dict(Counter(filter(None, dropped))),
        "masked": dict(Counter(match.kind for match in matches)),
    }


def _dropped(check: Check, drop: Collection[str]) -> list[str | None]:
    """For each row the check by which it is dropped, None if it stays. Dropping near duplicates also drops exact
    ones; a near duplicate stays if the example that it resembles goes. Raises Unusable."""
    drop = {*drop, *(("duplicates",) if "near_duplicates" in drop else ())}
    for name in ("bad_lines", "empty"):
        if (found := check.found[name]).count and name not in drop:
            bad, line = name.replace("_", " "), found.first[0]["line"]
            raise Unusable(f"{found.count} examples are {bad}, the first on line {line}; drop them too")
    names = [name for name in check.found if name in drop and name != "near_duplicates"]
    dropped: list[str | None] = [next((name for name in names if name in row.found), None) for row in check.rows]
    for index, row in enumerate(check.rows if "near_duplicates" in drop else ()):
        if "near_duplicates" in row.found and row.of is not None and not dropped[index] and not dropped[row.of]:
            dropped[index] = "near_duplicates"
    return dropped


def _draw(check: Check, row: Row) -> float:
    while row.of is not None:
        row = check.rows[row.of]
    return int.from_bytes(row.digest[:8]) / 2**64


def _write(
    target: Path, check: Check, path: Path, wanted: list[bool], mask: bool, matches: list[Match]
) -> dict[str, Any]:
    digest = hashlib.sha256()
    with (
        open(path, "rb") as file,
        os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out,
    ):
        for row, example, wants in zip(check.rows, examples(file), wanted, strict=True):
            if not wants or not isinstance(example.raw, bytes):
                continue
            line = example.raw.strip(b"\r\n")
            if mask and "personal_data" in row.found:
                line = orjson.dumps(mask_record(parse(line), matches))
            digest.update(line + b"\n")
            out.write(line + b"\n")
        out.flush()
        os.fsync(out.fileno())
        return {"file": str(target), "examples": sum(wanted), "bytes": out.tell(), "sha256": digest.hexdigest()}
