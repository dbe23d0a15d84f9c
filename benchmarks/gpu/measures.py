"""Measures one part in a process of its own: `python -m benchmarks.gpu.measures PART [--gpu N --of N --meet FILE]`.

Prints one line of JSON. `devices` needs the driver alone, `fork` the packages of its half, those of a training rank
(benchmarks.gpu.training) transformers, `ranks` DeepSpeed too, all others torch alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.processes.numa import bind

GIB = 2**30
ROUNDS = 3


def devices() -> dict[str, Any]:
    import pynvml

    from runtime.devices import nvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    driver = pynvml.nvmlSystemGetDriverVersion()
    return {
        "names": [pynvml.nvmlDeviceGetName(handle) for handle in handles],
        "driver": float(driver.split(".")[0]),
        "mig": sum(_mig(pynvml, handle) for handle in handles),
        "used_bytes": [_used_bytes(pynvml, handle) for handle in handles],
        "numa_nodes": [nvml.numa_node(handle) for handle in handles],
    }


def _mig(pynvml: Any, handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError_NotSupported:
        return False


def _used_bytes(pynvml: Any, handle: Any) -> int:
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (pynvml.NVMLError_NoPermission, pynvml.NVMLError_NotSupported):  # cut by MIG: told to root alone
        return 0
    return sum(process.usedGpuMemory or 0 for process in running)


def fork(half: str) -> dict[str, Any]:
    """Whether a process forked after the imports of a warm parent can compute on a GPU."""
    importlib.import_module({"serve": "serve.engine.preload", "train": "train.trainer.preload"}[half])
    import torch

    child = os.fork()
    if child == 0:
        try:
            works = float(torch.ones(8, device="cuda").sum()) == 8
        except RuntimeError as error:
            print(error, file=sys.stderr, flush=True)
            works = False
        os._exit(0 if works else 1)
    return {"forks": {half: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0}}


def copies(gib: float = 2.0) -> dict[str, Any]:
    """Weights on their way from /dev/shm, by the loader's own code."""
    import torch
    from safetensors.torch import save_file

    from runtime.devices.kinds import of_torch
    from serve.load.host_ring import HostRing
    from serve.load.shm_source import ToLock, VersionSource

    device = torch.device("cuda:0")
    free, _ = torch.cuda.mem_get_info()
    total = torch.cuda.get_device_properties(0).total_memory
    found: dict[str, Any] = {"context_bytes": total - free, "host_to_device": _link(torch, device)}
    here = torch.empty(GIB // 4, dtype=torch.uint8, device=device)
    pinned = torch.empty(here.nbytes, dtype=torch.uint8, pin_memory=True)
    found["device_to_host"] = _rate(torch, lambda: pinned.copy_(here, non_blocking=True), here.nbytes)

    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="appliance-smoke-") as folder:
        rows, columns = 8192, 8192
        count = max(1, int(gib * GIB) // (2 * rows * columns))
        matrix = torch.randn(rows, columns).to(torch.bfloat16)
        save_file({f"m{index}": matrix + index for index in range(count)}, Path(folder) / "model.safetensors")
        pages = _Timed(of_torch(device).page_lock())
        source = VersionSource(folder)
        spans = {file.name: [(0, file.nbytes)] for file in source.layout.files}
        source.map(ToLock(spans, pages), spans)
        names = list(source.described)
        targets = {name: torch.empty(rows, columns, dtype=torch.bfloat16, device=device) for name in names}

        def locked() -> None:
            for name in names:
                flat, item = source.tensor(name).view(-1), 2
                into = targets[name].view(-1)
                for first, last in source.locked_runs(name, 0, flat.nbytes) or [(0, flat.nbytes)]:
                    into[first // item : last // item].copy_(flat[first // item : last // item], non_blocking=True)

        found["locked"] = _rate(torch, locked, source.nbytes)
        source.close()
        found["longest_lock_s"], found["longest_unlock_s"] = max(pages.lock_s), max(pages.unlock_s)

        source = VersionSource(folder).map(None, spans)

        def unlocked() -> None:
            with HostRing(device, 8) as ring:
                for name in names:
                    ring.copy(targets[name], source.tensor(name))

        found["host_copy"] = _training().host_copy()
        found["unlocked"] = _rate(torch, unlocked, source.nbytes)
        part = columns // 8
        slices = {name: torch.empty(rows, part, dtype=torch.bfloat16, device=device) for name in names}

        def pack() -> None:
            with HostRing(device, 8) as ring:
                for name in names:
                    ring.copy(slices[name], source.tensor(name)[:, part : 2 * part])

        found["columns"] = _rate(torch, pack, source.nbytes // 8)
        found["right"] = all(
            torch.equal(targets[name].cpu(), source.tensor(name))
            and torch.equal(slices[name].cpu(), source.tensor(name)[:, part : 2 * part])
            for name in names
        )
        source.close()
    return found


class _Timed:
    """Locks pages by a kind's own calls, and keeps the seconds that each took."""

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


def together() -> dict[str, Any]:
    import torch

    return {"host_to_device": _link(torch, torch.device("cuda:0"), seconds=5.0)}


def compute() -> dict[str, Any]:
    import torch

    device = torch.device("cuda:0")
    big, other = (torch.empty(2 * GIB, dtype=torch.uint8, device=device) for _ in range(2))
    memory = _rate(torch, lambda: other.copy_(big), 2 * big.nbytes)  # read and written
    n = 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))

    def products() -> None:
        for _ in range(20):
            a @ b

    return {"memory": memory, "bf16": _rate(torch, products, 20 * 2 * n**3)}


def collectives(gpu: int, of: int, meet: str) -> dict[str, Any]:
    """NCCL's all-reduce of 4 GiB over `of` ranks that meet through a file: the threshold is of larger ones still."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method=f"file://{meet}", rank=gpu, world_size=of)
    data = torch.ones(GIB, dtype=torch.float32, device="cuda")
    dist.all_reduce(data)
    right = bool((data == of).all())
    rate = _rate(torch, lambda: dist.all_reduce(data), data.nbytes)
    dist.destroy_process_group()
    return {"bus": rate * 2 * (of - 1) / of, "right": right, "nvlink": nvlink(gpu, of)}


def nvlink(gpu: int, of: int) -> bool:
    """Whether it joins one to all others. CUDA only says that they reach each other's memory, which goes over PCIe
    too (H100 NVL beyond its pair)."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(of)]
    mine = handles.pop(gpu)
    try:
        told = {pynvml.nvmlDeviceGetP2PStatus(mine, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) for other in handles}
    except pynvml.NVMLError:
        return False
    return told <= {pynvml.NVML_P2P_STATUS_OK}


def _link(torch: Any, device: Any, seconds: float = 0.0) -> float:
    pinned = torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(pinned.nbytes, dtype=torch.uint8, device=device)
    return _rate(torch, lambda: target.copy_(pinned, non_blocking=True), pinned.nbytes, seconds)


def _rate(torch: Any, work: Callable[[], Any], amount: float, seconds: float = 0.0) -> float:
    """Of the fastest of ROUNDS rounds; over `seconds` on end, the mean."""
    work()
    torch.cuda.synchronize()
    took: list[float] = []
    while len(took) < ROUNDS or sum(took) < seconds:
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began_s)
    return amount * len(took) / sum(took) if seconds else amount / min(took)


def _training() -> Any:
    return importlib.import_module("benchmarks.gpu.training")


def _first() -> Any:
    return importlib.import_module("torch").device("cuda:0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("--half", default="train")
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--of", type=int, default=1)
    parser.add_argument("--meet", default="")
    parser.add_argument("--numa", type=int)
    options = parser.parse_args()
    if options.numa is not None:
        bind([options.numa])  # as engines and ranks are: half of the copies else cross from socket to socket
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "devices": devices,
        "fork": lambda: fork(options.half),
        "copies": copies,
        "together": together,
        "compute": compute,
        "collectives": lambda: collectives(options.gpu, options.of, options.meet),
        "snapshots": lambda: _training().snapshots(_first()),
        "attention": lambda: _training().attention(_first()),
        "head": lambda: _training().head(_first()),
        "ranks": lambda: _training().ranks(options.gpu, options.of, options.meet, "cuda"),
    }
    print(json.dumps(parts[options.part]()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
