"""Summarises the lengths of examples: percentiles, and a curve in one line of text."""

from __future__ import annotations

from typing import Any

import numpy as np

PERCENTILES = (5, 25, 50, 75, 95, 99)
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 24


def curve(lengths: np.ndarray) -> dict[str, Any]:
    """{"shortest", "p5" … "p99", "longest", "mean", "curve", "edges"} of (n,) lengths; `curve` draws how many there are
    between two `edges`, which grow by the same factor each. Empty for no lengths."""
    if not len(lengths):
        return {}
    shortest, longest = int(lengths.min()), int(lengths.max())
    edges = np.geomspace(max(1, shortest), max(2, shortest + 1, longest), _COLUMNS + 1)
    counts, _ = np.histogram(np.clip(lengths, edges[0], edges[-1]), bins=edges)
    return {
        "shortest": shortest,
        **{f"p{p}": int(np.percentile(lengths, p, method="lower")) for p in PERCENTILES},
        "longest": longest,
        "mean": round(float(lengths.mean()), 1),
        "curve": sparkline(counts),
        "edges": [int(edges[0]), int(edges[-1])],
    }


def sparkline(counts: np.ndarray) -> str:
    """One character for each count, by its height; a space for none."""
    most = max(1, int(counts.max()))
    return "".join(" " if not n else _BARS[min(len(_BARS) - 1, int(n * len(_BARS) / most))] for n in counts)
