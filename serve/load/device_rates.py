"""Measures a device that nobody holds, and whether it computes and copies right: prints JSON.

    python -m serve.load.device_rates KIND [--threads N] [--numa-node N]
    python -m serve.load.device_rates KIND --rank R --world N --meet FILE

The first form measures the first device that this process sees: {"rates": {measure: rate}, "wrong": [what]}. The second
is one of N processes, each with a device of its own: {"all-reduce": rate}. Rates are bytes per second, of `products`
floating-point operations per second. The same code measures every kind; only the sizes differ on the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.devices.kind import DeviceKind
from runtime.devices.kinds import kind_of
from runtime.processes import numa
from runtime.processes.kernel import die_with_parent

MEET_S = 60.0
EXACT = 256
"""How many terms a sum of ones and minus ones may have to be exact in every format that is multiplied in."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """`copied` and `reduced`: bytes. `side`: rows and columns of a product. `rounds`: of each measure, the fastest
    counts. `products`: how many of them are compared with each other, bit by bit."""

    copied: int
    reduced: int
    side: int
    rounds: int
    products: int
    dtype: torch.dtype


# The host's are small: its devices share the processors, and the box goes on meanwhile.
HOST = Sizes(copied=32 << 20, reduced=8 << 20, side=768, rounds=5, products=5, dtype=torch.float32)
DEVICE = Sizes(copied=512 << 20, reduced=4 << 30, side=8192, rounds=10, products=200, dtype=torch.bfloat16)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="serve.load.device_rates", description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--threads", type=int, default=1, help="that a device of the host has")
    parser.add_argument("--numa-node", type=int, default=None)
    parser.add_argument("--rank", type=int, default=None)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--meet", help="a file that is not there yet, the same for all ranks")
    options = parser.parse_args(argv)
    die_with_parent()
    numa.bind([options.numa_node])
    kind = kind_of(options.kind)
    sizes = HOST if kind.on_host else DEVICE
    torch.set_num_threads(options.threads)
    if options.rank is None:
        print(json.dumps(alone(kind, sizes)), flush=True)
    else:
        print(json.dumps({"all-reduce": together(kind, sizes, options.rank, options.world, options.meet)}), flush=True)
    return 0


def alone(kind: DeviceKind, sizes: Sizes) -> dict[str, Any]:
    """The rates of one device, and what it did wrong. Raises RuntimeError without one, or without free memory on it."""
    device = torch.device(kind.torch_type, 0)
    kind.use(device)
    wrong: list[str] = []
    rates = {**_copies(kind, device, sizes, wrong), "products": _products(kind, device, sizes, wrong)}
    return {"rates": rates, "wrong": wrong}


def together(kind: DeviceKind, sizes: Sizes, rank: int, world: int, meet: str) -> float:
    """The rate of an all-reduce as NCCL's tests count it ("bus bandwidth"): by what each device has to move, which
    makes figures of different numbers of devices comparable."""
    device = torch.device(kind.torch_type, 0)
    kind.use(device)
    dist.init_process_group(
        kind.collectives, init_method=f"file://{meet}", rank=rank, world_size=world, timeout=timedelta(seconds=MEET_S)
    )
    try:
        data = torch.ones(sizes.reduced // 4, dtype=torch.float32, device=device)
        # It alone is timed: to write the ones again takes a tenth of its time, and published rates leave less than
        # that. So what is summed grows; the last sum is compared, of ones again.
        fastest_s = _fastest(kind, device, sizes.rounds, lambda: dist.all_reduce(data))
        dist.all_reduce(data.fill_(1.0))
        if not bool((data == world).all()):
            raise RuntimeError(f"the sum of {world} ones over {world} devices was not {world}")
    finally:
        dist.destroy_process_group()
    return sizes.reduced / fastest_s * 2 * (world - 1) / world


def _copies(kind: DeviceKind, device: torch.device, sizes: Sizes, wrong: list[str]) -> dict[str, float]:
    elements = sizes.copied // 4
    source, back = (kind.locked_buffer(elements) if kind.locks_pages else torch.empty(elements) for _ in range(2))
    source.copy_(torch.arange(elements, dtype=torch.float32))
    first, second = (torch.zeros(elements, dtype=torch.float32, device=device) for _ in range(2))
    took_s = {
        "from host": _fastest(kind, device, sizes.rounds, lambda: first.copy_(source, non_blocking=True)),
        "memory": _fastest(kind, device, sizes.rounds, lambda: second.copy_(first)),
        "to host": _fastest(kind, device, sizes.rounds, lambda: back.copy_(second, non_blocking=True)),
    }
    if not torch.equal(source, back):
        wrong.append("what was copied to it and back came back changed")
    # A copy inside a device reads each byte and writes it.
    return {name: sizes.copied * (2 if name == "memory" else 1) / seconds for name, seconds in took_s.items()}


def _products(kind: DeviceKind, device: torch.device, sizes: Sizes, wrong: list[str]) -> float:
    signs = torch.Generator().manual_seed(7)
    left, right = (
        (torch.randint(0, 2, (sizes.side, sizes.side), generator=signs, dtype=torch.int8) * 2 - 1)
        .to(torch.float32)
        .to(device=device, dtype=sizes.dtype)
        for _ in range(2)
    )
    rows = 64
    exact = left[:rows, :EXACT].cpu().float() @ right[:EXACT].cpu().float()
    if not torch.equal((left[:, :EXACT] @ right[:EXACT])[:rows].cpu().float(), exact):
        wrong.append("a product of whole numbers was not exact")
    out = torch.empty((sizes.side, sizes.side), dtype=sizes.dtype, device=device)
    first = left @ right
    fastest_s = float("inf")
    for _ in range(sizes.products):
        fastest_s = min(fastest_s, _fastest(kind, device, 1, lambda: torch.matmul(left, right, out=out), warm=False))
        if not torch.equal(out, first):
            wrong.append("the same product came out otherwise the next time")
            break
    return 2 * sizes.side**3 / fastest_s


def _fastest(
    kind: DeviceKind, device: torch.device, rounds: int, work: Callable[[], Any], *, warm: bool = True
) -> float:
    """Seconds of the fastest round, after one that does not count."""
    fastest_s = float("inf")
    for number in range(rounds + warm):
        kind.synchronize(device)
        began_s = time.perf_counter()
        work()
        kind.synchronize(device)
        if number >= warm:
            fastest_s = min(fastest_s, time.perf_counter() - began_s)
    return fastest_s


if __name__ == "__main__":
    sys.exit(main())
