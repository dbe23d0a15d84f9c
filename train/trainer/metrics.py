"""Measures and reports steps and validations: sums over all ranks, events of rank 0, curves for TensorBoard."""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.utils.timer import SynchronizedWallClockTimer
from torch.utils.tensorboard import SummaryWriter

from runtime.devices.kinds import kind_of
from train.control.rank import Rank
from train.data.packing import StepData
from train.methods.method import Method
from train.plan.errors import TrainingDiverged

log = logging.getLogger(__name__)


class Metrics:
    """One rank's part in the reports of a run."""

    def __init__(self, rank: Rank, method: Method):
        self._method, self._engine, self._grid, self._emit = method, rank.engine, rank.grid, rank.emit
        self._on_host = kind_of(rank.spec.device_kind).on_host
        self._reported, self._began_s = rank.reported, 0.0
        # Times each forward pass, which a rank computes by itself. All ranks end a step together, so the time of a step
        # cannot show a slow rank.
        self.forward_timer = SynchronizedWallClockTimer.Timer("forward")
        self._curves_folder = str(Path(rank.spec.run_dir) / "tb")
        self._curves: SummaryWriter | None = None

    def begin(self) -> torch.Tensor:
        """Begin a step or a validation; return a zero on the device to add losses to."""
        self._began_s = time.perf_counter()
        self._engine.module.take_metrics()
        self.forward_timer.reset()
        return torch.zeros((), dtype=torch.float32, device=self._engine.device)

    def end_step(self, step: int, loss: torch.Tensor, data: StepData, **fields: Any) -> None:
        """Collective: report that `step` steps are done. loss: this rank's part. fields: further fields of the event.
        Raises TrainingDiverged, on every rank."""
        seconds = torch.zeros(self._grid.world_size, dtype=torch.float32, device=loss.device)
        seconds[self._grid.rank] = self.forward_timer.elapsed() / 1000
        total, named, rank_seconds = self._summed(loss, seconds)
        grad_norm = float(self._engine.get_global_grad_norm() or 0.0)
        if not (math.isfinite(total) and math.isfinite(grad_norm)):
            raise TrainingDiverged(step, total, grad_norm)
        if self._grid.rank:
            return
        full_s, waited = time.perf_counter() - self._began_s, data.waited
        training_s = full_s - sum(waited.values())
        metrics = {
            "loss": total,
            "grad_norm": grad_norm,
            "learning_rate": fields["learning_rate"],
            "tokens_per_s": data.tokens / full_s,
            **named,
            **data.figures,
        }
        self._write_curves("train", step, metrics)
        if not self._on_host:
            metrics["memory_bytes"] = torch.accelerator.max_memory_allocated(self._engine.device)
        timing = {"timing": {"step": {**waited, "training": training_s, "full_iteration": full_s}}} if waited else {}
        report = {"at_s": round(time.time(), 3), "step": step, "devices": self._grid.world_size, "tokens": data.tokens}
        report |= fields | metrics | {"rank_seconds": [round(rank_s, 4) for rank_s in rank_seconds]} | timing
        self._reported.append(report)
        self._emit("metrics", **report)

    def end_validation(self, loss: torch.Tensor) -> dict[str, float]:
        """Collective: the scores of a validation by name. loss: this rank's part."""
        total, named, _ = self._summed(loss, loss.new_zeros(0))
        return {"loss": total, **named}

    def report_validation(self, step: int, total_steps: int, scores: dict[str, float]) -> None:
        if self._grid.rank == 0:
            self._write_curves("validation", step, scores)
        self._emit("validation", step=step, total_steps=total_steps, **scores)

    def _write_curves(self, group: str, step: int, values: dict[str, float]) -> None:
        """Write points of curves for TensorBoard; after a resume, later points of the earlier run are purged. A full
        disk costs points and not the job; the next point is tried with a new file."""
        try:
            if self._curves is None:
                self._curves = SummaryWriter(self._curves_folder, purge_step=step, flush_secs=10)
            for name, value in values.items():
                self._curves.add_scalar(f"{group}/{name}", value, step)
        except OSError as error:
            log.warning("curves have a gap, %s cannot be written: %s", self._curves_folder, error.strerror)
            self._curves = None

    def close(self) -> None:
        """Flush the curves: the process ends without Python's own clean-up."""
        if self._curves is not None:
            with suppress(OSError):  # on a full disk the last points are lost
                self._curves.close()

    def _summed(self, loss: torch.Tensor, more: torch.Tensor) -> tuple[float, dict[str, float], list[float]]:
        """Collective: sums over all ranks: the loss, accuracy and the method's metrics by name, and `more`."""
        n_metrics = len(self._method.metric_names)
        own = torch.zeros(3 + n_metrics, dtype=torch.float32, device=loss.device)
        sums = self._engine.module.take_metrics()
        if self._grid.tensor_rank == 0:  # the other ranks of the group have the same values
            own[0] = loss
            own[1 : 1 + len(sums)] = torch.tensor(sums)
        message = torch.cat([own, more])
        comm.all_reduce(message)
        total, correct, trained, *rest = message.tolist()
        accuracy = {"mean_token_accuracy": correct / trained} if trained else {}
        return total, accuracy | dict(zip(self._method.metric_names, rest, strict=False)), rest[n_metrics:]
