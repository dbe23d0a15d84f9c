"""TensorBoard event files of a run."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)


class TensorboardWriter:
    """Only rank 0 has one. Steps that were written before a resume are purged. A full disk costs points of a curve and
    no step; the next point is tried with a new file."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: SummaryWriter | None = None
        self._full = False

    def write(self, group: str, step: int, values: dict[str, float]) -> None:
        try:
            if self._writer is None:
                self._writer = SummaryWriter(str(self._directory), purge_step=step, flush_secs=10)
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)
            self._full = False
        except OSError as error:
            if not self._full:
                log.warning("curves have a gap, %s cannot be written: %s", self._directory, error.strerror)
            self._full, self._writer = True, None

    def close(self) -> None:
        """Write out what is buffered: the process ends without any of Python's own clean-up."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            log.warning("the last points are lost, %s cannot be written: %s", self._directory, error.strerror)
