"""Makes a report from a scan: numbers, and for every kind of find the first examples, by line."""

from __future__ import annotations

from typing import Any

import numpy as np

from train.data_checks.lengths import curve
from train.data_checks.options import CHECKS, CheckOptions
from train.data_checks.scan import Scan


def report(scan: Scan, options: CheckOptions) -> dict[str, Any]:
    """The report as plain JSON values. `usable`: whether a job would take the file, as far as a check knows."""
    good = scan.usable()
    tokens = np.frombuffer(scan.tokens, np.uint32)[good]
    made = [name for name in CHECKS if _asked(name, scan, options)]
    return {
        "object": "file.check",
        "files": [
            {"file": source.name, "bytes": source.bytes, "sha256": source.sha256, "shape": source.shape}
            for source in scan.sources
        ],
        "examples": len(scan),
        "usable": len(good) > 0 and not scan.found["bad_lines"].count and not scan.found["empty"].count,
        "checks": {name: _finding(scan, name) for name in made},
        "left_out": [name for name in CHECKS if name not in made],
        "keys_left_out": dict(sorted(scan.left_out.items())),
        "languages": dict(scan.languages.most_common(20)),
        "tokens": {
            "total": int(tokens.sum(dtype=np.int64)),
            "counted_examples": scan.counted,
            "exact": scan.counted >= len(good) > 0,
            "most_allowed": scan.max_tokens,
        },
        "lengths": curve(tokens),
    }


def _asked(name: str, scan: Scan, options: CheckOptions) -> bool:
    needed = {"too_long": scan.max_tokens is not None, "contaminated": options.against is not None}
    return options.does(name) and needed.get(name, True)


def _finding(scan: Scan, name: str) -> dict[str, Any]:
    found = scan.found[name]
    return {
        "count": found.count,
        "share": round(found.count / max(1, len(scan)), 6),
        **({"kinds": dict(found.kinds.most_common(20))} if found.kinds else {}),
        "first": [_shown(scan, one) for one in found.shown],
    }


def _shown(scan: Scan, one: dict[str, Any]) -> dict[str, Any]:
    """Files are named where there are several."""
    if len(scan.sources) == 1:
        return {name: value for name, value in one.items() if name != "source"}
    return {name: scan.sources[value].name if name in ("source", "of_source") else value for name, value in one.items()}
