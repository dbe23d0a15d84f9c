"""Sends plain values between the ranks of a world over the host: flags, and JSON of rank 0, never pickled.

torch's `broadcast_object_list` unpickles received bytes, which can run code from the sender. Ranks talk over loopback,
where every user of the machine may connect while a world forms.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import distributed


def any_rank(*flags: bool) -> list[bool]:
    """Collective: for each flag whether it is set on any rank. No device waits for it."""
    message = torch.tensor(flags, dtype=torch.int32)
    distributed.all_reduce(message, op=distributed.ReduceOp.MAX, group=_over_the_host())
    return [bool(flag) for flag in message.tolist()]


def broadcast_json(value: Any) -> Any:
    """`value` of rank 0, on every rank; it must be plain JSON. Collective; it ignores the values of other ranks."""
    written = json.dumps(value).encode() if distributed.get_rank() == 0 else b""
    length = torch.tensor([len(written)], dtype=torch.int64)
    distributed.broadcast(length, src=0, group=_over_the_host())
    received = torch.empty(int(length), dtype=torch.uint8)
    if written:
        received.copy_(torch.frombuffer(bytearray(written), dtype=torch.uint8))
    distributed.broadcast(received, src=0, group=_over_the_host())
    return json.loads(bytes(received.tolist()))


def barrier() -> None:
    """Collective: return when every rank has called it. No device waits for it."""
    distributed.barrier(group=_over_the_host())


@cache
def _over_the_host() -> distributed.ProcessGroup | None:
    """All ranks by gloo; None: the default group is that. Its first call is collective."""
    return None if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
