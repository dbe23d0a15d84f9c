"""Prepares a trace for the oracle: arrivals, due requests and cache contents, step by step on a grid.

Every rounding favours the oracle and is applied to running sums, so that roundings do not add up.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from scheduler.simulator.engine import EngineModel

_CACHE_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class TraceArrays:
    """The trace as arrays, with the targets it is judged by. `tokens`: cache that each request takes."""

    model: EngineModel
    devices: int
    slo_ttft_s: float
    step_s: float
    steps: int
    arrival_s: np.ndarray
    tokens: np.ndarray


@dataclass(slots=True)
class GridDemand:
    """Work on the grid, in levels. `ceiling[k]`: arrived and not yet due in step k. `due[k]`: due at its end.
    `misses[misses_from[k] : misses_from[k + 1]]`: (levels, count) of the requests for which step k decides whether they
    are missed. `begun[k]`: requests whose first token is due by its end and that are not yet due. `cache[k, s]`: work
    that the caches of s devices hold. All int64."""

    step_s: float
    level_s: float
    ceiling: np.ndarray
    due: np.ndarray
    misses: np.ndarray
    misses_from: np.ndarray
    begun: np.ndarray
    cache: np.ndarray


def demand_of(
    requests: TraceArrays, due_s: np.ndarray, work_s: np.ndarray, held_s: np.ndarray, *, levels: int
) -> GridDemand:
    """`held_s`: work of each request that may remain when its first token is due; zero if all of it must be done by
    then."""
    step_s, steps = requests.step_s, requests.steps

    def running(at_s: np.ndarray, work: np.ndarray, *, early: bool) -> np.ndarray:
        """Running sum of the work, counted by the beginning of its time step (early) or by the end."""
        step = (at_s / step_s).astype(int) if early else np.ceil(at_s / step_s - 1e-9).astype(int) - 1
        kept = step < steps
        return np.cumsum(np.bincount(step[kept], work[kept], minlength=steps))

    first_s = np.minimum(requests.arrival_s + requests.slo_ttft_s, due_s)
    total, owed = running(requests.arrival_s, work_s, early=True), running(due_s, work_s, early=False)
    open_s = total - np.concatenate([[0.0], owed[:-1]])
    # One device for one step is a whole number of levels, so that capacity is never rounded.
    level_s = step_s / min(max(math.ceil(levels * step_s / max(float(open_s.max()), step_s)), 1), 64)
    floor = np.floor(owed / level_s + 1e-9).astype(int)
    before = np.concatenate([[0], floor[:-1]])
    begun = np.floor(running(first_s, work_s, early=False) / level_s + 1e-9).astype(int) - before
    misses: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    sizes = np.ceil(work_s / level_s - 1e-9).astype(int)
    ends = np.ceil(first_s / step_s - 1e-9).astype(int) - 1
    kept = ends < steps
    for (step, size), count in Counter(zip(ends[kept].tolist(), sizes[kept].tolist(), strict=True)).items():
        take = 1  # any number of the equal ones can be chosen, as sums of powers of two
        while count > 0:
            take = min(take, count)
            misses[step].append((size * take, take))
            count, take = count - take, take * 2
    return GridDemand(
        step_s=step_s,
        level_s=level_s,
        ceiling=np.ceil(total / level_s - 1e-9).astype(int) - before,
        due=floor - before,
        misses=np.array([miss for step in misses for miss in step], dtype=int).reshape(-1, 2),
        misses_from=np.concatenate([[0], np.cumsum([len(step) for step in misses])]).astype(int),
        begun=begun,
        cache=_caches(requests, due_s, held_s, level_s),
    )


def _caches(requests: TraceArrays, due_s: np.ndarray, held_s: np.ndarray, level_s: float) -> np.ndarray:
    """Per step and number of devices: the most remaining work (levels) of requests that fit their caches together."""
    found: list[np.ndarray] = []
    order = np.argsort(-held_s / requests.tokens, kind="stable")
    rank = np.empty(len(order), dtype=int)
    rank[order] = np.arange(len(order))
    at_s, tokens = requests.arrival_s, requests.tokens
    longest_s = float((due_s - at_s).max())
    per_window = max(round(_CACHE_WINDOW_S / requests.step_s), 1)
    for first in range(0, requests.steps, per_window):
        # Requests possibly alive at some time of the window; only those that arrived early enough count.
        from_s, until_s = first * requests.step_s, (first + per_window) * requests.step_s
        low, high = np.searchsorted(at_s, [from_s - longest_s - 1.0, until_s])
        alive = low + np.flatnonzero(due_s[low:high] >= from_s)
        alive = alive[np.argsort(rank[alive])]
        filled, work = np.cumsum(tokens[alive]), np.cumsum(held_s[alive])
        room = np.arange(requests.devices + 1) * float(requests.model.kv_tokens)
        # One request more than fits, rounding in the oracle's favour; zero devices hold nothing.
        last = np.searchsorted(filled, room, side="left")
        most = np.concatenate([work, work[-1:]])[np.minimum(last, len(work))] if len(work) else np.zeros(len(room))
        most[0] = 0.0
        row = np.ceil(most / level_s + 1).astype(int)
        found += [row] * min(per_window, requests.steps - first)
    return np.array(found)


def prompt_s(model: EngineModel, prompt: np.ndarray) -> np.ndarray:
    """Least device seconds per prompt: every step takes at most `chunk_tokens` and pays its fixed time."""
    return prompt * (model.per_token_s + model.base_s / model.chunk_tokens)


def whole_s(model: EngineModel, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Least device seconds per request. A step pays its fixed time once for prompts and outputs together, so it is
    charged to whichever fills more steps: chunks of prompts, seats of the batch, or the cache."""
    tokens = output - 1
    linear_s = model.per_token_s * (prompt + tokens) + model.per_context_s * tokens * prompt
    shares = (
        prompt / model.chunk_tokens,
        tokens / model.max_num_seqs,
        tokens * np.minimum((prompt + output) / model.kv_tokens, 1.0),
    )
    return linear_s + model.base_s * max(shares, key=lambda share: float(share.sum()))
