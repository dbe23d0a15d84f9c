"""Judges what was measured. Pure: facts in, one verdict per line out.

A limit is physical: what the part can do at most. A threshold is what a healthy machine reaches; those of links and
collectives are the ones of Azure's node health checks (Azure/azurehpc-health-checks, nvbandwidth and NCCL), the others
are shares of the limit or of what the same run measured. An error is a distance over the length of what is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

State = Literal["ok", "fail", "skip"]
GB = 1e9


@dataclass(frozen=True, slots=True)
class Family:
    """Of a GPU: what its link, memory and tensor cores do at most, and the least that a healthy one reaches, in GB/s
    and TFLOP/s. `peers`: NCCL's bus bandwidth of eight of them joined by NVLink."""

    link: float
    link_least: float
    memory: float
    memory_least: float
    bf16: float
    peers: float | None = None


FAMILIES: Mapping[str, Family] = {
    "H200": Family(63, 48, 4800, 3600, 989, 431),
    "H100 80GB HBM3": Family(63, 48, 3350, 2500, 989, 460),
    "H100 PCIe": Family(63, 48, 2000, 1500, 756),
    "H100 NVL": Family(63, 48, 3900, 2900, 835, 208),
    "A100-SXM4-80GB": Family(31.5, 21, 2039, 1173, 312, 228),
    "A100": Family(31.5, 21, 1555, 1000, 312),
    "RTX 4090": Family(31.5, 21, 1008, 750, 165),
    "L40S": Family(31.5, 21, 864, 600, 362),
}
UNKNOWN = Family(63, 10, 8000, 300, 2500)
"""A GPU that is not in the table: only what is clearly broken fails."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line. `found` in `unit`; `least` or `most` is the threshold, `limit` the physical one."""

    name: str
    state: State
    found: float | None
    unit: str
    least: float | None = None
    most: float | None = None
    limit: float | None = None
    remedy: str = ""

    def line(self) -> str:
        if self.state == "skip":
            return f"skip  {self.name}: {self.remedy}"
        bound = "" if self.least is None else f", at least {self.least:g}"
        bound += "" if self.most is None else f", at most {self.most:g}"
        bound += "" if self.limit is None else f", limit {self.limit:g}"
        rest = f"\n      {self.remedy}" if self.state == "fail" else ""
        return f"{self.state:4}  {self.name}: {self.found:.4g} {self.unit}{bound}{rest}"


REMEDIES: Mapping[str, str] = {
    "driver": "install driver 580 or newer: the CUDA 13 packages need it",
    "gpus seen": "one is missing: `dmesg | grep -i xid`, reseat it, reboot; in a container see NVIDIA_VISIBLE_DEVICES",
    "cut by MIG": "`nvidia-smi -mig 0` on each GPU and reset it: the box gives out whole GPUs",
    "foreign memory": "`nvidia-smi` names the processes that hold it; end them, or engines will not find their share",
    "serve forks with CUDA": "an import of serve/engine/preload.py touched CUDA: halve its list until it is found",
    "train forks with CUDA": "an import of train/trainer/preload.py touched CUDA: halve its list until it is found",
    "context": "plans keep less: context_bytes of runtime/devices/cuda.py",
    "host to device": "link: slot and BIOS (generation, width), IOMMU off or passthrough, [box] numa_bind",
    "device to host": "link: slot and BIOS (generation, width), IOMMU off or passthrough, [box] numa_bind",
    "locked over link": "pages of /dev/shm on the other socket: numa_bind; else mount /dev/shm with huge=within_size",
    "longest lock": "a decoding step waits this long: halve LOCK_BYTES of serve.load.shm_source",
    "longest unlock": "a decoding step waits this long: halve LOCK_BYTES of serve.load.shm_source",
    "host's own copies": "the host's memory is slow: fill all memory channels, numa_bind, BIOS NPS1",
    "columns over limit": "packing is too slow: raise COPY_THREADS of serve.load.loader, look at numa_bind",
    "unlocked over limit": "a wake reads by this way: raise COPY_THREADS of serve.load.loader",
    "columns are right": "a wrong copy: serve.load.host_ring; do not serve before it is mended",
    "all links at once": "the host's memory is the limit: fill all memory channels, numa_bind, BIOS NPS1",
    "memory": "HBM slower than a healthy part's: ECC remaps, heat (`nvidia-smi -q -d PERFORMANCE`), then return it",
    "bf16 products": "power cap or heat: `nvidia-smi -q -d PERFORMANCE,POWER`",
    "all-reduce": "NVLink: nvidia-fabricmanager active and of the driver's version, `nvidia-smi nvlink -s`, `topo -m`",
    "all-reduce is right": "wrong sums: take the box out of service, `dcgmi diag -r 3`",
    "snapshot out over limit": "a suspending rank copies so: raise THREADS of train.state.staging, look at numa_bind",
    "snapshot in over limit": "a resuming rank copies so: raise THREADS of train.state.staging, look at numa_bind",
    "snapshot is right": "a wrong copy: train.state.staging; do not train before it is mended",
    "packed attention": "which kernel ran? `torch.nn.attention.varlen` in a profile; else compare with one call each",
    "attention over split": "a call per example is faster: let _one_kernel of train.model.attention refuse",
    "attention's error": "wrong sums of one kernel for a row: let _one_kernel of train.model.attention refuse",
    "loss head": "chunks too small for this GPU: DEVICE_LOGITS_BYTES of train.plan.estimate",
    "loss head's memory": "plans count less: held_rows and DEVICE_LOGITS_BYTES of train.plan.estimate",
    "loss head's error": "wrong gradients: train.methods.packed_objective; do not train before it is mended",
    "ranks learn": "the loss of the same examples has to fall: compare with one GPU, then with `all-reduce is right`",
    "ranks agree": "their weights differ after the same steps: `all-reduce is right`, then `nvidia-smi -q -d ECC`",
    "rank's residual": "plans keep less beside a rank's tensors: context_bytes of runtime/devices/cuda.py",
    "ranks' first step": "slow imports or NCCL's start: NCCL_DEBUG=INFO, `nvidia-smi topo -m`",
}


