"""Sends non-numeric values from one rank to the others as JSON, never pickled.

torch's `broadcast_object_list` unpickles received bytes, which can run code from the sender. Ranks talk over loopback,
where every user of the machine may connect while a world forms.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator


def broadcast_json(value: Any) -> Any:
    """`value` of rank 0, on every rank; it must be plain JSON. Collective; it ignores the values of other ranks."""
    device = torch.device(get_accelerator().current_device_name())
    written = json.dumps(value).encode() if comm.get_rank() == 0 else b""
    length = torch.tensor([len(written)], dtype=torch.int64, device=device)
    comm.broadcast(length, src=0)
    received = torch.empty(int(length), dtype=torch.uint8, device=device)
    if written:
        received.copy_(torch.frombuffer(bytearray(written), dtype=torch.uint8))
    comm.broadcast(received, src=0)
    return json.loads(bytes(received.cpu().tolist()))
