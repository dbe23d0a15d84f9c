"""Python's garbage collector in a process that serves others: it is not to walk what lives as long as the process."""

from __future__ import annotations

import gc

_YOUNG, _MIDDLE, _OLD = 20_000, 20, 20


def settle() -> None:
    """Call it once, when all is imported and built. Each full collection would walk it anew while every request waits:
    of a controller's 220,000 objects that takes 0.13 s, and a body of some thousand lists sets one off. What requests
    leave in cycles is little, so that collections may be rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
