"""The parts of `make gpu-smoke` that measure the loading of an engine, with the engines' own code."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.gpu.checks import Check, best_s
from benchmarks.gpu.training import GIB, host_copy
from runtime.devices.kinds import of_torch
from serve.load.host_ring import HostRing
from serve.load.shm_source import ToLock, VersionSource

ROWS = 8192


def fork(half: str) -> list[Check]:
    """Check that a process can compute on a GPU when forked after a warm parent's imports."""
    preload = {"serve": "serve.engine.preload", "train": "train.trainer.preload"}[half]
    importlib.import_module(preload)
    child = os.fork()
    if child == 0:
        try:
            works = float(torch.ones(8, device="cuda").sum()) == 8
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            works = False
        os._exit(0 if works else 1)
    works = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    remedy = f"an import of {preload} initialised CUDA: bisect its list to find it"
    return [Check(f"{half} forks with CUDA", works, least=1, remedy=remedy)]


class _Timed:
    """Locks pages with the calls of a device kind, and records how many seconds the calls take."""

    def __init__(self, pages: Any):
        self._pages, self.lock_s, self.unlock_s = pages, [0.0], [0.0]

    def lock(self, address: int, nbytes: int) -> bool:
        began_s = time.perf_counter()
        done = self._pages.lock(address, nbytes)
        self.lock_s.append(time.perf_counter() - began_s)
        return done

    def unlock(self, address: int) -> None:
        began_s = time.perf_counter()
        self._pages.unlock(address)
        self.unlock_s.append(time.perf_counter() - began_s)


def copies(gib: float = 2.0) -> list[Check]:
    """Compare the rate of the loader's own code, from /dev/shm, with page-locked copies over the link."""
    device = torch.device("cuda:0")
    kind = of_torch(device)
    free, _ = torch.cuda.mem_get_info()
    context_bytes = torch.cuda.get_device_properties(0).total_memory - free
    pinned = torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(pinned.nbytes, dtype=torch.uint8, device=device)

    def rate(work: Any, nbytes: int) -> float:
        return nbytes / best_s(torch.cuda.synchronize, work)

    link = rate(lambda: here.copy_(pinned, non_blocking=True), here.nbytes)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="appliance-smoke-") as folder:
        count = max(1, int(gib * GIB) // (2 * ROWS * ROWS))
        matrix = torch.randn(ROWS, ROWS).to(torch.bfloat16)
        save_file({f"m{index}": matrix + index for index in range(count)}, Path(folder) / "model.safetensors")
        pages = _Timed(kind.page_lock())
        source = VersionSource(folder)
        spans = {file.name: [(0, file.nbytes)] for file in source.layout.files}
        source.map(ToLock(spans, pages), spans)
        names, part = list(source.described), ROWS // 8
        targets = {name: torch.empty(ROWS, ROWS, dtype=torch.bfloat16, device=device) for name in names}
        slices = {name: torch.empty(ROWS, part, dtype=torch.bfloat16, device=device) for name in names}

        def locked() -> None:
            for name in names:
                flat, into = source.tensor(name).view(-1), targets[name].view(-1)
                for first, last in source.locked_runs(name, 0, flat.nbytes) or [(0, flat.nbytes)]:
                    into[first // 2 : last // 2].copy_(flat[first // 2 : last // 2], non_blocking=True)

        locked_rate = rate(locked, source.nbytes)
        source.close()
        source = VersionSource(folder).map(None, spans)

        def unlocked() -> None:
            with HostRing(device, 8) as ring:
                for name in names:
                    ring.copy(targets[name], source.tensor(name))

        def pack() -> None:
            with HostRing(device, 8) as ring:
                for name in names:
                    ring.copy(slices[name], source.tensor(name)[:, part : 2 * part])

        # Pageable bytes cross both the link and the host's memory.
        limit = min(link, host_copy())
        unlocked_share, packed_share = rate(unlocked, source.nbytes) / limit, rate(pack, source.nbytes // 8) / limit
        right = all(
            torch.equal(targets[name].cpu(), source.tensor(name))
            and torch.equal(slices[name].cpu(), source.tensor(name)[:, part : 2 * part])
            for name in names
        )
        source.close()
    slow_lock = "a decoding step waits this long: halve LOCK_BYTES of serve.load.shm_source"
    return [
        Check("link", link / 1e9, "GB/s", least=10, remedy="slot and BIOS, IOMMU, [box] numa_bind; `nvbandwidth`"),
        Check("locked over link", locked_rate / link, "x", least=0.9, remedy="numa_bind; huge=within_size of /dev/shm"),
        Check("longest lock", 1e3 * max(pages.lock_s), "ms", most=10, remedy=slow_lock),
        Check("longest unlock", 1e3 * max(pages.unlock_s), "ms", most=10, remedy=slow_lock),
        Check("unlocked over limit", unlocked_share, "x", least=0.5, remedy="raise COPY_THREADS of serve.load.loader"),
        Check("columns over limit", packed_share, "x", least=0.5, remedy="raise COPY_THREADS of serve.load.loader"),
        Check("copies are right", right, least=1, remedy="serve.load.host_ring; do not serve until it is fixed"),
        Check("context", context_bytes / 1e9, "GB", most=1.5, remedy="context_bytes of runtime/devices/cuda.py"),
    ]