def family_of(name: str) -> Family:
    """By the longest entry whose words the GPU's name contains."""
    known = [key for key in FAMILIES if key in name]
    return FAMILIES[max(known, key=len)] if known else UNKNOWN


def judge(facts: Mapping[str, Mapping[str, Any]], expected_gpus: int | None = None) -> list[Verdict]:
    """One verdict per line. `facts`: by part what it measured, or `{"skipped": why}` or `{"failed": what}`.

    Rates are in bytes/s, times in seconds, one number per GPU where a part measures each.
    """
    verdicts: list[Verdict] = []
    devices = facts.get("devices", {})
    names = devices.get("names", [])
    family = family_of(names[0]) if names else UNKNOWN
    for part, found in facts.items():
        if "skipped" in found:
            verdicts.append(Verdict(part, "skip", None, "", remedy=str(found["skipped"])))
        elif "failed" in found:
            verdicts.append(Verdict(part, "fail", 0, "of it ran", least=1, remedy=str(found["failed"])))
        else:
            verdicts += _PARTS[part](found, family, expected_gpus)
    return verdicts


def _bounded(name: str, found: float, unit: str, *, least=None, most=None, limit=None) -> Verdict:
    fine = (least is None or found >= least) and (most is None or found <= most)
    return Verdict(name, "ok" if fine else "fail", found, unit, least, most, limit, REMEDIES[name])


