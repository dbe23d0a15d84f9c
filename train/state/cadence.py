"""How often a running job writes snapshots: they take 2 % of its time, and a crash loses no more than 5 minutes."""

from __future__ import annotations

SHARE = 0.02
SHORTEST_S, LONGEST_S = 5.0, 300.0


def every_s(cost_s: float) -> float:
    """Seconds between snapshots of this cost."""
    return min(LONGEST_S, max(SHORTEST_S, cost_s / SHARE))
