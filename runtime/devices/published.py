"""What makers and other published sources say of devices, by the name that the driver gives them.

What a sound device reaches at least:

- Copies, and all-reduce over eight: the thresholds of Azure's node health checks (azurehpc-health-checks, conf/), which
  a node that is handed to a customer passes.
- Its own memory: NVIDIA's minima for the test of memory bandwidth (DCGM, diag-skus.yaml).
- Products of matrices: six tenths of the maker's figure for dense bfloat16. Large products of a sound device reach two
  thirds to four fifths of it, and its power limit decides where in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

GB = 1e9
MIB = 2**20
_PRODUCTS = 0.6
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """memory_bytes: of one, as nvidia-smi shows it; the driver keeps some hundreds of MB of it (runtime.devices.cuda).
    peak_flops: FLOP/s of dense bfloat16 products that add up in float32, board_w: the power of the board, both as its
    maker publishes them, of the form with the most (SXM). over_pcie: it is joined to others by PCIe alone."""

    memory_bytes: int
    peak_flops: float
    board_w: int
    over_pcie: bool = False


# A name is the words that a driver's name has, in any order, joined by dashes. In both tables the first row that fits
# counts: a narrower name stands before the wider one.
ACCELERATORS = {
    "a10": Accelerator(23_028 * MIB, 125e12, 150, over_pcie=True),
    "a100-40gb": Accelerator(40_960 * MIB, 312e12, 400),
    "a100": Accelerator(81_920 * MIB, 312e12, 400),
    "a800": Accelerator(81_920 * MIB, 312e12, 400),
    "b200": Accelerator(183_359 * MIB, 2250e12, 1000),
    "h20": Accelerator(97_871 * MIB, 148e12, 400),
    "h100": Accelerator(81_559 * MIB, 989e12, 700),
    "h800": Accelerator(81_559 * MIB, 989e12, 700),
    "h200": Accelerator(143_771 * MIB, 989e12, 700),
    "l20": Accelerator(46_068 * MIB, 119.5e12, 275, over_pcie=True),
    "l4": Accelerator(23_034 * MIB, 121e12, 72, over_pcie=True),
    "l40s": Accelerator(46_068 * MIB, 362e12, 350, over_pcie=True),
    "rtx-3090": Accelerator(24_576 * MIB, 71e12, 350, over_pcie=True),
    "rtx-4090": Accelerator(24_564 * MIB, 165.2e12, 450, over_pcie=True),
    "rtx-4090d": Accelerator(24_564 * MIB, 147.1e12, 425, over_pcie=True),
    "rtx-5090": Accelerator(32_607 * MIB, 209.5e12, 575, over_pcie=True),
}
_OTHER_FORMS = frozenset(("d", "laptop", "max", "mig", "nvl", "pcie"))


def _copies(gb_per_s: int) -> dict[str, float]:
    return {"to host": gb_per_s * GB, "from host": gb_per_s * GB}


def _products(accelerator: str) -> dict[str, float]:
    return {"products": _PRODUCTS * ACCELERATORS[accelerator].peak_flops}


_A100_SXM_80GB = _copies(21) | {"memory": 1_173 * GB, "all-reduce of 8": 228 * GB} | _products("a100")

# Bytes/s of copies and memory, FLOP/s of products, all-reduce over 8 devices.
_RATES: dict[str, dict[str, float]] = {
    "h200-nvl": _copies(48) | {"memory": 2_212 * GB},
    "h200": _copies(48) | {"memory": 2_333 * GB, "all-reduce of 8": 431 * GB} | _products("h200"),
    "h100-nvl": _copies(48),
    "h100-pcie": _copies(48),
    "h100-80gb": _copies(48) | {"memory": 1_905 * GB, "all-reduce of 8": 460 * GB} | _products("h100"),
    "a100-sxm4-80gb": _A100_SXM_80GB,
    "a100-sxm-80gb": _A100_SXM_80GB,  # as older drivers call it
    "a100": _copies(21) | _products("a100"),
    "b200": {"memory": 4_072 * GB} | _products("b200"),
}


def accelerator_called(name: str) -> Accelerator | None:
    """name: as a driver gives it ("NVIDIA A100-SXM4-80GB"). None for a form that the table does not have."""
    return None if _words(name) & _OTHER_FORMS else _first(ACCELERATORS, name)


def peak_flops(name: str) -> float | None:
    """FLOP/s of dense bfloat16 that the maker says of a device of this name; None where it is in no row."""
    least = published(name).get("products")
    return None if least is None else least / _PRODUCTS


def published(name: str) -> Mapping[str, float]:
    """The least that a device of this name reaches, by the measures of `serve.load.device_rates`; empty where nothing
    is published."""
    return _first(_RATES, name) or {}


def _first(table: Mapping[str, _Row], name: str) -> _Row | None:
    words = _words(name)
    return next((row for key, row in table.items() if words.issuperset(key.split("-"))), None)


def _words(name: str) -> frozenset[str]:
    return frozenset(name.lower().replace("-", " ").split())
