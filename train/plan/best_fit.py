"""Which examples share a row: best fit decreasing. Pure; the plan of a job counts with it and the run packs with it, so
that both have the same number of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


def best_fit(decreasing: Iterable[tuple[int, int]], capacity: int) -> list[list[int]]:
    """Groups of examples whose lengths sum to at most `capacity` tokens; every example in exactly one.

    decreasing: (number, length) of each example, the longest first, each length at most `capacity`. O(n). Wastes under
    a percent on usual data (Ding et al., "Fewer Truncations Improve Language Modeling", 2024), and much where few
    examples fit a row.
    """
    packs: list[list[int]] = []
    with_space: dict[int, list[int]] = defaultdict(list)
    spaces = 0  # bit s is set when some pack has s tokens left: the best fit is one bit operation away
    for index, length in decreasing:
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            pack = with_space[space].pop()
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            space, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(index)
        with_space[space - length].append(pack)
        spaces |= 1 << (space - length)
    return packs
