"""An upper bound on what any scheduler could have trained, knowing the future.

It is a bound by relaxation: the oracle places work freely, never waits for a choice, moves a group of ranks without
disturbing the others, and fills every batch to the brim. What it keeps is what no scheduler can escape:

1. Work. Requests whose time from arrival to their latest allowed end lies within a window need at least the device
   time that the engine model charges their tokens at the fullest possible batch: prompts and outputs at the cost per
   token, each output token reading its context, and a share of the fixed time of a step no smaller than the batch
   limit, the chunk size and the KV cache allow.
2. Presence. The first token of a request must come within the target after its arrival, so at least one device serves
   but in gaps between arrivals; a gap is worth taking only beyond the time a device needs there and back.

Per window the larger of the two counts (window lengths are tried, the best bound is taken). The oracle may miss the
targets of as many requests as the run it is compared with: it chooses those that gain it most.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.sim_engine import EngineModel
from scheduler.sim_trace import Requests, TraceJob
from scheduler.sim_world import VerbTimes


@dataclass(slots=True)
class _Work:
    """Sums over requests of what they cost at least: linear seconds, and shares of three limits on a step."""

    linear_s: float = 0.0
    chunks: float = 0.0
    seats: float = 0.0
    caches: float = 0.0

    def add(self, model: EngineModel, prompt: int, output: int) -> None:
        self.linear_s += model.per_token_s * (prompt + output - 1) + model.per_context_s * (output - 1) * prompt
        self.chunks += prompt / model.chunk_tokens
        self.seats += (output - 1) / model.max_num_seqs
        self.caches += (output - 1) * min((prompt + output) / model.kv_tokens, 1.0)

    def least_device_s(self, model: EngineModel) -> float:
        """Steps enough for each of the limits; every step pays its fixed time once."""
        return self.linear_s + model.base_s * max(self.chunks, self.seats, self.caches)

    def most_saved_s(self, model: EngineModel) -> float:
        """No less than what leaving these requests out can take off `least_device_s` of any set with them."""
        return self.linear_s + model.base_s * (self.chunks + self.seats + self.caches)


def serving_device_s(
    requests: Requests,
    model: EngineModel,
    times: VerbTimes,
    *,
    attainment: float,
    slo_ttft_s: float,
    slo_tpot_s: float,
) -> float:
    """A lower bound on the device seconds that serving holds from the first arrival to the last."""
    count, horizon_s = len(requests), requests.horizon_s
    missed = int((1.0 - attainment) * count + 1e-9)
    arrivals, prompts, outputs = requests.arrival_s, requests.prompt, requests.output
    saved = []
    for n in range(count):
        one = _Work()
        one.add(model, prompts[n], outputs[n])
        saved.append(one.most_saved_s(model))
    merged = [arrivals[min(n + 2, count - 1)] - arrivals[n] + slo_ttft_s for n in range(count - 1)]
    less_work_s = sum(sorted(saved, reverse=True)[:missed])
    less_presence_s = sum(sorted(merged, reverse=True)[:missed])

    best = 0.0
    for length_s in (60.0, 300.0, 900.0, 3600.0, horizon_s):
        windows = int(horizon_s / length_s) if length_s else 0
        work, present = [_Work() for _ in range(windows)], [length_s] * windows
        for n in range(count):
            window = int(arrivals[n] / length_s) if windows else 0
            end_s = arrivals[n] + slo_ttft_s + (outputs[n] - 1) * slo_tpot_s
            if window < windows and end_s <= (window + 1) * length_s:
                work[window].add(model, prompts[n], outputs[n])
        for n in range(count - 1):
            begin_s, end_s = arrivals[n], arrivals[n + 1] + slo_ttft_s
            worth_s = end_s - begin_s - times.there_and_back_s
            window = int(begin_s / length_s) if windows else 0
            while worth_s > 0 and window < windows and window * length_s < end_s:
                # Where in the gap the device is away is the oracle's choice: charged to every window it touches.
                inside_s = min(end_s, (window + 1) * length_s) - max(begin_s, window * length_s)
                present[window] -= min(worth_s, inside_s, present[window])
                window += 1
        needed = [w.least_device_s(model) for w in work]
        both_s = sum(map(max, needed, present)) - max(less_work_s, less_presence_s)
        best = max(best, both_s, sum(needed) - less_work_s)
    return best


def training_device_s(
    requests: Requests,
    model: EngineModel,
    times: VerbTimes,
    *,
    devices: int,
    jobs: list[TraceJob] | None,
    attainment: float,
    slo_ttft_s: float,
    slo_tpot_s: float,
) -> float:
    """An upper bound on device seconds of training within the horizon; `jobs` None: there is always work."""
    horizon_s = requests.horizon_s
    serving_s = serving_device_s(
        requests, model, times, attainment=attainment, slo_ttft_s=slo_ttft_s, slo_tpot_s=slo_tpot_s
    )
    bound_s = devices * horizon_s - serving_s
    if jobs is not None:
        offered_s = sum(
            j.devices * min(j.duration_s, max(horizon_s - j.at_s - times.start_group_s, 0.0)) for j in jobs
        )
        bound_s = min(bound_s, offered_s)
    return max(bound_s, 0.0)
