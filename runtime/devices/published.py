"""What makers publish of devices, by the name that the driver gives them."""

from __future__ import annotations

# FLOP/s of dense bfloat16 products that add up in float32, of the form with the most (SXM). A name is the words that a
# driver's name has, in any order, joined by dashes. The first row that fits counts: a narrower name stands before the
# wider one.
PEAK_FLOPS = {
    "a10": 125e12,
    "a100": 312e12,
    "a800": 312e12,
    "b200": 2250e12,
    "h20": 148e12,
    "h100": 989e12,
    "h800": 989e12,
    "h200": 989e12,
    "l20": 119.5e12,
    "l4": 121e12,
    "l40s": 362e12,
    "rtx-3090": 71e12,
    "rtx-4090": 165.2e12,
    "rtx-4090d": 147.1e12,
    "rtx-5090": 209.5e12,
}
_OTHER_FORMS = frozenset(("d", "laptop", "max", "mig", "nvl", "pcie"))


def peak_flops(name: str) -> float | None:
    """name: as a driver gives it ("NVIDIA A100-SXM4-80GB"). None for a form that the table does not have."""
    words = frozenset(name.lower().replace("-", " ").split())
    if words & _OTHER_FORMS:
        return None
    return next((flops for key, flops in PEAK_FLOPS.items() if words.issuperset(key.split("-"))), None)
