"""Counts for the load report: of a model, and of the versions of a model with a canary. Pure: callers pass the time.

Times are counted in buckets a quarter of a power of two wide, so that a 95th percentile of all gateways together is
known to 19 %: the bounds that the controller compares with are far wider (1.5 x)."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, Final

from appliance.gateway.core.table import Model

SHORTEST_S = 0.001
BUCKETS_PER_DOUBLING = 4
RECENT_S: Final = 60.0
_COMPUTED_TOKENS: Final = 1e6
"""Prompt tokens after which those before count half."""
_STREAMS: Final = 48
"""For the rate of prompts: this many new streams replace those of old engines and weights."""
LEAST_SAMPLES: Final = 12
_TELLING: Final = 1.2
"""Long prompts must take longer than short ones by this factor; otherwise the data determine no rate."""


class ModelLoad:
    """Counts and recent times of one model since it is in the table. prefills: prompt tokens and seconds to the first
    byte of streams that were alone on their replica. Times in seconds, moments in Unix time."""

    def __init__(self) -> None:
        self._last_request_s: float | None = None
        self._prompts = Counter[int]()
        self._estimated = self._computed = 0.0
        self._tpot: deque[tuple[float, float]] = deque(maxlen=256)
        self.prefills: deque[tuple[int, float]] = deque(maxlen=_STREAMS)

    def arrived(self, prompt_tokens: int, now_s: float) -> None:
        """Count an admitted request."""
        self._last_request_s = now_s
        self._prompts[bucket(prompt_tokens, 1.0)] += 1

    def computed(self, estimated: int, tokens: int) -> None:
        """Count the tokens of a prompt that an engine computed, not those of its cache. estimated: all its tokens."""
        fade = 1.0 if self._estimated < _COMPUTED_TOKENS else 0.5
        self._estimated = self._estimated * fade + estimated
        self._computed = self._computed * fade + tokens

    def paced(self, token_s: float, now_s: float) -> None:
        """Count a stream that has ended by its mean time from one token to the next."""
        self._tpot.append((now_s, token_s))

    def report(self, now_s: float) -> dict[str, Any]:
        """This model's part of the load report. tpot_p95_s: of streams of the last minute. computed_part: prompt tokens
        that engines computed for an estimated one (fewer where prompts share a cached prefix). prefill_tokens_per_s: of
        one replica. None for what is unknown. arrived_prompts: requests by `bucket` of their prompt
        tokens (from 1)."""
        recent = sorted(seconds for at_s, seconds in self._tpot if at_s >= now_s - RECENT_S)
        return {
            "last_request_s": self._last_request_s,
            "tpot_p95_s": recent[int(len(recent) * 0.95)] if recent else None,
            "computed_part": self._computed / self._estimated if self._estimated else None,
            "prefill_tokens_per_s": prefill_tokens_per_s(self.prefills),
            "arrived_prompts": self._prompts,
        }


def prefill_tokens_per_s(samples: Sequence[tuple[int, float]]) -> float | None:
    """Tokens per second from (prompt tokens, seconds to the first token) on idle replicas; None if undetermined.

    The slope of the resistant line through the outer thirds (Tukey 1977, "Exploratory Data Analysis", chapter 5): the
    part of the time that does not grow with the prompt drops out, and single slow ones move no median. Tokens are
    counted as routing estimates them; whatever its error, the work of the same estimate comes out right."""
    if len(samples) < LEAST_SAMPLES:
        return None
    ordered, third = sorted(samples), len(samples) // 3
    short, long = (median(n for n, _ in part) for part in (ordered[:third], ordered[-third:]))
    short_s, long_s = (median(s for _, s in part) for part in (ordered[:third], ordered[-third:]))
    if long <= short or short_s <= 0 or long_s < _TELLING * short_s:
        return None
    return (long - short) / (long_s - short_s)


def bucket(value: float, least: float = SHORTEST_S) -> int:
    """Bucket i ends at least * 2 ** (i / BUCKETS_PER_DOUBLING)."""
    return max(0, math.ceil(math.log2(max(value, least) / least) * BUCKETS_PER_DOUBLING))


class Comparison:
    """Every attempt counts for the version it was sent to, so a request that fails on the canary and succeeds on the
    other version is an error of the canary, and so is a refusal. Clients that leave count for none. canaries: {model:
    {"since_s", "versions": {version: {"requests", "errors", "first_byte", "duration"}}}}, the last two numbers of
    successful requests by bucket of their time from sending, as the load report has them."""

    def __init__(self) -> None:
        self.canaries: dict[str, dict[str, Any]] = {}

    def apply(self, models: Iterable[Model]) -> None:
        """A new canary starts at zero; the counts of a removed one are dropped."""
        before, self.canaries = self.canaries, {}
        for model in models:
            if model.canary is not None:
                new = {"since_s": model.canary.since_s, "versions": {}}
                known = before.get(model.name, new)
                self.canaries[model.name] = known if known["since_s"] == new["since_s"] else new

    def add(self, model: str, version: str, *, failed: bool, first_byte_s: float | None, duration_s: float) -> None:
        """Count a finished attempt. first_byte_s: None where its times say nothing."""
        if model not in self.canaries:
            return
        new = {"requests": 0, "errors": 0, "first_byte": Counter[int](), "duration": Counter[int]()}
        counts = self.canaries[model]["versions"].setdefault(version, new)
        counts["requests"] += 1
        counts["errors"] += failed
        if not failed and first_byte_s is not None:
            counts["first_byte"][bucket(first_byte_s)] += 1
            counts["duration"][bucket(duration_s)] += 1
