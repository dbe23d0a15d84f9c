"""What published sources say that a sound device reaches, by the name that its driver gives it.

- Copies, and all-reduce over eight: the thresholds of Azure's node health checks (azurehpc-health-checks, conf/), which
  a node that is handed to a customer passes.
- Its own memory: NVIDIA's minima for the test of memory bandwidth (DCGM, diag-skus.yaml).
- Products of matrices: six tenths of the maker's figure for dense bfloat16. Large products of a sound device reach two
  thirds to four fifths of it, and its power limit decides where in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

GB = 1e9
_PRODUCTS = 0.6
# Words that are all in a device's name -> bytes/s of copies and memory, FLOP/s of products, all-reduce over 8 devices.
# The first row that fits counts: a narrower name stands before the wider one.
_ROWS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("H200", "NVL"), {"to host": 48 * GB, "from host": 48 * GB, "memory": 2_212 * GB}),
    (
        ("H200",),
        {
            "to host": 48 * GB,
            "from host": 48 * GB,
            "memory": 2_333 * GB,
            "products": _PRODUCTS * 989e12,
            "all-reduce of 8": 431 * GB,
        },
    ),
    (("H100", "NVL"), {"to host": 48 * GB, "from host": 48 * GB}),
    (("H100", "PCIe"), {"to host": 48 * GB, "from host": 48 * GB}),
    (
        ("H100", "80GB"),
        {
            "to host": 48 * GB,
            "from host": 48 * GB,
            "memory": 1_905 * GB,
            "products": _PRODUCTS * 989e12,
            "all-reduce of 8": 460 * GB,
        },
    ),
    (
        ("A100", "SXM", "80GB"),
        {
            "to host": 21 * GB,
            "from host": 21 * GB,
            "memory": 1_173 * GB,
            "products": _PRODUCTS * 312e12,
            "all-reduce of 8": 228 * GB,
        },
    ),
    (("A100",), {"to host": 21 * GB, "from host": 21 * GB, "products": _PRODUCTS * 312e12}),
    (("B200",), {"memory": 4_072 * GB, "products": _PRODUCTS * 2_250e12}),
)


def peak_flops(name: str) -> float | None:
    """FLOP/s of dense bfloat16 that the maker says of a device of this name; None where it is in no row."""
    least = published(name).get("products")
    return None if least is None else least / _PRODUCTS


def published(name: str) -> Mapping[str, float]:
    """The least that a device of this name reaches, by the measures of `serve.load.device_rates`; empty where nothing
    is published."""
    words = name.casefold()
    for wanted, rates in _ROWS:
        if all(word.casefold() in words for word in wanted):
            return MappingProxyType(rates)
    return MappingProxyType({})
