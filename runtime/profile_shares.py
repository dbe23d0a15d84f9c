"""Where the time of profiled steps went: what torch's profiler saw, by kind of work and by operator. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

MOST_STEPS = 50
# Rows of a rank in one profile: with adapters of 8 B parameters a row has 60,000 events, on a GPU more, and each takes
# torch a tenth of a millisecond and 4 kB after the profile has ended, while all other ranks wait.
MOST_ROWS = 8
LIMIT_S = 60.0  # a step later a profile ends with the steps that it has
MOST_EVENTS = 400_000  # of one trace: some 100 MB before it is compressed
SHOWN = 20
INPUT = "input"  # what stands around the preparation of a step's input, by torch.profiler.record_function
_HOST = "CPU"  # of torch.autograd.DeviceType
# Kernels that join GPUs over NVLink in place of NCCL's: vLLM's own (vllm/distributed/device_communicators,
# custom_all_reduce.py) and those of torch's symmetric memory (symm_mem.py there).
_JOINING = ("cross_device_reduce", "all_reduce_kernel", "all_gather_kernel")


def shares(events: Sequence[Any], seconds: float, collectives: str) -> dict[str, Any]:
    """{"share": seconds by compute, communication, input and idle; "operators": the SHOWN longest, each {"name",
    "kind", "seconds", "count"}}.

    On a device its own time counts, on the host that of the thread which steps. idle: what is left of `seconds`: on a
    device it waits, on the host that thread is in no operator (Python, or it waits for another rank).
    """
    # Not annotations (torch.profiler.record_function, a collective's and an optimizer's own among them): the profiler
    # gives each a range on the device too, over the kernels that stand beside it.
    on_device = [event for event in events if event.device_type.name != _HOST and not event.is_user_annotation]
    stepping = max(_by_thread(events).items(), key=lambda item: item[1], default=(0, 0.0))[0]
    measured = on_device or [
        event for event in events if event.thread == stepping or _collective(event.name, collectives)
    ]
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for event in measured:
        micros = event.device_time_total if on_device else event.self_cpu_time_total
        spent[event.name] += micros / 1e6
        count[event.name] += 1
    if on_device:
        spent[INPUT] += sum(event.cpu_time_total for event in events if event.name == INPUT) / 1e6
    share = {"compute": 0.0, "communication": 0.0, "input": 0.0}
    for name, took in spent.items():
        share[_kind(name, collectives)] += took
    share["idle"] = max(0.0, seconds - sum(share.values()))
    longest = sorted(spent, key=lambda name: -spent[name])[:SHOWN]
    operators = [
        {"name": name[:120], "kind": _kind(name, collectives), "seconds": spent[name], "count": count[name]}
        for name in longest
    ]
    return {"share": share, "operators": operators}


def _by_thread(events: Sequence[Any]) -> dict[int, float]:
    spent: dict[int, float] = defaultdict(float)
    for event in events:
        if event.device_type.name == _HOST and not event.is_async:
            spent[event.thread] += event.self_cpu_time_total
    return spent


def _kind(name: str, collectives: str) -> str:
    return "input" if name == INPUT else "communication" if _collective(name, collectives) else "compute"


def _collective(name: str, collectives: str) -> bool:
    return name.startswith(("c10d::", "record_param_comms", f"{collectives}:", collectives)) or any(
        part in name for part in _JOINING
    )
