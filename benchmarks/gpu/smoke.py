"""`make gpu-smoke`: runs the box's code on this machine's GPUs; prints one line per check, with bound and remedy.

    python -m benchmarks.gpu.smoke [--parts copies,...] [--gpus N] [--results FILE]

Every part runs in its own process for each GPU, with a time limit, so that a hang fails only its part. To test the
hardware alone, use `dcgmi diag`. The lines go to benchmarks/gpu/results/<date>-<GPUs>.txt; commit the file. Exit
status: 0 if no check failed, 1 if one failed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import Check
from runtime.devices.kind import Found
from runtime.devices.kinds import kind_of
from runtime.processes.kernel import bind_near
from runtime.processes.warm_parent import WARM_ENV

RESULTS = Path(__file__).parent / "results"
PARTS = ("fork-serve", "fork-train", "copies", "snapshots", "attention", "head", "kernels", "ranks")
LIMIT_S = 150.0
"""Time limit for the concurrent processes of a part."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: %(default)s")
    parser.add_argument("--gpus", type=int, default=1, help="expected minimum number of GPUs (default: 1)")
    parser.add_argument("--results", type=Path, help="file to write")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps([asdict(check) for check in child(**options.child)]), flush=True)
        return 0
    if not (gpus := kind_of("cuda").probe()):
        print("no NVIDIA GPU on this machine: nothing was measured", file=sys.stderr)
        return 2
    checks = [Check("GPUs", len(gpus), least=options.gpus, remedy="`dmesg | grep -i xid`, reseat it, reboot")]
    checks += [Check(f"GPU {gpu.index} is fit", 0, least=1, remedy=gpu.unfit) for gpu in gpus if gpu.unfit]
    print("\n".join(check.line() for check in checks), flush=True)
    for part in options.parts.split(","):
        found = measured(part, [gpu for gpu in gpus if not gpu.unfit])
        print("\n".join(check.line() for check in found), flush=True)
        checks += found
    name = f"{time.strftime('%Y-%m-%d')}-{len(gpus)}x-{'-'.join(gpus[0].name.lower().split())}.txt"
    path = options.results or RESULTS / name
    path.write_text("".join(f"{check.line()}\n" for check in checks))
    failed = sum(not check.ok for check in checks)
    print(f"{failed} of {len(checks)} failed; written to {path}: commit this file")
    return int(failed > 0)


def child(part: str, rank: int, of: int, meet: str, numa: int | None) -> list[Check]:
    """Measure a part in this process, which sees one GPU."""
    bind_near([numa])  # as engines and ranks do: otherwise half of the copies cross between sockets
    if part.startswith(("fork-", "copies")):
        from benchmarks.gpu import loading

        return loading.copies() if part == "copies" else loading.fork(part.removeprefix("fork-"))
    import torch

    from benchmarks.gpu import training

    if part == "ranks":
        return training.ranks(rank, of, meet, "cuda")
    return getattr(training, part)(torch.device("cuda:0"))


def measured(part: str, gpus: Sequence[Found]) -> list[Check]:
    """Run a part on each GPU in turn, or on all at once for `ranks`; return its checks."""
    with tempfile.TemporaryDirectory(prefix="appliance-smoke-") as folder:
        meet = {"of": len(gpus), "meet": f"{folder}/meet"}
        asked = [{"part": part, "rank": rank, "numa": gpu.numa_node, **meet} for rank, gpu in enumerate(gpus)]
        if part == "ranks":
            return answers(gpus, [start(one, gpu.index) for one, gpu in zip(asked, gpus, strict=True)])
        pairs = zip(asked, gpus, strict=True)
        return [check for one, gpu in pairs for check in answers([gpu], [start(one, gpu.index)])]


def start(asked: dict[str, Any], gpu: int) -> subprocess.Popen[str]:
    # As in engines and ranks: their copy rings have threads, so torch must not start threads in each.
    own = {**dict(WARM_ENV), "OMP_NUM_THREADS": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.smoke", "--child", json.dumps(asked)],
        env={**os.environ, **own, "CUDA_VISIBLE_DEVICES": str(gpu)},
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(gpus: Sequence[Found], children: Sequence[subprocess.Popen[str]]) -> list[Check]:
    """Return the checks on the last line of each child, named by GPU; a failed child gives one failed check."""
    deadline_s, found = time.monotonic() + LIMIT_S, []
    for gpu, process in zip(gpus, children, strict=True):
        try:
            out, err = process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            err = f"it did not end within {LIMIT_S:g} s: {err}"
        if process.returncode == 0 and out.strip():
            checks = [Check(**one) for one in json.loads(out.splitlines()[-1])]
        else:
            checks = [Check("it ran", 0, least=1, remedy=" ".join(err.split())[-600:])]
        found += [Check(**{**asdict(one), "name": f"GPU {gpu.index}: {one.name}"}) for one in checks]
    return found


if __name__ == "__main__":
    sys.exit(main())
