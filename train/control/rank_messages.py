"""What one rank tells the others that is not numbers: as JSON, never pickled.

torch's own way (`broadcast_object_list`) unpickles what came over the wire, and who unpickles runs what was sent. Ranks
talk over loopback, where every user of the machine may connect while a world forms.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator


def told_by_first(value: Any) -> Any:
    """`value` of rank 0, on every rank; it must be plain JSON. Collective; what other ranks give is not looked at."""
    device = torch.device(get_accelerator().current_device_name())
    written = json.dumps(value).encode() if comm.get_rank() == 0 else b""
    length = torch.tensor([len(written)], dtype=torch.int64, device=device)
    comm.broadcast(length, src=0)
    told = torch.empty(int(length), dtype=torch.uint8, device=device)
    if written:
        told.copy_(torch.frombuffer(bytearray(written), dtype=torch.uint8))
    comm.broadcast(told, src=0)
    return json.loads(bytes(told.cpu().tolist()))