def _most(values: Sequence[float]) -> float:
    """The largest; what is not a number is worse than any."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def _devices(found: Mapping[str, Any], _: Family, expected: int | None) -> list[Verdict]:
    return [
        _bounded("gpus seen", len(found["names"]), "GPUs", least=expected or 1),
        _bounded("driver", found["driver"], "", least=580),
        _bounded("cut by MIG", found["mig"], "GPUs", most=0),
        _bounded("foreign memory", max(found["used_bytes"]) / GB, "GB", most=1.0),
    ]


def _fork(found: Mapping[str, Any], _: Family, __: int | None) -> list[Verdict]:
    return [_bounded(f"{half} forks with CUDA", float(works), "", least=1) for half, works in found["forks"].items()]


def _copies(found: Mapping[str, Any], family: Family, _: int | None) -> list[Verdict]:
    link, back = min(found["host_to_device"]), min(found["device_to_host"])
    share = lambda name: min(a / b for a, b in zip(found[name], found["host_to_device"], strict=True))  # noqa: E731
    return [
        _bounded("host to device", link / GB, "GB/s", least=family.link_least, limit=family.link),
        _bounded("device to host", back / GB, "GB/s", least=family.link_least, limit=family.link),
        _bounded("locked over link", share("locked"), "x", least=0.9, limit=1),
        _bounded("longest lock", max(found["longest_lock_s"]) * 1e3, "ms", most=10),
        _bounded("longest unlock", max(found["longest_unlock_s"]) * 1e3, "ms", most=10),
        _bounded("host's own copies", min(found["host_copy"]) / GB, "GB/s", least=0.5 * family.link_least),
        _bounded("columns over limit", _share(found, "columns", "host_to_device"), "x", least=0.5, limit=1),
        _bounded("unlocked over limit", _share(found, "unlocked", "host_to_device"), "x", least=0.5, limit=1),
        _bounded("columns are right", float(all(found["right"])), "", least=1),
        _bounded("context", max(found["context_bytes"]) / GB, "GB", most=1.5),
    ]


def _share(found: Mapping[str, Any], way: str, link: str) -> float:
    """Of what the link and the host's memory allow: bytes that are not locked go through both. (A virtual machine with
    an H200 copied within its memory at 36 GB/s with eight threads, and over its link at 55.)"""
    limits = map(min, found[link], found["host_copy"])
    return min(rate / limit for rate, limit in zip(found[way], limits, strict=True))


def _together(found: Mapping[str, Any], family: Family, _: int | None) -> list[Verdict]:
    count, total = len(found["host_to_device"]), sum(found["host_to_device"]) / GB
    limit = count * family.link
    return [_bounded("all links at once", total, "GB/s", least=0.5 * count * family.link_least, limit=limit)]


def _compute(found: Mapping[str, Any], family: Family, _: int | None) -> list[Verdict]:
    return [
        _bounded("memory", min(found["memory"]) / GB, "GB/s", least=family.memory_least, limit=family.memory),
        _bounded("bf16 products", min(found["bf16"]) / 1e12, "TFLOP/s", least=0.5 * family.bf16, limit=family.bf16),
    ]


def _collectives(found: Mapping[str, Any], family: Family, _: int | None) -> list[Verdict]:
    joined = all(found["nvlink"]) and family.peers is not None
    # Without NVLink a ring goes over the links of the host, both ways at once.
    least = (family.peers if len(found["bus"]) == 8 else 0.4 * family.peers) if joined else 0.2 * family.link_least
    return [
        _bounded("all-reduce", min(found["bus"]) / GB, "GB/s", least=least),
        _bounded("all-reduce is right", float(all(found["right"])), "", least=1),
    ]


def _snapshots(found: Mapping[str, Any], _: Family, __: int | None) -> list[Verdict]:
    # Pageable memory gets a fifth to a third of the link (train.state.staging).
    return [
        _bounded("snapshot out over limit", _share(found, "out", "link_out"), "x", least=0.6, limit=1),
        _bounded("snapshot in over limit", _share(found, "back", "link_back"), "x", least=0.6, limit=1),
        _bounded("snapshot is right", float(all(found["right"])), "", least=1),
    ]


def _attention(found: Mapping[str, Any], family: Family, _: int | None) -> list[Verdict]:
    rate = min(found["attention"]) / 1e12
    return [
        _bounded("packed attention", rate, "TFLOP/s", least=0.1 * family.bf16, limit=family.bf16),
        _bounded("attention over split", min(found["over_split"]), "x", least=1),
        _bounded("attention's error", _most(found["attention_error"]), "", most=0.02),
    ]


def _head(found: Mapping[str, Any], family: Family, _: int | None) -> list[Verdict]:
    rate = min(found["head"]) / 1e12
    return [
        _bounded("loss head", rate, "TFLOP/s", least=0.3 * family.bf16, limit=family.bf16),
        _bounded("loss head's memory", max(found["head_memory"]), "x planned", most=1.1),
        _bounded("loss head's error", _most(found["head_error"]), "", most=0.02),
    ]


def _ranks(found: Mapping[str, Any], _: Family, __: int | None) -> list[Verdict]:
    return [
        _bounded("ranks learn", _most(found["loss_ratio"]), "x first loss", most=0.9),
        _bounded("ranks agree", float(all(found["same"])), "", least=1),
        _bounded("rank's residual", max(found["residual_bytes"]) / GB, "GB", most=2 * 2**30 / GB),
        _bounded("ranks' first step", max(found["first_step_s"]), "s", most=60),
    ]


_PARTS = {
    "devices": _devices,
    "fork": _fork,
    "copies": _copies,
    "together": _together,
    "compute": _compute,
    "collectives": _collectives,
    "snapshots": _snapshots,
    "attention": _attention,
    "head": _head,
    "ranks": _ranks,
}
PARTS = tuple(_PARTS)
