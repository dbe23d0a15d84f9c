"""Weights and states between shared memory and GPUs, against the rate of page-locked memory in the same run.

    python benchmarks/device_copies.py [--gib N] [--gpus N] [--unbound]

Each GPU has a process of its own, on the processors of its NUMA node like an engine's or rank's; they are measured one
after the other and then all at once, since they share the host's memory. Per GPU, over `--gib` of bytes in /dev/shm
(all 2-byte elements, in matrices of 8192 columns):

    limit           host to device and back, page-locked buffers, the GPU's own clock
    pageable        a version's mapping copied as it is: an engine's first load
    lock            cudaHostRegister of the mapping: what a swap does while requests go on, and a wake while they wait
    locked          the same copy afterwards: a swap's pause
    columns         an eighth of the columns of each matrix, as a row-parallel layer of eight workers reads them:
                    by torch's own copy, and through page-locked buffers, eight threads (serve.load.host_ring)
    snapshot        device to a mapping that has its pages already, as a suspended rank writes it
    context         memory of the device that a process holds which has done nothing but begin

Needs a GPU; without one it says so, also in the table of claims, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks._claims import at_least, record, skipped, stated  # noqa: E402 - the path comes first
from runtime.devices.kind import Found  # noqa: E402
from runtime.processes.numa import bind  # noqa: E402

GIB = 2**30
COLUMNS = 8192
SHARE = 8
ROUNDS = 3
LOAD_THREADS = 8
LINK_BYTES = 256 * 2**20  # of the page-locked buffer by which the link is measured
NO_GPU = "no NVIDIA GPU here"
WITH_CUDA = ("what the other scripts claim of engines and ranks, with CUDA", "all", "as there")
LOCKED_OVER_LIMIT = "page-locked copy of a version over the limit of the link in the same run"


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it clears up as after Ctrl-C
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="bytes of the version, in GiB (default: %(default)s)")
    parser.add_argument("--gpus", type=int, help="how many (default: all)")
    parser.add_argument("--unbound", action="store_true", help="on any processors, as with [box] numa_bind = false")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--numa", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--version", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        bind([options.numa])
        import torch

        print(json.dumps(measured(options.version, torch.device("cuda:0"), _free_bytes)))
        return 0

    from runtime.devices import cuda

    gpus = [one for one in cuda.KIND.probe() if not one.unfit][: options.gpus]
    if not gpus:
        print("no NVIDIA GPU here: nothing measured")
        size = _size(options.gib)
        record(
            __file__,
            [
                skipped(LOCKED_OVER_LIMIT, size, ">= 0.9", NO_GPU),
                skipped(*WITH_CUDA, NO_GPU),
            ],
        )
        return 0
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="appliance-bench-") as folder:
        version = _write_version(Path(folder), int(options.gib * GIB))
        child = partial(_child, version, bound=not options.unbound)
        alone = [_collect([child(gpu)])[0] for gpu in gpus]
        together = _collect([child(gpu) for gpu in gpus]) if len(gpus) > 1 else []
    _show("one GPU at a time", alone)
    if together:
        _show(f"{len(gpus)} GPUs at once", together)
    _record(alone, together, _size(options.gib))
    return 0


def measured(version: Path, device: Any, free_bytes: Callable[[], int]) -> dict[str, Any]:
    """Rates in bytes/s (`*_s`: seconds) of this torch.device; None where there is no link. free_bytes: of it."""
    import torch

    from benchmarks.host_to_device import bytes_per_s
    from runtime.devices.kinds import of_torch
    from serve.load.host_ring import HostRing
    from serve.load.shm_source import ToLock, VersionSource

    kind, before = of_torch(device), free_bytes()
    found: dict[str, Any] = {"limit_in": bytes_per_s()}
    kind.synchronize(device)

    def fastest(copy: Callable[[], None], nbytes: int) -> float:
        seconds = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            copy()
            kind.synchronize(device)
            seconds.append(time.perf_counter() - began_s)
        return nbytes / min(seconds)

    pinned = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=kind.locks_pages)
    here = torch.empty(pinned.nbytes, dtype=torch.uint8, device=device)
    found["limit_out"] = fastest(lambda: pinned.copy_(here, non_blocking=True), pinned.nbytes)
    found["context_bytes"] = before - free_bytes() - torch.cuda.memory_reserved()

    source = VersionSource(version).map()
    targets = {name: torch.empty_like(tensor, device=device) for name, tensor in source.tensors()}

    def copy_all(*, out: bool = False) -> None:
        for name, target in targets.items():
            there, device_side = source.tensor(name).view(-1), target.view(-1)
            # No copy may cross from one locked piece into the next: the driver refuses it.
            for first, last in source.locked_runs(name, 0, target.nbytes) or [(0, target.nbytes)]:
                run = slice(first // target.itemsize, last // target.itemsize)
                into, of = (there, device_side) if out else (device_side, there)
                into[run].copy_(of[run], non_blocking=not out)

    found["pageable"] = fastest(copy_all, source.nbytes)
    part = COLUMNS // SHARE
    slices = {name: torch.empty_like(target[:, :part]) for name, target in targets.items()}

    def copy_columns() -> None:
        for name, target in slices.items():
            target.copy_(source.tensor(name)[:, :part], non_blocking=True)

    def pack_columns() -> None:
        with HostRing(device, LOAD_THREADS) as ring:
            for name, target in slices.items():
                ring.copy(target, source.tensor(name)[:, :part])

    found["columns_by_torch"] = fastest(copy_columns, source.nbytes // SHARE)
    found["columns_gathered"] = fastest(pack_columns, source.nbytes // SHARE)
    source.close()

    spans = {file.name: [(0, file.nbytes)] for file in source.layout.files}
    began_s = time.perf_counter()
    source = VersionSource(version).map(ToLock(spans, kind.page_lock()))
    found["map_and_lock_s"] = time.perf_counter() - began_s
    found["locked"] = fastest(copy_all, source.nbytes)
    found["snapshot_locked"] = fastest(lambda: copy_all(out=True), source.nbytes)
    source.close()
    source = VersionSource(version).map(ToLock({}, kind.page_lock()))
    found["snapshot"] = fastest(lambda: copy_all(out=True), source.nbytes)
    found["bytes"] = source.nbytes
    source.close()
    return found


def _free_bytes() -> int:
    import pynvml

    pynvml.nvmlInit()
    index = int(os.environ["CUDA_VISIBLE_DEVICES"])
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).free


def _write_version(folder: Path, nbytes: int) -> Path:
    import torch
    from safetensors.torch import save_file

    rows = 4096
    count = max(1, nbytes // (2 * rows * COLUMNS))
    matrix = torch.randn(rows, COLUMNS).to(torch.bfloat16)
    save_file({f"layer.{i}.weight": matrix.clone() for i in range(count)}, folder / "model.safetensors")
    return folder


def _child(version: Path, gpu: Found, *, bound: bool) -> subprocess.Popen[str]:
    index = str(gpu.index)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": index, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--child", index, "--version", str(version)]
    if bound and gpu.numa_node is not None:
        command += ["--numa", str(gpu.numa_node)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _collect(children: list[subprocess.Popen[str]]) -> list[dict[str, float]]:
    answers = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit("a GPU could not be measured; its error stands above")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def _show(title: str, found: list[dict[str, float]]) -> None:
    print(f"\n{title} (GB/s, share of the limit of its direction)")
    for name, limit in RATES.items():
        row = "  ".join(f"{one[name] / 1e9:6.1f} {one[name] / one[limit]:5.0%}" for one in found)
        print(f"  {name:18}{row}")
    for name, unit, values in (
        ("map and lock", "GB/s", [one["bytes"] / one["map_and_lock_s"] / 1e9 for one in found]),
        ("context", "MB", [one["context_bytes"] / 1e6 for one in found]),
    ):
        print(f"  {f'{name} ({unit})':18}" + "  ".join(f"{value:6.1f}      " for value in values))


RATES = {
    "limit_in": "limit_in",
    "limit_out": "limit_out",
    "pageable": "limit_in",
    "locked": "limit_in",
    "columns_by_torch": "limit_in",
    "columns_gathered": "limit_in",
    "snapshot": "limit_out",
    "snapshot_locked": "limit_out",
}


def _size(gib: float) -> str:
    return f"{gib:g} GiB"


def _record(alone: list[dict[str, float]], together: list[dict[str, float]], size: str) -> None:
    rows = []
    for name, limit in RATES.items():
        rows.append(stated(f"{name}, slowest GPU", size, min(one[name] for one in alone) / 1e9, "GB/s"))
        share = min(one[name] / one[limit] for one in alone)
        if name == "locked":
            rows.append(at_least(LOCKED_OVER_LIMIT, size, share, "x", 0.9))
        elif name != limit:
            rows.append(stated(f"{name} over page-locked memory", size, share, "x"))
        if together:
            rows.append(stated(f"{name}, all GPUs at once", size, sum(one[name] for one in together) / 1e9, "GB/s"))
    rows.append(stated("mapping and locking", size, max(one["map_and_lock_s"] for one in alone), "s"))
    rows.append(skipped(*WITH_CUDA, "those scripts start them on logical CPU devices"))
    rows.append(stated("a process that only began", size, max(one["context_bytes"] for one in alone) / 1e6, "MB"))
    record(__file__, rows)


if __name__ == "__main__":
    sys.exit(main())
