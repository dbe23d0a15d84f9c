"""What an Xid, the driver's number for an error of an NVIDIA GPU, says of the GPU itself.

Source: NVIDIA's catalogue of Xid errors (docs.nvidia.com/deploy/xid-errors), its column "immediate action", as of
October 2025. An Xid that the catalogue does not name counts as a fault of the GPU.
"""

from __future__ import annotations

# "Restart the application": a program caused them, or, as with a contained memory error (94), only a program suffers.
# Its rank or engine ends, and that death is counted (scheduler.devices.health).
_OF_THE_APPLICATION = frozenset(
    {8, 11, 13, 25, 31, 32, *range(39, 42), 60, *range(68, 73), *range(75, 78), 80, *range(82, 87), 88, 89, 94}
    | {*range(96, 106), *range(126, 136), 139}
)
# "Ignore" and "observe", such as a memory row that was replaced (63) and a high rate of corrected errors (92). 45 is
# the end of a channel after another Xid, which is reported by itself; 154: the advice of another one has changed.
_TO_OBSERVE = frozenset(
    {14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 121, 137, 141, 152, 153, 154, 157, 160, 161}
)
_RESET = frozenset({46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
_RESTART_THE_MACHINE = frozenset({79})


def fault_of(xid: int) -> str:
    """What this Xid says is wrong with the GPU, with what to do, to follow "the GPU"; "" if nothing is."""
    if xid in _OF_THE_APPLICATION or xid in _TO_OBSERVE:
        return ""
    if xid in _RESET:
        return f"reported Xid {xid} and needs a reset (`nvidia-smi --gpu-reset`)"
    if xid in _RESTART_THE_MACHINE:
        return f"reported Xid {xid}: it has left the bus, the machine needs a restart"
    return f"reported Xid {xid}; NVIDIA's catalogue of Xid errors says what to do"
