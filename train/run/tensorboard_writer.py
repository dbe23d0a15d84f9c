"""TensorBoard event files of a run."""

from __future__ import annotations

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter


class Board:
    """Only rank 0 has one. Steps already written before a resume are purged."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._writer: SummaryWriter | None = None

    def write(self, group: str, step: int, values: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = SummaryWriter(str(self._directory), purge_step=step, flush_secs=10)
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Write out what is buffered: the process ends without any of Python's own clean-up."""
        if self._writer is not None:
            self._writer.close()
