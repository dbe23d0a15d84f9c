"""Makes the gradient of an output head's weight from its logits' gradients, which come in chunks of rows."""

from __future__ import annotations

import torch

from runtime.devices.kinds import in_host_memory
from train.plan.estimate import DEVICE_LOGITS_BYTES, HOST_LOGITS_BYTES, held_rows


def chunk_rows(hidden: torch.Tensor, vocabulary: int) -> int:
    """Rows of `hidden` whose logits are made at a time: 64 MB of them in float32 on a processor, 256 MB on a GPU, where
    each chunk reads the head's weight twice. (With 64 MB, 131 rows of a vocabulary of 128k, that took longer than the
    arithmetic.)"""
    chunk_bytes = HOST_LOGITS_BYTES if in_host_memory(hidden.device) else DEVICE_LOGITS_BYTES
    return max(1, min(hidden.shape[0], chunk_bytes // (4 * vocabulary)))


class HeadGradient:
    """grad.T @ hidden, for rows that come in order.

    The logits' gradients are held for as many rows as take no more memory than a float32 sum of the weight's size, and
    then multiplied at once. One product per chunk, added up in float32, moved 6 bytes per element of the weight each
    time: 2 ms for 131 rows (vocabulary 128k, width 4096), twice the arithmetic.
    """

    def __init__(self, hidden: torch.Tensor, vocabulary: int, chunk: int):
        """hidden (n, width); `chunk`: the most rows that `add` gets."""
        self._hidden, self._n = hidden, hidden.shape[0]
        rows = held_rows(self._n, chunk, hidden.shape[1], hidden.element_size())
        self._held = hidden.new_empty((rows, vocabulary))
        self._first = self._end = 0
        self._sum: torch.Tensor | None = None

    def add(self, grad: torch.Tensor) -> torch.Tensor:
        """The next rows' gradient (rows, vocabulary); returns it in hidden's dtype, good until the next call."""
        rows = grad.shape[0]
        if self._end + rows - self._first > len(self._held):
            self._multiply()
        place = self._held[self._end - self._first : self._end - self._first + rows]
        self._end += rows
        return place.copy_(grad)

    def total(self) -> torch.Tensor | None:
        """(vocabulary, width) in hidden's dtype; None if there were no rows."""
        if self._end > self._first:
            self._multiply()
        return None if self._sum is None else self._sum.to(self._hidden.dtype)

    def _multiply(self) -> None:
        part = self._held[: self._end - self._first].t() @ self._hidden[self._first : self._end]
        self._first = self._end
        if self._sum is not None:
            self._sum.add_(part)
        else:  # several parts are added in float32, or the small late ones would be rounded away
            self._sum = part if self._n <= len(self._held) else part.float()
