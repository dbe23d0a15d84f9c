"""What makers publish of devices, by the name that the driver gives them."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Accelerator:
    """memory_bytes: of one, as nvidia-smi shows it; the driver keeps some hundreds of MB of it (runtime.devices.cuda).
    peak_flops: FLOP/s of dense bfloat16 products that add up in float32, board_w: the power of the board, both as its
    maker publishes them, of the form with the most (SXM). over_pcie: it is joined to others by PCIe alone."""

    memory_bytes: int
    peak_flops: float
    board_w: int
    over_pcie: bool = False


# A name is the words that a driver's name has, in any order, joined by dashes. The first row that fits
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


def accelerator_called(name: str) -> Accelerator | None:
    """name: as a driver gives it ("NVIDIA A100-SXM4-80GB"). None for a form that the table does not have."""
    words = _words(name)
    if words & _OTHER_FORMS:
        return None
    return next((row for key, row in ACCELERATORS.items() if words.issuperset(key.split("-"))), None)


def peak_flops(name: str) -> float | None:
    """FLOP/s of dense bfloat16 that the maker says of a device of this name; None where it is in no row."""
    found = accelerator_called(name)
    return None if found is None else found.peak_flops


def _words(name: str) -> frozenset[str]:
    return frozenset(name.lower().replace("-", " ").split())
