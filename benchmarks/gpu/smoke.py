"""`make gpu-smoke`: one verdict per line, with its threshold, the physical limit and what to do where it fails.

    python -m benchmarks.gpu.smoke [--parts devices,copies,...] [--gpus N] [--results FILE]

Every part runs in processes of its own with a time limit, so that a machine with torch alone measures what torch can,
and one that hangs costs its part. `--gpus`: how many there have to be. The results go to
benchmarks/gpu/results/<date>-<GPUs>.json, to be committed. Ends with 0 if nothing failed, 1 if something did, 2 without
a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.verdicts import PARTS, Verdict, judge
from runtime.processes.warm_parents import WARM_ENV

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
NEEDS = {
    "devices": ("pynvml",),
    "fork": ("torch",),
    "attention": ("torch", "transformers"),
    "head": ("torch", "transformers"),
    "ranks": ("torch", "transformers", "deepspeed"),
}
AT_ONCE = {"together", "attention", "head"}
"""On all GPUs at the same time: their links, which share the host, and what stays on a GPU and shares nothing."""
HALVES = {"serve": ("vllm",), "train": ("deepspeed", "transformers")}
PART_LIMIT_S = 150.0
"""Of all processes of a part that run at once. A healthy machine with eight GPUs needs some six minutes in all."""

Start = Callable[[Sequence[str], Mapping[str, str]], subprocess.Popen[str]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of: %(default)s")
    parser.add_argument("--gpus", type=int, help="how many there have to be (default: at least one)")
    parser.add_argument("--results", type=Path, help="file to write")
    options = parser.parse_args(argv)
    wanted = options.parts.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"--parts names {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not Path("/dev/nvidiactl").exists():
        print("no NVIDIA GPU here (/dev/nvidiactl does not exist): nothing was measured", file=sys.stderr)
        return 2
    facts = measure(wanted, installed=lambda name: find_spec(name) is not None)
    verdicts = judge(facts, options.gpus)
    print(report(verdicts))
    names = facts.get("devices", {}).get("names", [])
    path = options.results or RESULTS / f"{time.strftime('%Y-%m-%d')}-{result_name(names)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [verdict.line() for verdict in verdicts]
    path.write_text(json.dumps({"facts": facts, "verdicts": lines}, indent=1) + "\n")
    print(f"written to {path}: commit it")
    return int(any(verdict.state == "fail" for verdict in verdicts))


def result_name(names: Sequence[str]) -> str:
    """ "8x-nvidia-h100-80gb-hbm3" """
    return f"{len(names)}x-{'-'.join(names[0].lower().split())}" if names else "unknown"


def report(verdicts: Sequence[Verdict]) -> str:
    counts = {state: sum(verdict.state == state for verdict in verdicts) for state in ("ok", "fail", "skip")}
    summed = ", ".join(f"{count} {state}" for state, count in counts.items())
    return "\n".join([*(verdict.line() for verdict in verdicts), summed])


def start(arguments: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.measures", *arguments]
    # As engines and ranks copy: their rings have threads, and torch must not add its own to each.
    as_theirs = {**dict(WARM_ENV), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **as_theirs, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **variables}
    return subprocess.Popen(
        command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def measure(wanted: Sequence[str], *, installed: Callable[[str], bool], start: Start = start) -> dict[str, Any]:
    """What each part found, `{"skipped": why}` or `{"failed": what}`."""
    facts: dict[str, Any] = {}
    devices = _one(start, ["devices"], {}) if installed("pynvml") else {"skipped": "pynvml is not installed"}
    if "devices" in wanted or "failed" in devices:
        facts["devices"] = devices
    if "failed" in devices:
        return facts
    count = len(devices.get("names", [])) or 1
    beside = [_beside(node) for node in devices.get("numa_nodes", [None] * count)]
    for part in (part for part in wanted if part != "devices"):
        missing = [name for name in NEEDS.get(part, ("torch", "safetensors")) if not installed(name)]
        if missing:
            facts[part] = {"skipped": f"not installed: {', '.join(missing)}"}
        elif part == "fork":
            facts[part] = _forks(start, installed)
        elif part in ("collectives", "together") and count == 1:
            facts[part] = {"skipped": "there is one GPU"}
        elif part == "collectives":
            every = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}  # whatever the caller sees of them
            facts[part] = _world(start, part, [every] * count, beside)
        elif part == "ranks":
            facts[part] = _world(start, part, _sees(count), beside)  # like the box's own, each sees its device alone
        else:
            facts[part] = _each(start, part, beside, at_once=part in AT_ONCE)
    return facts


def _forks(start: Start, installed: Callable[[str], bool]) -> dict[str, Any]:
    halves = [half for half, needs in HALVES.items() if all(map(installed, needs))]
    if not halves:
        return {"skipped": "neither vllm nor deepspeed is installed"}
    found = [_one(start, ["fork", "--half", half], {}) for half in halves]
    failed = [one for one in found if "failed" in one]
    return failed[0] if failed else {"forks": {half: works for one in found for half, works in one["forks"].items()}}


def _beside(numa_node: int | None) -> list[str]:
    return [] if numa_node is None else ["--numa", str(numa_node)]


def _world(
    start: Start, part: str, sees: Sequence[Mapping[str, str]], beside: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Of one rank for each of `sees`, its variables; they meet through a file. Lists by rank."""
    with tempfile.TemporaryDirectory(prefix="appliance-smoke-") as folder:
        of, meet = ["--of", str(len(sees))], ["--meet", str(Path(folder) / "meet")]
        world = [
            start([part, "--gpu", str(rank), *of, *meet, *beside[rank]], variables)
            for rank, variables in enumerate(sees)
        ]
        return _listed("rank", _answers(world))


def _each(start: Start, part: str, beside: Sequence[Sequence[str]], *, at_once: bool) -> dict[str, Any]:
    """Of every GPU, one after the other or all at once: lists by GPU."""
    asked = [([part, *where], variables) for where, variables in zip(beside, _sees(len(beside)), strict=True)]
    if at_once:
        return _listed("GPU", _answers([start(*one) for one in asked]))
    return _listed("GPU", [_one(start, *one) for one in asked])


def _sees(count: int) -> list[dict[str, str]]:
    return [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(count)]


def _listed(what: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    failed = [f"{what} {number}: {one['failed']}" for number, one in enumerate(found) if "failed" in one]
    return {"failed": "; ".join(failed)} if failed else {key: [one[key] for one in found] for key in found[0]}


def _one(start: Start, arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    return _answers([start(arguments, variables)])[0]


def _answers(children: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    deadline_s, found = time.monotonic() + PART_LIMIT_S, []
    for child in children:
        try:
            out, err = child.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            err = f"it did not end within {PART_LIMIT_S:g} s: {err}"
        fine = child.returncode == 0 and out.strip()
        found.append(json.loads(out.splitlines()[-1]) if fine else {"failed": " ".join(err.split())[-600:]})
    return found


if __name__ == "__main__":
    sys.exit(main())
